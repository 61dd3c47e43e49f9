"""A channel in C++: spins shortly, yields, then sleeps on a futex; every wait has a deadline."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from fourfold.contracts.host_recording import current_recorder
from fourfold_comm_cpu.layout import ChannelLayout
from fourfold_comm_cpu.native import load

if TYPE_CHECKING:
    from fourfold_comm_cpu.channel import Membership

SUMMABLE: Final = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int32,
            torch.int64,
            torch.int16,
            torch.int8,
            torch.uint8,
        )
    )
}
_MISSING: Final = 1 << 62
_SPINS: Final = 300
"""Looks at a counter, some 10 us. Longer would starve a peer that waits for this very core: stalls of 2 ms."""
_CROWDED_SPINS: Final = 50
_YIELD_NS: Final = 1_000_000
"""A peer that computes its share of a layer comes within that; on a core of its own a yield costs 0.3 us."""
_CROWDED_YIELD_NS: Final = 50_000


class _State(ctypes.Structure):
    """``ff::Channel`` of csrc/channel.h."""

    _fields_: ClassVar = [
        ("arrivals", ctypes.c_void_p),
        ("bell", ctypes.c_void_p),
        ("broken", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("world", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("spins", ctypes.c_int64),
        ("yield_ns", ctypes.c_int64),
        ("set", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("failed", ctypes.c_int64),
    ]


class _AllReduceCall(ctypes.Structure):
    """``AllReduceCall`` of csrc/collectives.cpp."""

    _fields_: ClassVar = [
        ("channel", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


class NativeChannel:
    """See ``fourfold_comm_cpu.channel.Channel``."""

    def __init__(self, memory: torch.Tensor, layout: ChannelLayout, member: Membership) -> None:
        self._library = load()
        self._memory: torch.Tensor | None = memory  # uint8; keeps the mapping
        self._base = memory.data_ptr()
        self._layout = layout
        self._member = member
        self._state = _State(
            arrivals=self._base,
            bell=self._base + layout.bell,
            broken=self._base + layout.broken,
            slots=self._base + layout.slots,
            rank=member.rank,
            world=layout.world_size,
            slot_bytes=layout.slot_bytes,
            timeout_ns=int(member.timeout * 1e9),
            spins=_CROWDED_SPINS if member.crowded else _SPINS,
            yield_ns=_CROWDED_YIELD_NS if member.crowded else _YIELD_NS,
        )
        self._address = ctypes.addressof(self._state)
        self._all_reduce = self._library.ff_all_reduce
        self._recorded_all_reduce = ctypes.cast(self._library.ff_all_reduce_call, ctypes.c_void_p).value or 0
        self._seen: dict[int, int] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Recorded where a step is being recorded."""
        code = SUMMABLE[tensor.dtype]
        recorder = current_recorder()
        if recorder is None:
            self._sum(self._all_reduce, tensor)
            return
        call = _AllReduceCall(self._address, tensor.data_ptr(), tensor.numel(), code)
        recorder.record_call(
            self._recorded_all_reduce, ctypes.addressof(call), tensors=(tensor,), keep=(call, self._state, self._memory)
        )

    def start_all_reduce(self, tensor: torch.Tensor) -> None:
        """See Channel."""
        self._sum(self._library.ff_start_all_reduce, tensor)

    def finish_all_reduce(self, tensor: torch.Tensor) -> None:
        """See Channel."""
        self._sum(self._library.ff_finish_all_reduce, tensor)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor, nbytes: Sequence[int]) -> None:
        """See Channel."""
        failure = self._library.ff_all_gather(self._address, tensor.data_ptr(), out.data_ptr(), _numbers(nbytes))
        if failure:
            self._fail(failure, f"all_gather of {list(nbytes)} bytes")

    def gather(self, tensor: torch.Tensor, out: Sequence[torch.Tensor], destination: int) -> None:
        """See Channel."""
        nbytes = tensor.numel() * tensor.element_size()
        apart = bool(out) and not all(place.is_contiguous() for place in out)
        row = nbytes // tensor.shape[0] if apart else nbytes
        targets = [number for place in out for number in (place.data_ptr(), _stride_bytes(place) if apart else nbytes)]
        arguments = (tensor.data_ptr(), _numbers(targets), nbytes, max(row, 1), destination)
        if failure := self._library.ff_gather(self._address, *arguments):
            self._fail(failure, f"gather of {tensor.dtype} {list(tensor.shape)} to {self._member.ranks[destination]}")

    def reduce_scatter(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        """See Channel."""
        failure = self._library.ff_reduce_scatter(
            self._address, tensor.data_ptr(), out.data_ptr(), _numbers(counts), SUMMABLE[tensor.dtype]
        )
        if failure:
            self._fail(failure, f"reduce_scatter of {tensor.dtype} {list(tensor.shape)}")

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See Channel."""
        nbytes = tensor.numel() * tensor.element_size()
        if failure := self._library.ff_broadcast(self._address, tensor.data_ptr(), nbytes, source):
            self._fail(failure, f"broadcast of {tensor.dtype} {list(tensor.shape)} from {self._member.ranks[source]}")

    def all_to_all(self, tensor: torch.Tensor, out: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """See Channel."""
        failure = self._library.ff_all_to_all(
            self._address, tensor.data_ptr(), out.data_ptr(), _numbers(send), _numbers(receive)
        )
        if failure:
            self._fail(failure, f"all_to_all that receives {list(receive)} bytes")

    def barrier(self) -> None:
        """See Channel."""
        if failure := self._library.ff_barrier(self._address):
            self._fail(failure, "barrier")

    def push(self, destination: int, data: torch.Tensor) -> int:
        """See Channel."""
        rank = self._member.rank
        return self._move(self._library.ff_push, rank, destination, data, destination)

    def pull(self, source: int, data: torch.Tensor) -> int:
        """See Channel."""
        return self._move(self._library.ff_pull, source, self._member.rank, data, source)

    def wait_for_message(self, sources: Sequence[int], destinations: Sequence[int], seconds: float) -> None:
        """See Channel."""
        rank, layout = self._member.rank, self._layout
        # What makes a reader go on is what is written, and a writer what is read.
        counters = [layout.ring_counters(source, rank) for source in sources]
        counters += [layout.ring_counters(rank, destination) + 64 for destination in destinations]
        addresses = [self._base + counter for counter in counters]
        seen = [self._seen.get(address, 0) for address in addresses]
        count = len(addresses)
        self._library.ff_wait_for_change(
            (ctypes.c_void_p * count)(*addresses),
            (ctypes.c_uint64 * count)(*seen),
            count,
            self._base + layout.message_bell(rank),
            _CROWDED_SPINS if self._member.crowded else _SPINS,
            max(1, int(seconds * 1e9)),
        )

    def close(self) -> None:
        """See Channel."""
        self._memory = None

    def _move(
        self, function: ctypes._NamedFuncPointer, source: int, destination: int, data: torch.Tensor, peer: int
    ) -> int:
        layout, base = self._layout, self._base
        counters = base + layout.ring_counters(source, destination)
        watched = counters + 64 if source == self._member.rank else counters
        self._seen[watched] = ctypes.c_uint64.from_address(watched).value
        moved: int = function(
            counters,
            base + layout.ring(source, destination),
            layout.ring_bytes,
            data.data_ptr(),
            data.numel(),
            base + layout.message_bell(peer),
        )
        return moved

    def _sum(self, function: ctypes._NamedFuncPointer, tensor: torch.Tensor) -> None:
        if failure := function(self._address, tensor.data_ptr(), tensor.numel(), SUMMABLE[tensor.dtype]):
            self._fail(failure, f"all_reduce of {tensor.dtype} {list(tensor.shape)}")

    def _fail(self, failure: int, operation: str) -> None:
        places = [place for place in range(self._layout.world_size) if failure >> place & 1]
        if failure & _MISSING:
            raise self._member.missing(operation, places)
        raise self._member.different(operation, places)


def _stride_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
