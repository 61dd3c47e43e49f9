"""The all-to-all ``peer``: a row is written straight into the memory of the devices that have its experts.

The sparse form of an all-gather: every row of every rank has a place of its own, known from the sizes alone, and only
those are filled that the receiver needs. What comes back is summed in the order of ranks, so that the bits are the same
each time. Nothing waits for the host.
"""

from __future__ import annotations

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
        self._sizes: list[int] = []
        self._returned: torch.Tensor | None = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> None:
        self._memory.check()
        self._sizes = sizes
        if any(sizes):
            self._exchange.dispatch(x, ids, weights, sizes)

    def arrived(self) -> DispatchedTokens:
        count = sum(self._sizes)
        return DispatchedTokens(*(part[:count] for part in self._arrived))

    def combine(self, partial: torch.Tensor) -> None:
        out = partial.new_empty(self._sizes[self._rank], partial.shape[1])
        if any(self._sizes):
            self._exchange.combine(partial, out, self._sizes)
        self._returned = out

    def returned(self) -> torch.Tensor:
        out, self._returned = self._returned, None
        if out is None:
            raise EngineError("nothing was sent back on this channel")
        return out

    def close(self) -> None:
        self._memory.close()


def _view(buffer: torch.Tensor, at: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    return buffer[at : at + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
