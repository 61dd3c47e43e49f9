"""The multi-process executor: one fresh interpreter per rank on this host."""

from __future__ import annotations
