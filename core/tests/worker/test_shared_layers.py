"""Several runners that share every layer, as threads: the first one samples, all of them keep the same state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.errors import Unsupported
from fourfold.sampling_params import SamplingParams
from fourfold.worker.model_runner import ALONE


class ThreadCommunicator:
    """What runners ask of a communicator, among threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(slots)
        self._slots, self._barrier = slots, barrier
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def _exchange(self, operation: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.operations.append((operation, tuple(tensor.shape)))
        self._slots[self.rank] = (operation, tensor.clone())
        self._barrier.wait(timeout=20)
        everyone = list(self._slots)
        self._barrier.wait(timeout=20)
        assert {name for name, _ in everyone} == {operation}
        return [one for _, one in everyone]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("all_reduce", tensor)).sum(0)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor.copy_(self._exchange("broadcast", tensor)[source])

    def capture(self) -> AbstractContextManager[None]:
        return nullcontext()


def on_ranks(world_size: int, run: Callable[[ThreadCommunicator, Any], Any]) -> list[Any]:
    slots: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def one(rank: int) -> Any:
        communicator = ThreadCommunicator(rank, slots, barrier)
        group = GroupCoordinator(
            name="tp", ranks=tuple(range(world_size)), rank=rank, communicator=communicator, link="threads"
        )
        try:
            return run(communicator, replace(ALONE, rank=rank, tp=group))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(timeout=60) for future in [pool.submit(one, rank) for rank in range(world_size)]]


def shared(model: Any, rank: int) -> Any:
    """``model`` as one rank has it: only the first gets whole logits."""
    if rank:
        model.collect_logits = lambda local: local.new_empty(0, local.shape[1])
    return model


def test_all_ranks_append_what_the_first_one_sampled(drive, history_model, greedy_reference) -> None:
    def run(communicator: ThreadCommunicator, parallel: Any) -> tuple[list[list[int]], list[Any]]:
        driver = drive(shared(history_model(), parallel.rank), parallel=parallel)
        driver.add(0, [1, 2, 3])
        driver.add(1, [9])
        driver.add(2, [4, 4], SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=2))
        outputs = driver.generate([0, 1, 2], 8)
        return [outputs[slot] for slot in range(3)], communicator.operations

    results = on_ranks(3, run)
    assert all(result == results[0] for result in results)
    outputs, operations = results[0]
    assert outputs[0] == greedy_reference([1, 2, 3], 8)
    assert outputs[1] == greedy_reference([9], 8)
    assert operations == [("broadcast", (3,))] * 8

    alone = drive()
    alone.add(2, [4, 4], SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=2))
    assert outputs[2] == alone.generate([2], 8)[2]


def test_prompt_logprobs_come_from_the_first_rank(drive, history_model, monkeypatch) -> None:
    monkeypatch.setattr("fourfold.worker.model_runner.PROMPT_LOGPROB_ENTRIES", 97 * 2)

    def run(communicator: ThreadCommunicator, parallel: Any) -> Any:
        model = shared(history_model(), parallel.rank)
        driver = drive(model, parallel=parallel)
        driver.add(0, list(range(5)), SamplingParams(temperature=0.0, prompt_logprobs=1))
        return driver.step({0: None}).prompt_logprobs.get(0, []), model.logit_rows

    (first, rows), (second, other_rows) = on_ranks(2, run)
    assert len(first) == 4
    assert second == []
    assert rows == other_rows, "every rank computes its part of the same rows"


class Recorder:
    """Mixed into operators: records, or refuses to."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.closed = 0

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        return [4]

    def capture(self, step: Callable[[], torch.Tensor]) -> Any:
        if self.refuses:
            raise Unsupported("this rank has no recorder")
        step()
        return Graph(self, step)


class Graph:
    def __init__(self, recorder: Recorder, step: Callable[[], torch.Tensor]) -> None:
        self._recorder, self._step = recorder, step

    def replay(self) -> torch.Tensor:
        return self._step()

    def close(self) -> None:
        self._recorder.closed += 1


@pytest.mark.parametrize("refusing", [(), (1,), (0, 1)])
def test_ranks_record_all_or_none(drive, history_model, greedy_reference, refusing) -> None:
    def run(communicator: ThreadCommunicator, parallel: Any) -> Any:
        model = shared(history_model(), parallel.rank)
        recorder = Recorder(refuses=parallel.rank in refusing)
        for name in ("batch_sizes", "capture"):
            setattr(model.operators, name, getattr(recorder, name))
        driver = drive(model, parallel=parallel)
        driver.add(0, [1, 2, 3])
        driver.add(1, [7])
        outputs = driver.generate([0, 1], 6)
        return outputs, communicator.operations, driver.runner._graphs.sizes, model.forwards[-1], recorder.closed

    results = on_ranks(2, run)
    for outputs, operations, sizes, width, closed in results:
        assert outputs[0] == greedy_reference([1, 2, 3], 6)
        assert operations == results[0][1]
        assert operations.count(("all_reduce", (1,))) == 1
        assert (sizes, width) == (((4,), 4) if not refusing else ((), 2))
        assert closed in (0, 1)
    if refusing == (1,):
        assert results[0][4] == 1, "a graph that the others do not have is let go"


def test_a_group_needs_no_vote_when_alone(drive, history_model) -> None:
    driver = drive(history_model(), parallel=ALONE)
    driver.add(0, [5])
    assert len(driver.generate([0], 3)[0]) == 3
