"""Faults at named points of a deployment, for tests."""

from __future__ import annotations
