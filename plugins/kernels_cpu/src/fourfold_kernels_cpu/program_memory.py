"""Memory for the intermediate results of recorded programs.

It reuses what the recorded code lets go of, as an allocator would, and gives nothing back while programs live.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from typing import Final

import torch

_SMALLEST: Final = 4096


class ProgramMemory:
    """Blocks of powers of two. Programs that share one memory must not run at the same time."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}
        self._free: dict[int, list[int]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that is reused once no tensor lies over it any more."""
        elements = math.prod(shape)
        size = max(_SMALLEST, 1 << (max(elements, 1) * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(size, [])
        address = free.pop() if free else self._new_block(size)
        holder = (ctypes.c_char * size).from_address(address)
        weakref.finalize(holder, free.append, address)
        return _view(holder, shape, dtype, elements)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as another tensor, which does not keep it from being reused."""
        if not self.owns(tensor) or not tensor.is_contiguous():
            return tensor
        elements = math.prod(tensor.shape)
        holder = (ctypes.c_char * max(elements * tensor.dtype.itemsize, 1)).from_address(tensor.data_ptr())
        # The holder only points: it must keep the blocks mapped.
        weakref.finalize(holder, _nothing, self._blocks)
        return _view(holder, tuple(tensor.shape), tensor.dtype, elements)

    def _new_block(self, size: int) -> int:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self._blocks[address] = block
        return address


def _view(
    holder: ctypes.Array[ctypes.c_char], shape: tuple[int, ...], dtype: torch.dtype, elements: int
) -> torch.Tensor:
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(holder, dtype=dtype, count=elements).view(shape)


def _nothing(kept: object) -> None:
    """Only keeps its argument alive."""
