"""One step's kernels, recorded once and replayed by a single call in one team of threads.

What is recorded are addresses: weights, persistent inputs and the program's own arena. Lengths, positions, block tables
and ids are read from their tensors at each replay; sizes of tensors are fixed at capture.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from fourfold.errors import Unsupported
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold_kernels_cpu.native import Native, load

_ALIGNMENT: Final = 64
_HARMLESS: Final = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach"})
"""Operations that compute nothing and are no views."""


class KernelProgram:
    """A list of kernel calls. ``with program.capture(): ...`` runs and records, ``replay()`` runs them again.

    The results are the tensors that the captured code returned; each replay writes them anew.
    """

    def __init__(self, native: Native | None = None) -> None:
        self._native = native or load()
        self._calls: list[tuple[int, bytes]] = []
        self._tensors: list[torch.Tensor] = []
        self._arena = _Arena()
        self._records: ctypes.Array[ctypes.c_int64] | None = None
        self._slots: ctypes.Array[ctypes.c_char] | None = None
        self._address = 0

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record every kernel that runs inside; any other computing torch operation is refused by name."""
        if self._native.recorder is not None:
            raise Unsupported("a kernel program is being captured already; captures do not nest")
        if self._records is not None:
            raise Unsupported("this kernel program is captured already; make a new one")
        self._native.recorder = self
        try:
            with _RefuseCompute():
                yield
        finally:
            self._native.recorder = None
        self._seal()

    def replay(self) -> None:
        """Run the recorded calls."""
        if self._records is None:
            raise Unsupported("this kernel program is empty; capture it first")
        self._native.replay(self._address, len(self._calls))

    def record(self, body: int, slots: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        """Note one call; see ``native.Recorder``."""
        self._calls.append((body, slots))
        self._tensors.extend(tensor for tensor in tensors if tensor is not None and not self._arena.owns(tensor))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the program, reused once the captured code has let go of it."""
        return self._arena.empty(shape, dtype)

    def _seal(self) -> None:
        self._slots = ctypes.create_string_buffer(b"".join(slots for _, slots in self._calls) or b"\0")
        address = ctypes.addressof(self._slots)
        records: list[int] = []
        for body, slots in self._calls:
            records += (body, address)
            address += len(slots)
        self._records = (ctypes.c_int64 * max(len(records), 1))(*records)
        self._address = ctypes.addressof(self._records)


class _Arena:
    """Reuses memory like an allocator would, but keeps all of it for as long as the program lives."""

    def __init__(self) -> None:
        self._blocks: list[ctypes.Array[ctypes.c_char]] = []
        self._ranges: set[int] = set()
        self._free: dict[int, list[int]] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._ranges

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elements = 1
        for extent in shape:
            elements *= extent
        size = -(-max(elements * dtype.itemsize, 1) // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, [])
        address = free.pop() if free else self._new_block(size)
        holder = (ctypes.c_char * size).from_address(address)
        # Runs when the last tensor over this memory is gone.
        weakref.finalize(holder, free.append, address)
        return torch.frombuffer(holder, dtype=dtype, count=max(elements, 1))[:elements].view(shape)

    def _new_block(self, size: int) -> int:
        block = ctypes.create_string_buffer(size + _ALIGNMENT)
        self._blocks.append(block)
        address = -(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT
        self._ranges.add(address)
        return address


class _RefuseCompute(TorchDispatchMode):
    """Lets views and allocations through; anything that computes would be missing from the program."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in _HARMLESS:
            raise Unsupported(f"{name} ran while a kernel program was captured; only this plugin's kernels can be")
        return func(*args, **(kwargs or {}))
