"""The simulated engine, which takes many steps at once, against one that takes them one by one."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from fourfold.simulation.engine_model import EngineModel, SimulatedEngine
from fourfold.simulation.ledger import Ledger
from fourfold.simulation.workload import Workload

SMALL = EngineModel(max_num_seqs=6, max_num_batched_tokens=64, kv_cache_tokens=900)


def workload(seed: int, count: int = 60, *, pace: float = 0.05) -> Workload:
    generator = random.Random(seed)
    return Workload(
        arrival=np.cumsum([generator.expovariate(1 / pace) for _ in range(count)]),
        prompt_tokens=np.array([generator.choice((1, 5, 30, 64, 200, 333)) for _ in range(count)]),
        output_tokens=np.array([generator.choice((1, 2, 9, 40)) for _ in range(count)]),
        conversation=np.array([generator.choice((-1, -1, 0, 1, 2)) for _ in range(count)]),
    )


def by_runs(load: Workload, model: EngineModel) -> Ledger:
    ledger = Ledger(load, np.zeros(len(load), np.int64), 1)
    engine = SimulatedEngine(0, model, ledger)
    for request, arrival in enumerate(load.arrival.tolist()):
        while engine.ends < arrival:
            engine.finish_run(engine.ends)
        ledger.send(request, 0)
        engine.submit(request, arrival)
    while engine.ends < math.inf:
        engine.finish_run(engine.ends)
    return ledger


class OneByOne:
    """The same engine in the plainest form: every step by itself, every list searched."""

    def __init__(self, load: Workload, model: EngineModel) -> None:
        self.prompt, self.output = load.prompt_tokens.tolist(), load.output_tokens.tolist()
        self.talk, self.arrival = load.conversation.tolist(), load.arrival.tolist()
        self.model, self.now, self.steps = model, 0.0, 0
        self.coming, self.waiting = list(range(len(load))), []
        self.left: dict[int, int] = {}  # prompt tokens to compute
        self.made: dict[int, int] = {}  # tokens sampled
        self.cache: dict[int, int] = {}
        self.first, self.finished, self.hits = ({} for _ in range(3))
        while self.coming or self.waiting or self.left or self.made:
            self.step()

    def held(self) -> int:
        return sum(self.prompt[one] + self.output[one] for one in [*self.left, *self.made])

    def evict(self) -> None:
        while self.cache and self.held() + sum(self.cache.values()) > self.model.kv_cache_tokens:
            del self.cache[next(iter(self.cache))]

    def admit(self) -> None:
        model = self.model
        while self.waiting:
            one = self.waiting[0]
            needed = self.prompt[one] + self.output[one]
            if sum(self.left.values()) >= model.max_num_batched_tokens - len(self.made):
                return
            if len(self.left) + len(self.made) >= model.max_num_seqs:
                return
            if self.held() and self.held() + needed > model.kv_cache_tokens:
                return
            self.waiting.pop(0)
            hit = 0
            if self.talk[one] in self.cache:
                self.cache[self.talk[one]] = self.cache.pop(self.talk[one])
                hit = min(self.cache[self.talk[one]], self.prompt[one] - 1) // model.block_size * model.block_size
            self.hits[one] = hit
            self.left[one] = self.prompt[one] - hit
            self.evict()

    def step(self) -> None:
        model = self.model
        if not self.waiting and not self.left and not self.made:
            self.now = max(self.now, self.arrival[self.coming[0]])
        while self.coming and self.arrival[self.coming[0]] <= self.now:
            self.waiting.append(self.coming.pop(0))
        self.admit()
        decoding = list(self.made)
        budget = max(1, model.max_num_batched_tokens - len(decoding)) if self.left else 0
        chunk = min(budget, sum(self.left.values()))
        self.now += model.step_seconds + chunk * model.prompt_token_seconds + len(decoding) * model.sequence_seconds
        for one in list(self.left):
            done = min(self.left[one], chunk)
            self.left[one] -= done
            chunk -= done
            if self.left[one] == 0:
                del self.left[one]
                self.first[one] = self.now
                self.made[one] = 0
            if not chunk:
                break
        for one in list(self.made):
            self.made[one] += 1
        for one in sorted(self.made, key=lambda one: one):
            if self.made[one] >= self.output[one]:
                self.finish(one)

    def finish(self, one: int) -> None:
        self.finished[one] = self.now
        del self.made[one]
        if self.talk[one] >= 0:
            self.cache.pop(self.talk[one], None)
            self.cache[self.talk[one]] = self.prompt[one] + self.output[one]
            self.evict()


@pytest.mark.parametrize("pace", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_runs_of_steps_are_the_steps(seed: int, pace: float) -> None:
    load = workload(seed, pace=pace)
    fast, slow = by_runs(load, SMALL), OneByOne(load, SMALL)
    numbers = range(len(load))
    assert fast.first.tolist() == pytest.approx([slow.first[one] for one in numbers])
    assert fast.finished.tolist() == pytest.approx([slow.finished[one] for one in numbers])
    assert fast.hit_tokens.tolist() == [slow.hits[one] for one in numbers]


def test_at_the_end_nothing_is_left_to_do() -> None:
    standing = by_runs(workload(7), SMALL).standing(1e6)
    assert not standing.running.any()
    assert not standing.waiting.any()
    assert not standing.held_tokens.any()
    assert not standing.request_shares.any()
    assert not standing.token_shares.any()


def test_on_the_way_tokens_go_down_step_by_step() -> None:
    load = Workload(
        arrival=np.zeros(1), prompt_tokens=np.array([10]), output_tokens=np.array([21]), conversation=np.array([-1])
    )
    model = EngineModel(step_seconds=1.0, prompt_token_seconds=0.0, sequence_seconds=0.0)
    ledger = Ledger(load, np.zeros(1, np.int64), 1)
    engine = SimulatedEngine(0, model, ledger)
    ledger.send(0, 0)
    engine.submit(0, 0.0)
    assert ledger.standing(0.5).token_shares.tolist() == [[31]]
    engine.finish_run(1.0)
    assert [int(ledger.standing(now).token_shares[0, 0]) for now in (1.5, 2.5, 11.5)] == [20, 19, 10]
