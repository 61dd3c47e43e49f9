"""Moves messages through the memory of a pipe in C++: looks shortly, yields, then sleeps on a futex."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from fourfold_comm_cpu.native import load

if TYPE_CHECKING:
    import torch

    from fourfold_comm_cpu.layout import PipeLayout

_SPINS: Final = 100
"""Looks at a counter, some 3 us, before giving the core away: the peer may need this very core to go on."""
_YIELD_NS: Final = 50_000


class _State(ctypes.Structure):
    """``Pipe`` of csrc/pipe.cpp."""

    _fields_: ClassVar = [
        ("head", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("yield_ns", ctypes.c_int64),
    ]


class NativePump:
    """See ``fourfold_comm_cpu.pipe.Pump``."""

    def __init__(self, memory: torch.Tensor, layout: PipeLayout, timeout: float) -> None:
        library = load()
        base = memory.data_ptr()
        self._memory = memory  # uint8; keeps the mapping
        self._state = _State(
            head=base,
            slots=base + layout.slots,
            slot_bytes=layout.slot_bytes,
            depth=layout.depth,
            timeout_ns=int(timeout * 1e9),
            spins=_SPINS,
            yield_ns=_YIELD_NS,
        )
        self._address = ctypes.addressof(self._state)
        self._send, self._receive = library.ff_pipe_send, library.ff_pipe_receive

    def send(self, parts: Sequence[torch.Tensor]) -> bool:
        """See Pump."""
        return bool(self._send(self._address, *_pieces(parts)) == 0)

    def receive(self, parts: Sequence[torch.Tensor]) -> int:
        """See Pump."""
        length: int = self._receive(self._address, *_pieces(parts))
        return length


def _pieces(parts: Sequence[torch.Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64], int]:
    count = len(parts)
    addresses = (ctypes.c_void_p * count)(*[part.data_ptr() for part in parts])
    return addresses, (ctypes.c_int64 * count)(*[part.nbytes for part in parts]), count
