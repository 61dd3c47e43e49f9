"""The all-to-all ``all_to_all_single``: a token goes once to each rank that has one of its experts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fourfold.contracts.mixture import DispatchedTokens
from fourfold_moe_ep.owner_table import OwnerTable

if TYPE_CHECKING:
    from fourfold.entries import AllToAllContext


class _Journey(NamedTuple):
    """What this rank sent, and what came, in the order of ranks."""

    num_tokens: int
    tokens: torch.Tensor
    """int64: the token of each row that was sent."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]


class AllToAllSingle:
    """See ``fourfold.contracts.mixture.AllToAll``: the fewest bytes, and a wait for how many rows there will be."""

    graph_safe = False

    def __init__(self, context: AllToAllContext) -> None:
        self._communicator = context.communicator
        self._owners = OwnerTable(context.owners, context.communicator.world_size, context.device)
        self._journeys: dict[int, _Journey] = {}
        self._arrived: dict[int, DispatchedTokens] = {}
        self._returned: dict[int, torch.Tensor] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        """See AllToAll."""
        ranks = self._owners.ranks(ids)
        receivers = self._owners.receivers(ranks)
        rank_of_row, tokens = receivers.nonzero(as_tuple=True)
        sent = receivers.sum(1)
        received = self._exchange(sent.to(torch.int32), [1] * len(sizes), [1] * len(sizes), channel).tolist()
        there = ranks[tokens] == rank_of_row[:, None]
        parts = [x[tokens], ids[tokens].masked_fill(~there, -1), weights[tokens]]
        journey = _Journey(len(x), tokens, sent.tolist(), received)
        self._journeys[channel] = journey
        # One message: on a slow wire the number of them counts, not a copy more.
        whole = torch.cat([part.view(torch.uint8) for part in parts], 1)
        arrived = self._exchange(whole, journey.sent, received, channel)
        widths = [part.shape[1] * part.element_size() for part in parts]
        columns = [
            piece.contiguous().view(part.dtype) for piece, part in zip(torch.split(arrived, widths, dim=1), parts)
        ]
        self._arrived[channel] = DispatchedTokens(*columns)

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """See AllToAll."""
        return self._arrived.pop(channel)

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """See AllToAll."""
        journey = self._journeys[channel]
        self._returned[channel] = self._exchange(partial, journey.received, journey.sent, channel)

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """See AllToAll."""
        journey, returned = self._journeys.pop(channel), self._returned.pop(channel)
        total = returned.new_zeros(journey.num_tokens, returned.shape[1], dtype=torch.float32)
        for tokens, rows in zip(torch.split(journey.tokens, journey.sent), torch.split(returned, journey.sent)):
            total.index_add_(0, tokens, rows.float())
        return total.to(returned.dtype)

    def close(self) -> None:
        """See AllToAll."""

    def _exchange(self, rows: torch.Tensor, send: list[int], receive: list[int], channel: int) -> torch.Tensor:
        # Collectives that wait on the spot may share a channel, in the order of the calls.
        line = min(channel, self._communicator.channels - 1)
        return self._communicator.all_to_all(rows, send_sizes=send, receive_sizes=receive, channel=line)
