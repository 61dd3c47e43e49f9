"""What pipeline stages need of a communicator. An author writes ``class TestMine(StageTransportConformance)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from fourfold.testing import stage_cases as cases
from fourfold.testing.conformance import Conformance
from fourfold.testing.ranks import RankPool

Run = Callable[..., list[Any]]


class StageTransportConformance(Conformance):
    """Activations go forward and ids back, over the communicator ``name``, on real processes."""

    name: ClassVar[str]
    """The entry's name."""
    device: ClassVar[str] = "cpu"
    """``cpu``, or ``cuda``; ranks take turns on the devices that there are."""
    devices: ClassVar[int] = 0
    """How many devices it takes."""
    tensor_parallel_size: ClassVar[int] = 1
    pipeline_parallel_size: ClassVar[int] = 2
    steps: ClassVar[int] = 40

    @pytest.fixture
    def run(self, rank_pool: Callable[[int], RankPool]) -> Run:
        """Runs a case on so many ranks."""
        if self.devices:
            import torch

            if torch.cuda.device_count() < self.devices:
                pytest.skip(f"{torch.cuda.device_count()} CUDA devices, not {self.devices}")
        return lambda world_size, case, *args: rank_pool(world_size).run(case, self.name, self.device, *args)

    def test_steps_pass_all_stages(self, run: Run) -> None:
        world_size = self.pipeline_parallel_size * self.tensor_parallel_size
        run(world_size, cases.runs_a_pipeline, self.tensor_parallel_size, self.steps)

    def test_a_stage_may_outrun_the_next_one(self, run: Run) -> None:
        run(2, cases.outruns_its_reader)

    def test_shards_are_not_gathered(self, run: Run) -> None:
        run(2 * self.tensor_parallel_size, cases.keeps_shards, self.tensor_parallel_size)

    @pytest.mark.parametrize(
        ("what", "words"),
        [
            ("step", "step is 8, not 7;"),
            ("rows", "rows is 4, not 3;"),
            ("dtype", "dtype is float16, not bfloat16;"),
            ("layout", "layout is sharded, not replicated;"),
            ("gap", "message is 1, not 0;"),
        ],
    )
    def test_a_message_that_differs_is_refused(self, run: Run, what: str, words: str) -> None:
        _, found = run(2, cases.tells_what_differs, what)
        assert found.startswith("activations from stage 0 (rank 0) are not those expected: ")
        assert words in found

    def test_a_stage_that_sends_nothing_is_named(self, run: Run) -> None:
        _, (missing, seconds) = run(2, cases.waits_in_vain)
        assert missing == [0]
        assert seconds < 10

    def test_what_a_stage_cannot_do_is_refused(self, run: Run) -> None:
        first, last = run(2, cases.refuses)
        assert [words.split(";")[0] for words in last] == [
            "the last stage sends no activations",
            "only the first stage receives sampled ids",
        ]
        assert len(first) == 5
        assert "does not fit" in first[3]
