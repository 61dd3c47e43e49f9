"""Triton kernels for CUDA devices, compiled at first use; decode steps as CUDA graphs. Importing this loads nothing."""

from __future__ import annotations
