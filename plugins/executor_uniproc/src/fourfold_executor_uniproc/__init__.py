"""Executors that start no process: one rank in the caller's, or ranks that a launcher has started."""

from __future__ import annotations
