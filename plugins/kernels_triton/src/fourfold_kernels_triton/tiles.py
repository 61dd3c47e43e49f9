"""Sizes of tiles and numbers of splits: what fits a multiprocessor and fills the device. Knows no tensor's content."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

PROGRAMS_EACH: Final = 4
"""Programs of a decode kernel that a multiprocessor runs at a time."""
LEAST_SPLITS: Final = 4
"""Of a batch that fills the device anyway: a long context among short ones must not be read by one program."""
FEW_TILES: Final = 2
MANY_TILES: Final = 8
"""Tiles that a split has at least; many where there is work enough, since each split is combined in the end."""


class Tile(NamedTuple):
    """The shape of one program's work."""

    rows: int
    tokens: int
    warps: int
    stages: int


class Split(NamedTuple):
    """How a context is cut: into ``most`` parts, of ``min_tiles`` tiles at least."""

    most: int
    min_tiles: int


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; elsewhere kernels are interpreted, one program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_tile(head_dim: int, *, wide: bool, scaled: bool) -> Tile:
    """For one token a sequence; ``head_dim`` is padded, ``wide`` is fp32, ``scaled`` an fp8 cache."""
    if wide:
        return Tile(rows=1, tokens=32 if head_dim <= 128 else 16, warps=4, stages=2)
    keys = 16384 if scaled else 8192  # 16 KB
    return Tile(rows=1, tokens=min(max(keys // head_dim, 32), 128), warps=4, stages=2)


def prefill_tile(head_dim: int, *, wide: bool) -> Tile:
    """For prompts; ``rows`` are query tokens times query heads of a kv head."""
    if wide:
        return Tile(rows=32, tokens=32 if head_dim <= 128 else 16, warps=4, stages=2)
    if head_dim <= 128:
        return Tile(rows=128, tokens=64, warps=8, stages=2)
    return Tile(rows=64, tokens=32, warps=8, stages=2)


def split_context(pairs: int, longest: int, tile: int, num_multiprocessors: int) -> Split:
    """For ``pairs`` of a sequence and a kv head with contexts of up to ``longest`` tokens.

    Whole numbers from upper bounds alone, so that a recorded launch is right for every context.
    """
    wanted = num_multiprocessors * PROGRAMS_EACH
    few = pairs >= wanted
    min_tiles = MANY_TILES if few else FEW_TILES
    count = LEAST_SPLITS if few else max(-(-wanted // pairs), LEAST_SPLITS)
    useful = -(-max(longest, 1) // (tile * min_tiles))
    return Split(most=min(count, useful), min_tiles=min_tiles)
