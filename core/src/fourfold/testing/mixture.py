"""What every moe layer must do. An author writes ``class TestMine(MoEConformance): name = "mine"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from fourfold.plugins import load_plugins
from fourfold.testing import mixture_cases as cases
from fourfold.testing.conformance import Conformance
from fourfold.testing.ranks import RankPool


class MoEConformance(Conformance):
    """The moe layer's contract: the sum over each token's experts, on one rank and on several."""

    name: ClassVar[str]
    """The entry's name."""
    communicator: ClassVar[str]
    """Of the ranks."""
    world_size: ClassVar[int] = 2
    backends: ClassVar[dict[str, str]] = {}
    """Names of its parts, by option, such as ``all_to_all``."""

    @pytest.mark.parametrize("mixture", cases.MIXTURES)
    def test_one_rank_gives_the_sum_over_experts(self, mixture: str) -> None:
        description = cases.MIXTURES[mixture]
        layer = load_plugins().parallel_layers()["moe", self.name].build(cases.layer_context(description))
        assert cases.fill(layer, description) == list(range(description.num_experts))
        cases.check(layer, description)

    @pytest.mark.parametrize("mixture", cases.MIXTURES)
    def test_ranks_give_the_same_sum(self, rank_pool: Callable[[int], RankPool], mixture: str) -> None:
        read = rank_pool(self.world_size).run(cases.agrees, self.name, self.communicator, mixture, self.backends)
        entry = load_plugins().parallel_layers()["moe", self.name]
        experts = list(range(cases.MIXTURES[mixture].num_experts))
        if "expert_parallel" in entry.capabilities:  # each is read by one rank
            assert sorted(expert for one in read for expert in one) == experts
        else:
            assert read == [experts] * self.world_size
