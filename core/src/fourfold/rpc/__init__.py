"""Ranks in processes of their own, each at the other end of a stream: calls, replies, deadlines, the end."""

from __future__ import annotations
