"""The all-to-all ``shm``: a row is written straight to where the rank of its expert reads it; sums are read back.

Every token of every rank has a row of its own in every rank's memory, known from the sizes alone, so that nothing is
counted and nothing is announced; rows of tokens that go elsewhere are holes, which nobody reads.

One set of rows is enough. A rank writes the rows of the next layer after the second meeting of this one, to which a
peer comes when it has read its rows; it writes its sums after the first meeting of the next layer, to which a peer
comes when it has read the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fourfold.contracts.mixture import DispatchedTokens
from fourfold.errors import EngineError
from fourfold_moe_ep.owner_table import OwnerTable

if TYPE_CHECKING:
    from fourfold.contracts.communicator import PeerMemory
    from fourfold.entries import AllToAllContext

_LINE: Final = 64


class _Rows(NamedTuple):
    """One rank's memory; R is the most tokens of all ranks together."""

    x: torch.Tensor
    """[R, H]."""
    ids: torch.Tensor
    """int32 [R, K]."""
    weights: torch.Tensor
    """fp32 [R, K]."""
    partial: torch.Tensor
    """[R, H]."""


class _Journey(NamedTuple):
    receivers: torch.Tensor
    """bool [W, T]."""
    counts: list[int]
    """Tokens that go to each rank."""
    first: int
    """This rank's first row."""
    num_rows: int
    """Of all ranks."""


class PeerSlots:
    """See ``fourfold.contracts.mixture.AllToAll``; raises Unsupported where ranks share no memory."""

    graph_safe = False

    def __init__(self, context: AllToAllContext) -> None:
        communicator = context.communicator
        self._rank, self._world = communicator.rank, communicator.world_size
        self._max_tokens = context.max_tokens
        self._dtype, self._device, self._hidden_size = context.dtype, context.device, context.hidden_size
        self._owners = OwnerTable(context.owners, self._world, context.device)
        rows = self._world * context.max_tokens
        self._shapes = (
            (context.dtype, (rows, context.hidden_size)),
            (torch.int32, (rows, context.top_k)),
            (torch.float32, (rows, context.top_k)),
            (context.dtype, (rows, context.hidden_size)),
        )
        sizes = [_lines(math.prod(shape) * dtype.itemsize) for dtype, shape in self._shapes]
        self._memories: list[PeerMemory] = []
        self._rows: list[list[_Rows]] = []
        """Of each channel, of each rank."""
        for channel in range(communicator.channels):
            memory = communicator.peer_memory(sum(sizes), channel)
            self._memories.append(memory)
            self._rows.append([self._lay_out(memory.buffer(rank), sizes) for rank in range(self._world)])
        self._journeys: dict[int, _Journey] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        """See AllToAll."""
        if max(sizes) > self._max_tokens or sizes[self._rank] != len(x):
            raise EngineError(
                f"{len(x)} tokens on rank {self._rank}, of {list(sizes)} in all; it has slots for {self._max_tokens}"
            )
        first = sum(sizes[: self._rank])
        ranks = self._owners.ranks(ids)
        receivers = self._owners.receivers(ranks)
        counts = receivers.count_nonzero(1).tolist()
        for rank, rows in enumerate(self._rows[channel]):
            own = slice(first, first + len(x))
            rows.ids[own] = ids.masked_fill(ranks != rank, -1)
            if counts[rank]:
                rows.weights[own] = weights
            if _together(counts[rank], len(x)):
                rows.x[own] = x
            elif counts[rank]:
                tokens = receivers[rank].nonzero().flatten()
                rows.x[own].index_copy_(0, tokens, x[tokens])
        self._journeys[channel] = _Journey(receivers, counts, first, sum(sizes))

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """See AllToAll; what it returns is there until the sums are sent."""
        self._memories[channel].barrier()
        rows, count = self._rows[channel][self._rank], self._journeys[channel].num_rows
        return DispatchedTokens(x=rows.x[:count], ids=rows.ids[:count], weights=rows.weights[:count])

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """See AllToAll."""
        self._rows[channel][self._rank].partial[: len(partial)] = partial

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """See AllToAll."""
        self._memories[channel].barrier()
        receivers, counts, first, _ = self._journeys.pop(channel)
        num_tokens = receivers.shape[1]
        total: torch.Tensor | None = None
        for rank, rows in enumerate(self._rows[channel]):
            partial = rows.partial[first : first + num_tokens]
            if _together(counts[rank], num_tokens):  # experts give 0 for the others
                total = partial.to(torch.float32, copy=True) if total is None else total.add_(partial.float())
            elif counts[rank]:
                if total is None:
                    total = self._zeros(num_tokens)
                tokens = receivers[rank].nonzero().flatten()
                total.index_add_(0, tokens, partial[tokens].float())
        return (self._zeros(num_tokens) if total is None else total).to(self._dtype)

    def close(self) -> None:
        """See AllToAll."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._rows.clear()

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self._hidden_size, dtype=torch.float32, device=self._device)

    def _lay_out(self, buffer: torch.Tensor, sizes: Sequence[int]) -> _Rows:
        starts = accumulate(sizes, initial=0)
        pieces = [
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(starts, self._shapes)
        ]
        return _Rows(*pieces)


def _lines(nbytes: int) -> int:
    """``nbytes``, or the next multiple of a cache line."""
    return -(-nbytes // _LINE) * _LINE


def _together(count: int, num_tokens: int) -> bool:
    """Whether nearly all rows go, so that one copy of all is quicker than many of a row each."""
    return count > 0 and 4 * count >= 3 * num_tokens
