"""What the engine core itself costs a step: scheduling, message building, output handling, with no model behind it.

Prints microseconds a step of decodes, and two ratios measured in the same run: four times the running requests, and
1,000 queued requests against none. The second must stay near 1.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import Future
from time import perf_counter

import msgspec

from fourfold.config.engine_config import EngineConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.engine.engine_core import EngineCore
from fourfold.engine.policies import FirstComeFirstServed
from fourfold.entries import SchedulerContext
from fourfold.messages import AddRequest, StepMessage, StepOutput
from fourfold.sampling_params import SamplingParams

PROMPT_TOKENS = 128


class InstantClient:
    """Encodes each step as the real client does, and answers at once."""

    def __init__(self, depth: int) -> None:
        self.max_in_flight = depth
        self._encoder = msgspec.msgpack.Encoder()

    def execute_model(self, message: StepMessage) -> Future[StepOutput]:
        self._encoder.encode(message)
        rows = sum(entry.samples for entry in message.scheduled)
        future: Future[StepOutput] = Future()
        future.set_result(StepOutput(step=message.step, token_ids=[7] * rows))
        return future

    def shutdown(self) -> None:
        """Nothing to end."""


def microseconds_a_step(*, running: int, queued: int, depth: int, steps: int) -> float:
    """Median over ``steps`` steps in which every running request decodes."""
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192))
    spec = KVCacheSpec(block_size=16, bytes_per_block=1)
    core = EngineCore(
        config,
        InstantClient(depth),
        kv_cache=KVCacheConfig(groups=(KVCacheGroup(spec=spec, layers=(0,)),), num_blocks=32768),
        max_model_len=8192,
        vocabulary_size=1000,
        policy=FirstComeFirstServed(SchedulerContext(config=config)),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + 100, ignore_eos=True)
    for index in range(running + queued):
        prompt = [index % 1000] + [1] * (PROMPT_TOKENS - 1)
        core.add(AddRequest(request_id=str(index), client=0, prompt_token_ids=prompt, sampling=sampling))
    while core.stats.generation_tokens < running * 4:
        core.step()
    seconds = []
    for _ in range(steps):
        started = perf_counter()
        core.step()
        seconds.append(perf_counter() - started)
    return statistics.median(seconds) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=1, help="steps in the air")
    arguments = parser.parse_args()
    cases = [(running, queued) for running in (16, 64) for queued in (0, 1000)]
    figures = dict.fromkeys(cases, float("inf"))
    for _ in range(arguments.rounds):  # rounds, and the best of each case: other load on the machine comes and goes
        for running, queued in cases:
            figure = microseconds_a_step(running=running, queued=queued, depth=arguments.depth, steps=arguments.steps)
            figures[running, queued] = min(figures[running, queued], figure)
    for (running, queued), figure in figures.items():
        print(f"{running:3d} running, {queued:4d} queued: {figure:7.1f} us a step, {figure / running:5.2f} us a token")
    print(f"64 running / 16 running: {figures[64, 0] / figures[16, 0]:.2f} x (4.00: linear)")
    for running in (16, 64):
        ratio = figures[running, 1000] / figures[running, 0]
        print(f"1,000 queued / none, {running} running: {ratio:.2f} x (1.00: the queue costs nothing)")


if __name__ == "__main__":
    main()
