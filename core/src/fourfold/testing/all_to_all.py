"""What every all-to-all must do. An author writes ``class TestMine(AllToAllConformance): name = "mine"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from fourfold.plugins import load_plugins
from fourfold.testing import all_to_all_cases as cases
from fourfold.testing.conformance import Conformance
from fourfold.testing.ranks import RankPool

Run = Callable[..., list[Any]]


class AllToAllConformance(Conformance):
    """The all-to-all contract, on real processes: tokens come back as the sum of what their experts made of them."""

    name: ClassVar[str]
    """The entry's name."""
    communicator: ClassVar[str]
    """Of the ranks; one that the all-to-all can work over."""
    device: ClassVar[str] = "cpu"
    """``cpu``, or ``cuda`` for a device a rank."""
    world_size: ClassVar[int] = 2

    @pytest.fixture
    def run(self, rank_pool: Callable[[int], RankPool]) -> Run:
        """Runs a case on every rank."""
        assert self.name in load_plugins().all_to_alls()
        if self.device != "cpu":
            import torch

            if torch.cuda.device_count() < self.world_size:
                pytest.skip(f"{torch.cuda.device_count()} CUDA devices, not {self.world_size}")
        pool = rank_pool(self.world_size)
        return lambda case, *args: pool.run(case, self.name, self.communicator, self.device, *args)

    def test_tokens_of_any_routing_come_back(self, run: Run) -> None:
        run(cases.routes_at_random)

    def test_all_tokens_may_go_to_one_rank(self, run: Run) -> None:
        run(cases.routes_to_one_rank)

    def test_ranks_without_tokens_take_part(self, run: Run) -> None:
        run(cases.has_ranks_without_tokens)

    def test_one_expert_a_token_is_enough(self, run: Run) -> None:
        run(cases.routes_to_one_expert)

    def test_who_has_no_expert_comes_back_as_zero(self, run: Run) -> None:
        run(cases.carries_tokens_without_experts)

    def test_holes_are_never_read(self, run: Run) -> None:
        run(cases.poisons_holes)

    def test_what_is_sent_stays_as_it_is(self, run: Run) -> None:
        run(cases.leaves_inputs_alone)

    def test_bfloat16_is_carried(self, run: Run) -> None:
        run(cases.carries_bfloat16)

    def test_sums_have_the_same_bits_every_time(self, run: Run) -> None:
        run(cases.repeats_itself)

    def test_many_steps_of_late_ranks(self, run: Run) -> None:
        run(cases.survives_skew, 200)

    def test_two_channels_may_be_in_the_air(self, run: Run) -> None:
        run(cases.overlaps_channels)

    def test_close_may_come_twice(self, run: Run) -> None:
        run(cases.closes_twice)
