"""The in-process executor: one rank, no copies, easiest to debug."""

from __future__ import annotations
