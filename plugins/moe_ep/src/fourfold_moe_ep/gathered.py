"""The all-to-all ``allgather_reducescatter``: every token goes to every rank, and partial sums are scattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fourfold.contracts.mixture import DispatchedTokens
from fourfold_moe_ep.owner_table import OwnerTable

if TYPE_CHECKING:
    from fourfold.entries import AllToAllContext


class AllGatherReduceScatter:
    """See ``fourfold.contracts.mixture.AllToAll``: the most bytes, and the fewest conditions."""

    def __init__(self, context: AllToAllContext) -> None:
        self._communicator = context.communicator
        self.graph_safe = context.communicator.graph_safe
        self._owners = OwnerTable(context.owners, context.communicator.world_size, context.device)
        self._sizes: dict[int, list[int]] = {}
        self._arrived: dict[int, DispatchedTokens] = {}
        self._combined: dict[int, torch.Tensor] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        """See AllToAll."""
        rows, line, top_k = list(sizes), self._line(channel), ids.shape[1]
        gather = self._communicator.all_gather
        both = gather(torch.cat([ids, weights.view(torch.int32)], 1), sizes=rows, channel=line)
        all_ids, all_weights = both[:, :top_k], both[:, top_k:].view(torch.float32)
        here = self._owners.ranks(all_ids) == self._communicator.rank
        self._sizes[channel] = rows
        self._arrived[channel] = DispatchedTokens(
            x=gather(x, sizes=rows, channel=line), ids=all_ids.masked_fill(~here, -1), weights=all_weights
        )

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """See AllToAll."""
        return self._arrived.pop(channel)

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """See AllToAll."""
        self._combined[channel] = self._communicator.reduce_scatter(
            partial, sizes=self._sizes.pop(channel), channel=self._line(channel)
        )

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """See AllToAll."""
        return self._combined.pop(channel)

    def close(self) -> None:
        """See AllToAll."""

    def _line(self, channel: int) -> int:
        """The communicator's channel: collectives that wait on the spot may share one, in the order of the calls."""
        return min(channel, self._communicator.channels - 1)
