"""What every communicator must do. An author writes ``class TestMine(CommunicatorConformance): name = "mine"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.entries import CommunicatorEntry
from fourfold.plugins import load_plugins
from fourfold.testing import communicator_cases as cases
from fourfold.testing.conformance import Conformance
from fourfold.testing.ranks import RankPool

Run = Callable[..., list[Any]]


class CommunicatorConformance(Conformance):
    """The communicator contract, on real processes."""

    name: ClassVar[str]
    """The entry's name."""
    device: ClassVar[str] = "cpu"
    """``cpu``, or ``cuda`` for a device a rank."""
    world_size: ClassVar[int] = 2
    shares_a_device: ClassVar[bool] = False
    """Whether ranks may take turns on the devices that there are."""

    @pytest.fixture
    def entry(self) -> CommunicatorEntry:
        """The entry, found through its entry point; skips, with its reason, where it cannot run."""
        entry = load_plugins().communicators()[self.name]
        config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=self.world_size))
        suits = entry.suits(config)
        if suits.score <= 0:
            pytest.skip(f"{self.name} cannot run here: {suits.reason}")
        if self.device != "cpu":
            import torch

            needed = 1 if self.shares_a_device else self.world_size
            if torch.cuda.device_count() < needed:
                pytest.skip(f"{torch.cuda.device_count()} CUDA devices, not {needed}")
        return entry

    @pytest.fixture
    def run(self, entry: CommunicatorEntry, rank_pool: Callable[[int], RankPool]) -> Run:
        """Runs a case on every rank."""
        pool = rank_pool(self.world_size)
        return lambda case, *args: pool.run(case, self.name, self.device, *args)

    def test_it_passes_the_self_test(self, run: Run) -> None:
        assert run(cases.passes_the_self_test) == [None] * self.world_size

    def test_sums_are_right_and_the_same_on_all_ranks(self, run: Run) -> None:
        first, *others = run(cases.reduces)
        assert all(other == first for other in others)

    def test_sums_in_two_halves_are_right_where_there_are_any(self, run: Run) -> None:
        assert len(set(run(cases.splits_sums))) == 1

    def test_rows_are_gathered_and_scattered(self, run: Run) -> None:
        run(cases.gathers_and_scatters)

    def test_broadcast_is_in_place(self, run: Run) -> None:
        run(cases.broadcasts_in_place)

    def test_all_to_all_takes_any_sizes(self, run: Run) -> None:
        run(cases.exchanges)

    def test_messages_arrive_in_order(self, run: Run) -> None:
        run(cases.sends_in_order)

    def test_pipes_keep_messages_apart_and_in_order(self, run: Run) -> None:
        expected = [4 * (1000 if number % 2 else number) for number in range(10) for _ in range(2)]
        assert run(cases.pipes) == [expected] * self.world_size

    def test_late_ranks_get_right_data(self, run: Run) -> None:
        first, *others = run(cases.survives_skew, 300)
        assert all(other == first for other in others)

    def test_a_missing_rank_is_named(self, run: Run) -> None:
        error, missing, seconds = run(cases.names_who_is_missing)[0]
        assert (error, missing) == ("RpcTimeout", [self.world_size - 1])
        assert seconds < 10

    def test_shared_memory_is_as_claimed(self, run: Run, entry: CommunicatorEntry) -> None:
        expected = "works" if "peer_memory" in entry.capabilities else "Unsupported"
        assert run(cases.shares_memory) == [expected] * self.world_size

    def test_channels_are_independent(self, run: Run) -> None:
        assert min(run(cases.uses_its_channels)) >= 1

    def test_close_is_final_and_may_come_twice(self, run: Run) -> None:
        run(cases.closes_twice)
