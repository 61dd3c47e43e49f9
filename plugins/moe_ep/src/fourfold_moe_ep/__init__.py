"""Expert parallelism: experts spread over ranks, and tokens that travel to them. Importing this loads nothing."""

from __future__ import annotations
