"""Conformance tests for plugin authors (subclass one class, run pytest), and small fakes. Not for package code."""

from __future__ import annotations
