"""Collectives among CUDA ranks over NCCL. Importing this loads nothing."""

from __future__ import annotations
