"""Communicators for CPU ranks: shared memory within one host, and gloo. Importing this loads nothing."""

from __future__ import annotations
