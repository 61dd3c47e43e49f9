"""The kit finds what an all-to-all may do wrong without anybody waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fourfold.contracts.communicator import Communicator
from fourfold.contracts.mixture import AllToAll, DispatchedTokens
from fourfold.testing import all_to_all_cases as cases
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool

Pool = Callable[[int], RankPool]


class Silent:
    """Every rank gets its own tokens back, for all of their experts."""

    graph_safe = False

    def __init__(self, communicator: Communicator, right: AllToAll) -> None:
        self._world, self._rank = communicator.world_size, communicator.rank
        self._kept: dict[int, Any] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        self._kept[channel] = DispatchedTokens(x.clone(), ids.clone(), weights.clone())

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        arrived: DispatchedTokens = self._kept.pop(channel)
        return arrived

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        self._kept[channel] = partial

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        combined: torch.Tensor = self._kept.pop(channel)
        return combined

    def close(self) -> None:
        self._kept.clear()


class Narrowing(Silent):
    """Forgets experts of other ranks, in the caller's own ids."""

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        ids.masked_fill_(ids % self._world != self._rank, -1)
        super().dispatch_send(x, ids, weights, sizes=sizes, channel=channel)


class Emptying(Silent):
    """What is sent is gone."""

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        super().dispatch_send(x.zero_(), ids.fill_(-1), weights, sizes=sizes, channel=channel)


class Right:
    """Does what it is to; others change one thing."""

    def __init__(self, communicator: Communicator, right: AllToAll) -> None:
        self._right = right
        self.graph_safe = right.graph_safe
        self.dispatch_send = right.dispatch_send
        self.combine_send = right.combine_send
        self.close = right.close

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        return self._right.dispatch_receive(channel=channel)

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        return self._right.combine_receive(channel=channel)


class LongIds(Right):
    """Ids of another dtype than experts take."""

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        arrived = super().dispatch_receive(channel=channel)
        return arrived._replace(ids=arrived.ids.long())


class OneResult(Right):
    """Both channels' sums in the same memory."""

    def __init__(self, communicator: Communicator, right: AllToAll) -> None:
        super().__init__(communicator, right)
        self._rows = torch.empty(cases.MAX_TOKENS, cases.HIDDEN)

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        combined = super().combine_receive(channel=channel)
        return self._rows[: len(combined)].copy_(combined)


WRONG = {one.__name__: one for one in (Silent, Narrowing, Emptying, LongIds, OneResult)}
BUILD = cases.build_over


def is_caught(rank: Rank, wrong: str, case: str) -> bool:
    """Whether the case fails on this rank."""

    def build(communicator: Communicator, *args: Any, **options: Any) -> AllToAll:
        return WRONG[wrong](communicator, BUILD(communicator, *args, **options))

    cases.build_over = build
    try:
        getattr(cases, case)(rank, "all_to_all_single", "shm", "cpu")
    except AssertionError:
        return True
    finally:
        cases.build_over = BUILD
    return False


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        ("Silent", "routes_at_random"),
        ("Narrowing", "leaves_inputs_alone"),
        ("Emptying", "leaves_inputs_alone"),
        ("LongIds", "routes_at_random"),
        ("OneResult", "overlaps_channels"),
    ],
)
def test_what_is_wrong_is_caught_on_every_rank(rank_pool: Pool, wrong: str, case: str) -> None:
    assert rank_pool(2).run(is_caught, wrong, case) == [True, True]
