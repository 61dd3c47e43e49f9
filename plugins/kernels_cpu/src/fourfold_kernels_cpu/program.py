"""One step's kernels, recorded once and replayed by a single call in one team of threads.

What is recorded are addresses: weights, persistent inputs and the program's memory. Lengths, positions, block tables
and ids are read from their tensors at each replay; the sizes of tensors are fixed at capture.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.contracts.host_recording import recording
from fourfold.errors import Unsupported
from fourfold_kernels_cpu.native import Native, load
from fourfold_kernels_cpu.program_memory import ProgramMemory

_CALL: Final = struct.Struct("<2q")
_HARMLESS: Final = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach"}
)
"""Operations that compute nothing and are no views."""


class KernelProgram:
    """A list of kernel calls: ``with program.capture(): ...`` records them, ``replay()`` runs them.

    Nothing is computed during capture; the results are the tensors that the captured code made, and each replay writes
    them anew.
    """

    def __init__(self, *, memory: ProgramMemory | None = None, native: Native | None = None) -> None:
        self._native = native or load()
        self._memory = memory or ProgramMemory()
        self._calls: list[tuple[int, bytes]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._kept: list[object] = []
        self._slots: ctypes.Array[ctypes.c_char] | None = None
        self._records: ctypes.Array[ctypes.c_int64] | None = None
        self._address = 0

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record every kernel called inside; any other torch operation that computes is refused by name."""
        if self._native.recorder is not None:
            raise Unsupported("a kernel program is being captured already; captures do not nest")
        if self._records is not None:
            raise Unsupported("this kernel program is captured already; make a new one")
        self._native.recorder = self
        try:
            with recording(self), _RefuseCompute():  # type: ignore[no-untyped-call]
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
        for tensor in tensors:
            if tensor is not None and not self._memory.owns(tensor):
                self._tensors[id(tensor)] = tensor

    def record_call(
        self, function: int, argument: int, *, tensors: Sequence[torch.Tensor], keep: Sequence[object]
    ) -> None:
        """Note a call of somebody else's C function; see ``fourfold.contracts.host_recording.HostRecorder``."""
        self._kept += keep
        self._native.call("call", _CALL.pack(function, argument), *tensors)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the program, reused once the captured code has let go of it."""
        return self._memory.empty(shape, dtype)

    def _seal(self) -> None:
        self._slots = ctypes.create_string_buffer(b"".join(slots for _, slots in self._calls) or b"\0")
        address = ctypes.addressof(self._slots)
        records: list[int] = []
        for body, slots in self._calls:
            records += (body, address)
            address += len(slots)
        self._records = (ctypes.c_int64 * max(len(records), 1))(*records)
        self._address = ctypes.addressof(self._records)


class _RefuseCompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets views and allocations through; anything that computes would be missing from the program."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, wraps the method below for torch.compile, which imports all of it: over a second.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in _HARMLESS:
            raise Unsupported(f"{name} ran while a kernel program was captured; only this plugin's kernels can be")
        return func(*args, **(kwargs or {}))
