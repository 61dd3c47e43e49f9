"""The communicator ``shm``: collectives among the CPU ranks of one host through memory that all of them map."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from fourfold.contracts.host_recording import refuse_recording
from fourfold.distributed.store import exchange
from fourfold.errors import EngineError, RpcTimeout, Unsupported
from fourfold_comm_cpu.channel import Channel, Membership
from fourfold_comm_cpu.layout import MAX_RANKS, ChannelLayout, PipeLayout
from fourfold_comm_cpu.mailbox import Mailbox
from fourfold_comm_cpu.native import load
from fourfold_comm_cpu.native_channel import SUMMABLE, NativeChannel
from fourfold_comm_cpu.native_pump import NativePump
from fourfold_comm_cpu.pipe import Pump, SharedReceiver, SharedSender
from fourfold_comm_cpu.segment import HEADER_BYTES, map_shared
from fourfold_comm_cpu.torch_channel import TorchChannel
from fourfold_comm_cpu.torch_pump import TorchPump

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Handle, PeerMemory
    from fourfold.entries import CommunicatorContext

CHANNELS: Final = 2
"""One to compute with, one to overlap."""


def build(context: CommunicatorContext) -> ShmCommunicator:
    """The communicator of this rank; raises Unsupported where the ranks cannot share memory."""
    if context.device.type != "cpu":
        raise Unsupported(f"shared memory connects ranks on a cpu, not on {context.device.type}")
    if not context.one_host:
        raise Unsupported(f"shared memory connects ranks of one host, and group {context.group} is on several")
    if len(context.ranks) > MAX_RANKS:
        raise Unsupported(f"shared memory connects up to {MAX_RANKS} ranks, not {len(context.ranks)}")
    return ShmCommunicator(context, native=_all_have_compiled(context))


class ShmCommunicator:
    """See ``fourfold.contracts.communicator.Communicator``; one thread at a time in each channel."""

    graph_safe = True
    deterministic = True
    channels = CHANNELS

    def __init__(
        self,
        context: CommunicatorContext,
        *,
        native: bool,
        slot_bytes: int | None = None,
        ring_bytes: int | None = None,
    ) -> None:
        self.rank, self.world_size = context.rank, len(context.ranks)
        sizes = {"slot_bytes": slot_bytes, "ring_bytes": ring_bytes}
        given = {name: size for name, size in sizes.items() if size is not None}
        layout = ChannelLayout(world_size=self.world_size, **given)
        self._context = context
        self._member = Membership(
            group=context.group,
            ranks=context.ranks,
            rank=context.rank,
            timeout=context.timeout,
            crowded=self.world_size > len(os.sched_getaffinity(0)),
        )
        memory = _as_tensor(map_shared(context, "shared memory", CHANNELS * layout.nbytes))
        self._native = native
        make = NativeChannel if native else TorchChannel
        pieces = [memory[at : at + layout.nbytes] for at in range(0, CHANNELS * layout.nbytes, layout.nbytes)]
        self._channels: list[Channel] = [make(piece, layout, self._member) for piece in pieces]
        self._mailboxes = [Mailbox(channel, self._member) for channel in self._channels]
        self._started: dict[int, StartedSum] = {}
        """The last one in each channel."""
        self._peer_memories = 0
        self._pipes: Counter[tuple[int, int]] = Counter()

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """In place where ``tensor`` is contiguous; may be recorded."""
        if tensor.dtype not in SUMMABLE:
            raise Unsupported(f"shared memory does not sum {tensor.dtype}")
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._idle_channel(channel).all_reduce(dense)
        return dense

    def start_all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> StartedSum:
        """See ``fourfold.contracts.split_sum.SplitSums``; what this rank adds is there when this returns."""
        refuse_recording("a sum in two halves")
        if tensor.dtype not in SUMMABLE:
            raise Unsupported(f"shared memory does not sum {tensor.dtype}")
        place = self._idle_channel(channel)
        self._started[channel] = started = StartedSum(place, tensor.contiguous())
        return started

    def all_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        dense, rows = self._dense("all_gather", tensor), self._rows(tensor, sizes)
        out = dense.new_empty(sum(rows), *dense.shape[1:])
        row = _row_bytes(dense)
        self._idle_channel(channel).all_gather(dense, out, [count * row for count in rows])
        return out

    def reduce_scatter(
        self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("reduce_scatter", tensor)
        if dense.dtype not in SUMMABLE:
            raise Unsupported(f"shared memory does not sum {dense.dtype}")
        rows = list(sizes) if sizes is not None else _even_rows(dense, self.world_size)
        if len(rows) != self.world_size or sum(rows) != dense.shape[0]:
            raise EngineError(f"reduce_scatter of {dense.shape[0]} rows cannot give {rows}")
        out = dense.new_empty(rows[self.rank], *dense.shape[1:])
        row = math.prod(dense.shape[1:])
        self._idle_channel(channel).reduce_scatter(dense, out, [count * row for count in rows])
        return out

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("broadcast", tensor)
        self._idle_channel(channel).broadcast(dense, source)
        return tensor if dense is tensor else tensor.copy_(dense)

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        destination: int = 0,
        out: Sequence[torch.Tensor] | None = None,
        channel: int = 0,
    ) -> list[torch.Tensor] | None:
        """See Communicator."""
        dense = self._dense("gather", tensor)
        places: list[torch.Tensor] = []
        if self.rank == destination:
            places = list(dense.new_empty(self.world_size, *dense.shape)) if out is None else list(out)
            if any(place.shape != dense.shape or place.dtype != dense.dtype for place in places):
                raise EngineError(f"gather of {dense.dtype} {list(dense.shape)} cannot fill tensors of other shapes")
        fillable = [place if _rows_are_dense(place) else torch.empty_like(dense) for place in places]
        self._idle_channel(channel).gather(dense, fillable, destination)
        for place, filled in zip(places, fillable):
            if place is not filled:
                place.copy_(filled)
        return places or None

    def all_to_all(
        self, tensor: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("all_to_all", tensor)
        if sum(send_sizes) != dense.shape[0] or len(send_sizes) != self.world_size:
            raise EngineError(f"all_to_all of {dense.shape[0]} rows cannot send {list(send_sizes)}")
        out = dense.new_empty(sum(receive_sizes), *dense.shape[1:])
        row = _row_bytes(dense)
        send, receive = [count * row for count in send_sizes], [count * row for count in receive_sizes]
        self._idle_channel(channel).all_to_all(dense, out, send, receive)
        return out

    def isend(self, tensor: torch.Tensor, destination: int, *, channel: int = 0) -> Handle:
        """See Communicator; what fits in the ring is gone when this returns."""
        dense = self._dense("isend", tensor)
        self._open_channel(channel)
        return self._mailboxes[channel].start("to", self._peer(destination), dense)

    def irecv(self, tensor: torch.Tensor, source: int, *, channel: int = 0) -> Handle:
        """See Communicator."""
        refuse_recording("irecv")
        if not tensor.is_contiguous():
            raise Unsupported(f"irecv fills contiguous tensors, not one of strides {tensor.stride()}")
        self._open_channel(channel)
        return self._mailboxes[channel].start("from", self._peer(source), tensor)

    def sender(self, destination: int, *, nbytes: int, depth: int) -> SharedSender:
        """See Communicator; costs two copies a message, and memory for what has been sent at a time."""
        pump = self._pump(self.rank, destination, PipeLayout(nbytes=nbytes, depth=depth))
        return SharedSender(pump, nbytes, partial(self._late, "sending to", destination))

    def receiver(self, source: int, *, nbytes: int, depth: int) -> SharedReceiver:
        """See Communicator."""
        pump = self._pump(source, self.rank, PipeLayout(nbytes=nbytes, depth=depth))
        return SharedReceiver(pump, partial(self._late, "receiving from", source))

    def barrier(self) -> None:
        """See Communicator."""
        refuse_recording("barrier")
        self._idle_channel(0).barrier()

    def peer_memory(self, nbytes: int, channel: int = 0) -> PeerMemory:
        """See Communicator; all ranks must call it alike."""
        self._peer_memories += 1
        stretch = -(-nbytes // 64) * 64
        memory = map_shared(self._context, f"peer memory {self._peer_memories}", stretch * self.world_size)
        whole = _as_tensor(memory)
        buffers = [whole[rank * stretch : rank * stretch + nbytes] for rank in range(self.world_size)]
        return SharedPeerMemory(buffers, partial(self._idle_channel, channel))

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not offered."""
        raise Unsupported("shared memory has no fused all_reduce_add_rms_norm")

    def capture(self) -> AbstractContextManager[None]:
        """Needs nothing: a recorded sum reads its own counters at each replay."""
        return nullcontext()

    def close(self) -> None:
        """Let go of the memory, which is gone with the last rank; idempotent."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._started.clear()
        self._mailboxes.clear()

    def _open_channel(self, channel: int) -> Channel:
        try:
            return self._channels[channel]
        except IndexError:
            if self._channels:
                raise Unsupported(f"there is no channel {channel}; shared memory has {CHANNELS}") from None
            raise EngineError(f"the communicator of group {self._member.group} is closed") from None

    def _idle_channel(self, channel: int) -> Channel:
        """For a collective: what is in the air there has to be taken first, on all ranks alike."""
        started = self._started.pop(channel, None)
        if started is not None:
            started.wait()
        return self._open_channel(channel)

    def _dense(self, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        refuse_recording(operation)
        return tensor.contiguous()

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[int]:
        if sizes is None:
            return [tensor.shape[0]] * self.world_size
        if len(sizes) != self.world_size or sizes[self.rank] != tensor.shape[0]:
            raise EngineError(f"all_gather has {tensor.shape[0]} rows on rank {self.rank}, and sizes are {list(sizes)}")
        return list(sizes)

    def _pump(self, source: int, destination: int, layout: PipeLayout) -> Pump:
        """Moves what goes from ``source`` to ``destination``, one of which is this rank."""
        self._open_channel(0)
        places = tuple(sorted((self.rank, self._peer(destination if source == self.rank else source))))
        number = self._pipes[source, destination]
        self._pipes[source, destination] += 1
        # The two make the memory by themselves: the rest of the group has no part in it.
        pair = replace(
            self._context, ranks=tuple(self._member.ranks[place] for place in places), rank=places.index(self.rank)
        )
        memory = map_shared(pair, f"pipe {number} from {source} to {destination}", layout.total_bytes)
        make = NativePump if self._native else TorchPump
        return make(_as_tensor(memory), layout, self._member.timeout)

    def _late(self, verb: str, peer: int) -> RpcTimeout:
        return self._member.missing(f"{verb} rank {self._member.ranks[peer]}", [peer])

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world_size or rank == self.rank:
            raise EngineError(f"rank {self.rank} of {self.world_size} has no peer {rank}")
        return rank


class StartedSum:
    """See ``fourfold.contracts.split_sum.PendingSum``."""

    def __init__(self, channel: Channel, tensor: torch.Tensor) -> None:
        channel.start_all_reduce(tensor)
        self._channel: Channel | None = channel
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """See PendingSum; later ones than the first have nothing to wait for."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.finish_all_reduce(self._tensor)
        return self._tensor


