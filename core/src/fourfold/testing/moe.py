"""What every moe layer must do, on real processes. A test sets ``name``, ``comm`` and, if need be, ``backends``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from fourfold.plugins import load_plugins
from fourfold.testing import moe_cases as cases
from fourfold.testing.conformance import Conformance
from fourfold.testing.ranks import RankPool

Run = Callable[..., list[Any]]


class MoEConformance(Conformance):
    """The moe-layer contract in float32, with all ranks in one tensor-parallel group."""

    name: ClassVar[str]
    """The entry's name."""
    comm: ClassVar[str]
    """The communicator between the ranks."""
    backends: ClassVar[dict[str, str]] = {}
    """Fields of BackendConfig that it is built with, as ``experts``."""
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @pytest.fixture
    def run(self, rank_pool: Callable[[int], RankPool]) -> Run:
        """Runs a case on every rank, for each number of them; the results of all."""
        assert ("moe", self.name) in load_plugins().parallel_layers()

        backends = {**self.backends, "parallel_layer": f"moe={self.name}", "comm": self.comm}
        return lambda case: [rank_pool(size).run(case, backends) for size in self.world_sizes]

    def test_it_agrees_with_one_dense_process(self, run: Run) -> None:
        for results in run(cases.computes):
            # They go on from here alone: ranks that differ in a bit may send a token to different experts.
            assert all(digests == results[0] for digests in results), "every rank has the same bits"

    def test_weights_may_be_loaded_again(self, run: Run) -> None:
        run(cases.takes_other_weights)

    def test_all_tokens_may_go_to_one_expert(self, run: Run) -> None:
        run(cases.takes_all_tokens_to_one_expert)

    def test_rows_do_not_depend_on_each_other(self, run: Run) -> None:
        run(cases.keeps_rows_apart)

    def test_every_rank_reads_what_it_holds_and_no_more(self, run: Run) -> None:
        for results in run(cases.reads):
            read, there_are = zip(*results)
            assert sum(read) == there_are[0], "all ranks together read every expert once"
