"""The all-to-all ``peer``: a row is written straight into the memory of the devices that have its experts.

The sparse form of an all-gather: every row of every rank has a place of its own, known from the sizes alone, and only
those are filled that the receiver needs. What comes back is summed in the order of ranks, so that the bits are the same
each time. Nothing waits for the host.

Where microbatches overlap, large batches go by the device's copy engines instead, whole: kernels that move them would
wait for the very multiprocessors on which the other microbatch computes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from fourfold.contracts.mixture import DispatchedTokens
from fourfold.errors import EngineError, Unsupported
from fourfold_comm_nccl.peer_memory import NcclPeerMemory
from fourfold_comm_nccl.row_exchange import RowExchange
from fourfold_comm_nccl.rows_region import RowsRegion

if TYPE_CHECKING:
    from fourfold.entries import AllToAllContext

CHANNELS: Final = 2
"""One for each microbatch."""
LARGE_BYTES: Final = 2 << 20
"""Of one rank's rows, from which on a copy takes longer than starting it."""
_MOST_RECEIVE: Final = 0.75
"""Share of the rows that a rank needs, from which on it may as well get all of them."""
_VECTOR_BYTES: Final = 16


class PeerAllToAll:
    """See ``fourfold.contracts.mixture.AllToAll``; each phase of sending ends when all ranks have sent."""

    graph_safe = True

    def __init__(self, context: AllToAllContext) -> None:
        """Raises Unsupported where the ranks' devices do not map each other's memory."""
        row_bytes = context.hidden_size * context.dtype.itemsize
        if context.device.type != "cuda" or row_bytes % _VECTOR_BYTES:
            raise Unsupported(
                f"peer moves rows of whole {_VECTOR_BYTES} bytes between cuda devices, not {row_bytes} bytes on "
                f"{context.device.type}"
            )
        communicator = context.communicator
        region = RowsRegion(
            world_size=communicator.world_size,
            max_tokens=context.max_tokens,
            top_k=context.top_k,
            row_bytes=row_bytes,
        )
        owners = context.owners.to(context.device)
        self._rank, self._max_tokens = communicator.rank, context.max_tokens
        self._channels = [_Channel(context, region, owners) for _ in range(CHANNELS)]

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        """See AllToAll."""
        if max(sizes) > self._max_tokens or sizes[self._rank] != len(x):
            raise EngineError(
                f"{len(x)} tokens on rank {self._rank}, of {list(sizes)} in all; it has places for {self._max_tokens}"
            )
        self._channels[channel].dispatch(x.contiguous(), ids.contiguous(), weights.contiguous(), list(sizes))

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """See AllToAll; what it returns is there until the sums are sent."""
        return self._channels[channel].arrived()

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """See AllToAll."""
        self._channels[channel].combine(partial.contiguous())

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """See AllToAll."""
        return self._channels[channel].returned()

    def close(self) -> None:
        """See AllToAll."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()


class _Channel:
    """What one batch has in the air."""

    def __init__(self, context: AllToAllContext, region: RowsRegion, owners: torch.Tensor) -> None:
        communicator = context.communicator
        memory = communicator.peer_memory(region.nbytes)
        if not isinstance(memory, NcclPeerMemory):
            raise Unsupported("peer needs the memory that nccl maps; use --comm nccl")
        self._memory = memory
        self._exchange = RowExchange(
            [memory.buffer(rank).data_ptr() for rank in range(communicator.world_size)],
            region,
            owners,
            memory.failures,
            rank=communicator.rank,
            timeout=memory.timeout,
        )
        buffer, rows = memory.buffer(communicator.rank), region.num_rows
        self._arrived = DispatchedTokens(
            x=_view(buffer, region.rows_at, context.dtype, rows, context.hidden_size),
            ids=_view(buffer, region.ids_at, torch.int32, rows, context.top_k),
            weights=_view(buffer, region.weights_at, torch.float32, rows, context.top_k),
        )
        self._rank = communicator.rank
        self._rows, self._parts = (
            [
                _view(memory.buffer(rank), at, context.dtype, rows, context.hidden_size)
                for rank in range(region.world_size)
            ]
            for at in (region.rows_at, region.returned_at)
        )
        """Of all ranks: what comes, and what comes back."""
        self._max_tokens = context.max_tokens
        self._least_to_copy = _least_to_copy(context)
        self._sizes: list[int] = []
        self._returned: torch.Tensor | None = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> None:
        self._memory.check()
        self._sizes = sizes
        if not any(sizes):
            return
        copies = self._copies(x)
        if copies:
            first = sum(sizes[: self._rank])
            for peer in self._others_first():
                self._rows[peer][first : first + len(x)].copy_(x)
        self._exchange.dispatch(x, ids, weights, sizes, moves=not copies)

    def arrived(self) -> DispatchedTokens:
        count = sum(self._sizes)
        return DispatchedTokens(*(part[:count] for part in self._arrived))

    def combine(self, partial: torch.Tensor) -> None:
        sizes = self._sizes
        self._returned = out = partial.new_empty(sizes[self._rank], partial.shape[1])
        if not any(sizes):
            return
        copies = self._copies(partial)
        if copies:
            place = self._rank * self._max_tokens
            for peer in self._others_first()[:-1]:
                first = sum(sizes[:peer])
                self._parts[peer][place : place + sizes[peer]].copy_(partial[first : first + sizes[peer]])
        self._exchange.combine(partial, out, sizes, moves=not copies)

    def returned(self) -> torch.Tensor:
        out, self._returned = self._returned, None
        if out is None:
            raise EngineError("nothing was sent back on this channel")
        return out

    def close(self) -> None:
        self._memory.close()

    def _copies(self, like: torch.Tensor) -> bool:
        """The same on all ranks."""
        return max(self._sizes) * like.shape[1] * like.itemsize >= self._least_to_copy

    def _others_first(self) -> list[int]:
        """All ranks, each from the next one on, so that they do not all write to one; the own memory last."""
        world = len(self._rows)
        return [(self._rank + 1 + step) % world for step in range(world)]


def _least_to_copy(context: AllToAllContext) -> int:
    """Bytes of a rank's rows from which on all of them are copied everywhere."""
    spread = 1 - (1 - 1 / context.communicator.world_size) ** context.top_k
    overlaps = context.config.parallel.enable_dbo and spread >= _MOST_RECEIVE
    return LARGE_BYTES if overlaps else sys.maxsize


def _view(buffer: torch.Tensor, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return buffer[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
