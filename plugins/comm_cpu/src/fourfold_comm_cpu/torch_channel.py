"""The slow twin of ``NativeChannel`` in torch and numpy, for hosts without a compiler: same memory, same sums.

Its counters are plain stores, which other cores see in order on x86 only; elsewhere it is Unsupported.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from fourfold.contracts.host_recording import refuse_recording
from fourfold.errors import EngineError, Unsupported

if TYPE_CHECKING:
    from fourfold_comm_cpu.channel import Membership
    from fourfold_comm_cpu.layout import ChannelLayout

_YIELDS: Final = 2_000
"""Looks at a counter, giving the core away each time, before sleeping."""
_PAUSE: Final = 0.0005
_SIXTEEN_BIT: Final = (torch.bfloat16, torch.float16)


class TorchChannel:
    """See ``fourfold_comm_cpu.channel.Channel``."""

    def __init__(self, memory: torch.Tensor, layout: ChannelLayout, member: Membership) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise Unsupported(f"without a compiler, shared memory needs an x86-64 processor, not {platform.machine()}")
        world = layout.world_size
        self._layout = layout
        self._member = member
        self._memory: torch.Tensor | None = memory
        words = memory[: layout.slots].numpy().view(np.uint64).reshape(-1, 8)
        self._words = words
        self._arrivals = words[:world]
        self._broken = words[layout.broken // 64]
        self._slots = memory[layout.slots : layout.ring(0, 0)].view(2, world, layout.slot_bytes)
        self._set = 0
        self._sequence = 0
        self._failure: EngineError | None = None
        self._pause = threading.Event()  # never set: a way to wait for a time

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See Channel."""
        self.start_all_reduce(tensor)
        self.finish_all_reduce(tensor)

    def start_all_reduce(self, tensor: torch.Tensor) -> None:
        """See Channel."""
        self._put(next(self._pieces(tensor.view(-1))), _sum_of(tensor))

    def finish_all_reduce(self, tensor: torch.Tensor) -> None:
        """See Channel."""
        operation = _sum_of(tensor)
        for number, piece in enumerate(self._pieces(tensor.view(-1))):
            if number:
                self._put(piece, operation)
            self._wait_for_all(operation)
            piece.copy_(_sum(self._slot(piece.dtype, piece.numel())))
            self._set ^= 1

    def _put(self, piece: torch.Tensor, operation: str) -> None:
        """Of a sum; the meeting is waited for later."""
        self._slot(piece.dtype, piece.numel())[self._member.rank].copy_(piece)
        self._arrive(operation)

    def gather(self, tensor: torch.Tensor, out: Sequence[torch.Tensor], destination: int) -> None:
        """See Channel."""
        mine = _bytes(tensor)
        gathered = [torch.empty_like(tensor) for _ in out]
        targets = [_bytes(place) for place in gathered]
        operation = f"gather of {tensor.dtype} {list(tensor.shape)} to {self._member.ranks[destination]}"
        for first in range(0, max(mine.numel(), 1), self._layout.slot_bytes):
            piece = mine[first : first + self._layout.slot_bytes]
            if self._member.rank != destination:
                self._slots[self._set, self._member.rank, : piece.numel()].copy_(piece)
            self._meet(operation)
            for place, target in enumerate(targets):
                source = piece if place == destination else self._slots[self._set, place, : piece.numel()]
                target[first : first + piece.numel()].copy_(source)
            self._set ^= 1
        for final, found in zip(out, gathered):
            final.copy_(found)

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor, nbytes: Sequence[int]) -> None:
        """See Channel."""
        mine, target = _bytes(tensor), _bytes(out)
        starts = np.cumsum([0, *nbytes]).tolist()
        operation = f"all_gather of {list(nbytes)} bytes"
        for first in range(0, max(*nbytes, 1), self._layout.slot_bytes):
            sizes = [max(0, min(self._layout.slot_bytes, count - first)) for count in nbytes]
            size = sizes[self._member.rank]
            self._slots[self._set, self._member.rank, :size].copy_(mine[first : first + size])
            self._meet(operation)
            for place, count in enumerate(sizes):
                if count:
                    at = starts[place] + first
                    target[at : at + count].copy_(self._slots[self._set, place, :count])
            self._set ^= 1

    def reduce_scatter(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> None:
        """See Channel."""
        flat, target = tensor.view(-1), out.view(-1)
        own_first = sum(counts[: self._member.rank])
        own_last = own_first + counts[self._member.rank]
        operation = f"reduce_scatter of {tensor.dtype} {list(tensor.shape)} by {list(counts)}"
        first = 0
        for piece in self._pieces(flat):
            self._slot(piece.dtype, piece.numel())[self._member.rank].copy_(piece)
            self._meet(operation)
            start, end = max(own_first, first), min(own_last, first + piece.numel())
            if start < end:
                mine = self._slot(piece.dtype, piece.numel())[:, start - first : end - first]
                target[start - own_first : end - own_first].copy_(_sum(mine))
            self._set ^= 1
            first += piece.numel()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See Channel."""
        operation = f"broadcast of {tensor.dtype} {list(tensor.shape)} from {self._member.ranks[source]}"
        for piece in self._pieces(_bytes(tensor)):
            slot = self._slots[self._set, source, : piece.numel()]
            if source == self._member.rank:
                slot.copy_(piece)
            self._meet(operation)
            if source != self._member.rank:
                piece.copy_(slot)
            self._set ^= 1

    def all_to_all(self, tensor: torch.Tensor, out: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        """See Channel."""
        world, rank = self._layout.world_size, self._member.rank
        operation = f"all_to_all that receives {list(receive)} bytes"
        self._slot(torch.int64, world)[rank].copy_(torch.tensor(send))
        self._meet("all_to_all")
        sizes = self._slot(torch.int64, world).numpy().copy()
        self._set ^= 1
        wrong = [place for place in range(world) if sizes[place, rank] != receive[place]]
        if wrong:
            raise self._give_up(self._member.different(operation, wrong))
        self._all_to_all_pieces(_bytes(tensor), _bytes(out), sizes, receive)

    def _all_to_all_pieces(
        self, mine: torch.Tensor, target: torch.Tensor, sizes: npt.NDArray[np.int64], receive: Sequence[int]
    ) -> None:
        rank, slot_bytes = self._member.rank, self._layout.slot_bytes
        offsets = sizes[:, :rank].sum(axis=1).tolist()
        for first in range(0, int(sizes.sum(axis=1).max()), slot_bytes):
            piece = mine[first : first + slot_bytes]
            self._slots[self._set, rank, : piece.numel()].copy_(piece)
            self._meet("all_to_all")
            at = 0
            for place, count in enumerate(receive):
                start, end = max(offsets[place], first), min(offsets[place] + count, first + slot_bytes)
                if start < end:
                    to = at + start - offsets[place]
                    target[to : to + end - start].copy_(self._slots[self._set, place, start - first : end - first])
                at += count
            self._set ^= 1

    def barrier(self) -> None:
        """See Channel."""
        self._meet("barrier")

    def push(self, destination: int, data: torch.Tensor) -> int:
        """See Channel."""
        counters, ring = self._ring(self._member.rank, destination)
        written, read = int(counters[0, 0]), int(counters[1, 0])
        count = min(data.numel(), len(ring) - (written - read))
        for ours, place in _wrapped(written % len(ring), count, len(ring)):
            ring[place].copy_(data[ours])
        counters[0, 0] = written + count
        return count

    def pull(self, source: int, data: torch.Tensor) -> int:
        """See Channel."""
        counters, ring = self._ring(source, self._member.rank)
        written, read = int(counters[0, 0]), int(counters[1, 0])
        count = min(data.numel(), written - read)
        for ours, place in _wrapped(read % len(ring), count, len(ring)):
            data[ours].copy_(ring[place])
        counters[1, 0] = read + count
        return count

    def wait_for_message(self, sources: Sequence[int], destinations: Sequence[int], seconds: float) -> None:
        """Give the core away once, and now and then for longer; the caller looks again."""
        os.sched_yield()
        self._pause.wait(min(seconds, _PAUSE))

    def close(self) -> None:
        """See Channel."""
        self._memory = None
        self._slots = self._slots.new_empty(0)
        self._words = self._arrivals = self._words[:0].copy()
        self._broken = np.ones(1, np.uint64)

    def _slot(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """[world, count] of the current set."""
        return self._slots[self._set, :, : count * dtype.itemsize].view(dtype)

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        most = self._layout.slot_bytes // flat.element_size()
        yield from (flat[first : first + most] for first in range(0, max(flat.numel(), 1), most))

    def _ring(self, source: int, destination: int) -> tuple[npt.NDArray[np.uint64], torch.Tensor]:
        if self._memory is None:
            raise EngineError(f"the communicator of group {self._member.group} is closed")
        line = self._layout.ring_counters(source, destination) // 64
        start = self._layout.ring(source, destination)
        return self._words[line : line + 2], self._memory[start : start + self._layout.ring_bytes]

    def _meet(self, operation: str) -> None:
        """Arrive, wait for all, and compare what everybody is doing; see csrc/channel.h for why once is enough."""
        self._arrive(operation)
        self._wait_for_all(operation)

    def _arrive(self, operation: str) -> None:
        refuse_recording("shared memory without a compiler")
        if self._failure is not None:
            raise self._failure
        self._sequence += 1
        sequence, mine = self._sequence, self._arrivals[self._member.rank]
        mine[1 + (sequence & 1)] = _tag(operation)
        mine[0] = sequence

    def _wait_for_all(self, operation: str) -> None:
        if self._failure is not None:
            raise self._failure
        sequence, tag = self._sequence, _tag(operation)
        self._wait_for(lambda: self._not_there(sequence), operation)
        tags = self._arrivals[:, 1 + (sequence & 1)]
        different = np.flatnonzero(tags != np.uint64(tag)).tolist()
        if different:
            raise self._give_up(self._member.different(operation, different))

    def _not_there(self, sequence: int) -> list[int]:
        return np.flatnonzero(self._arrivals[:, 0] < np.uint64(sequence)).tolist()

    def _wait_for(self, missing: Callable[[], list[int]], operation: str) -> None:
        deadline = time.monotonic() + self._member.timeout
        looks = 0
        while True:
            # In this order: who broke the channel because of what this rank does has arrived before.
            broken = bool(self._broken[0])
            places = missing()
            if not places:
                return
            if broken or time.monotonic() > deadline:
                raise self._give_up(self._member.missing(operation, places))
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
            else:
                self._pause.wait(_PAUSE)

    def _give_up(self, failure: EngineError) -> EngineError:
        """Nothing runs after a failure, or late peers would take stale data for a sum."""
        self._failure = failure
        self._broken[0] = 1
        return failure


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """[ranks, n] -> [n], in rank order, in fp32 for the 16-bit floats."""
    total = rows[0].to(torch.float32) if rows.dtype in _SIXTEEN_BIT else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def _sum_of(tensor: torch.Tensor) -> str:
    return f"all_reduce of {tensor.dtype} {list(tensor.shape)}"


def _tag(operation: str) -> int:
    return zlib.crc32(operation.encode()) + 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _wrapped(start: int, count: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """``count`` bytes from ``start`` of a ring, as (slice of the message, slice of the ring)."""
    head = min(count, capacity - start)
    if head > 0:
        yield slice(0, head), slice(start, start + head)
    if count > head:
        yield slice(head, count), slice(0, count - head)
