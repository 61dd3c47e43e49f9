"""Memory for packed weights on transparent huge pages: reading weights is bound by memory, and 4 KiB pages cost TLB.

Replicas of one deployment have one copy of it.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import torch

from fourfold.shared_memory import SharedRegion, free_pages, take_huge_pages

_HUGE: Final = 2 << 20
_CHUNK: Final = 32 << 20
_ALIGNMENT: Final = 4096


class WeightArena:
    """Hands out zeroed bf16 tensors that live as long as they are used; small ones share a mapping."""

    def __init__(self, shared: SharedRegion | None = None) -> None:
        """``shared``: where other replicas find the same weights; None: nowhere."""
        self.shared = shared
        self._mapping: mmap.mmap | ctypes.Array[ctypes.c_char] | None = None
        self._private: list[mmap.mmap] = []
        self._common: list[ctypes.Array[ctypes.c_char]] = []
        self._next = 0
        self._end = 0

    def zeros(self, elements: int) -> torch.Tensor:
        """A bf16 tensor of that many elements, aligned to a page; zeroed unless another replica has filled it."""
        size = max(elements * 2, 2)
        if self._mapping is None or self._next + size > self._end:
            if self.shared is not None:
                self._mapping = self.shared.take(max(size, _CHUNK))
                self._common.append(self._mapping)
                self._next, self._end = 0, len(self._mapping)
                return self._cut(elements, size)
            length = -(-max(size, _CHUNK) // _HUGE) * _HUGE + _HUGE
            self._mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._private.append(self._mapping)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            self._next = -address % _HUGE
            self._end = length
        return self._cut(elements, size)

    def clear(self) -> None:
        """Give the pages of everything that was handed out back, in all replicas; it is zero then, where it was."""
        for mapping in self._private:
            mapping.madvise(mmap.MADV_DONTNEED)
        for memory in self._common:
            free_pages(memory)

    def prepare(self) -> None:
        """Take huge pages for what is about to be filled again, as far as they do not come by themselves."""
        for memory in self._common:
            take_huge_pages(memory)

    def _cut(self, elements: int, size: int) -> torch.Tensor:
        offset = self._next
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._mapping, dtype=torch.bfloat16, count=max(elements, 1), offset=offset)[:elements]
