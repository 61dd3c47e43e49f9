"""Triton kernels. Each takes pointers and numbers, and is started by the class that allocates for it."""

from __future__ import annotations
