"""Where commands print tables: folded to a terminal's width, whole lines into pipes and files."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 1000
"""Wider than any row."""


def output_console() -> Console:
    """A console on stdout that prints text as it is."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