class SharedPeerMemory:
    """See ``fourfold.contracts.communicator.PeerMemory``."""

    def __init__(self, buffers: Sequence[torch.Tensor], channel: Callable[[], Channel]) -> None:
        self._buffers = list(buffers)
        self._channel = channel

    def buffer(self, rank: int) -> torch.Tensor:
        """See PeerMemory."""
        if not self._buffers:
            raise EngineError("this peer memory is closed")
        return self._buffers[rank]

    def barrier(self) -> None:
        """See PeerMemory."""
        self._channel().barrier()

    def close(self) -> None:
        """See PeerMemory."""
        self._buffers.clear()


def _all_have_compiled(context: CommunicatorContext) -> bool:
    """Whether every rank has the library; all take the twin otherwise, whose counters mean the same to all of them."""
    try:
        load()
        problem = ""
    except Unsupported as error:
        problem = str(error)
    problems = exchange(
        context.store,
        "library",
        problem.encode(),
        rank=context.rank,
        ranks=context.ranks,
        timeout=context.timeout,
        what=f"compiling shared memory for group {context.group}",
    )
    return not any(problems)


def _as_tensor(memory: Any) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[HEADER_BYTES:]


def _rows_are_dense(tensor: torch.Tensor) -> bool:
    """Whether every row is one stretch of memory, wherever the rows lie."""
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) == 1)


def _row_bytes(tensor: torch.Tensor) -> int:
    """Of one entry of dim 0, also of a tensor that has none."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _even_rows(tensor: torch.Tensor, world_size: int) -> list[int]:
    each, left = divmod(tensor.shape[0], world_size)
    if left:
        raise EngineError(f"reduce_scatter of {tensor.shape[0]} rows over {world_size} ranks needs sizes")
    return [each] * world_size
