"""What choosing an engine costs: microseconds a decision at 64 engines, for every installed load balancer.

Prints the same with the marks of a prompt of 1,000 tokens computed for it, which only policies that ask for them pay,
and ratios to round-robin in the same run. Also what a description of a prefix cache costs to make.
"""

from __future__ import annotations

import argparse
import random
import timeit
from collections.abc import Callable
from functools import partial
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from fourfold.client.load_table import LoadTable
from fourfold.contracts.load_balancer import BalancedRequest, EngineState, LoadBalancer
from fourfold.engine.block_pool import BlockPool
from fourfold.engine.prefix_cache import MAX_MARKS, PrefixSketch, extend_chain, prompt_marks
from fourfold.entries import LoadBalancerContext
from fourfold.messages import EngineStats
from fourfold.plugins import load_plugins

PROMPT_TOKENS = 1000
BLOCK_SIZE = 16


def busy_table(num_engines: int, generator: random.Random) -> LoadTable:
    """Engines with some load each."""
    table = LoadTable(num_engines, 0)
    for engine in range(num_engines):
        table.set_state(engine, EngineState.READY)
        table.report(engine, EngineStats(num_running=30, num_queued_tokens=generator.randrange(20_000)))
    return table


def microseconds(function: Callable[[], object], number: int, rounds: int) -> float:
    """Of processor time for one call: the best of ``rounds`` means, because other load comes and goes."""
    return min(timeit.repeat(function, number=number, repeat=rounds, timer=thread_time)) / number * 1e6


def decisions(num_engines: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Policy -> microseconds with the marks at hand, and with the marks computed."""
    generator = random.Random(0)
    prompts = [[generator.randrange(49_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_engines)]
    marks = [prompt_marks(prompt, BLOCK_SIZE, "") for prompt in prompts]
    figures = {}
    for name, entry in load_plugins().load_balancers().items():
        balancer = entry.build(LoadBalancerContext(num_engines=num_engines, num_servers=4))
        for engine in range(num_engines):
            others = np.frombuffer(generator.randbytes(4 * (MAX_MARKS - len(marks[engine]))), np.uint32)
            balancer.learn_prefixes(engine, np.concatenate([others, marks[engine]]))
        table = busy_table(num_engines, generator)
        at_hand = [request(partial(marks.__getitem__, index)) for index in range(num_engines)]
        computed = [request(partial(prompt_marks, prompt, BLOCK_SIZE, "")) for prompt in prompts]
        figures[name] = (
            microseconds(partial(choose_all, balancer, table, at_hand), 5, rounds) / num_engines,
            microseconds(partial(choose_all, balancer, table, computed), 5, rounds) / num_engines,
        )
    return figures


def request(read_marks: Callable[[], NDArray[np.uint32]]) -> BalancedRequest:
    return BalancedRequest(num_prompt_tokens=PROMPT_TOKENS, max_tokens=100, read_marks=read_marks)


def choose_all(balancer: LoadBalancer, table: LoadTable, requests: list[BalancedRequest]) -> None:
    for one in requests:
        balancer.choose(one, table.loads)


def full_sketch() -> PrefixSketch:
    """Of a cache of 800 conversations."""
    pool = BlockPool(8001)
    sketch = PrefixSketch(pool)
    for number in range(800):
        digests: list[bytes] = []
        extend_chain(digests, [number] * 160, 10, BLOCK_SIZE, "")
        blocks = pool.allocate(10)
        for block, digest in zip(blocks, digests):
            pool.remember(block, digest)
        sketch.filled(digests, 0, 10)
        sketch.ended(digests, 10)
        pool.release(blocks)
    return sketch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 1000])
    arguments = parser.parse_args()
    for num_engines in arguments.engines:
        figures = decisions(num_engines, arguments.rounds)
        floor = figures["round-robin"][0]
        for name, (at_hand, computed) in figures.items():
            print(
                f"{num_engines:5d} engines, {name:16s}: {at_hand:6.1f} us a decision "
                f"({at_hand / floor:4.1f} x round-robin), {computed:6.1f} us with the marks of {PROMPT_TOKENS} tokens"
            )
    tokens = list(range(PROMPT_TOKENS))
    print(f"marks of {PROMPT_TOKENS} tokens: {microseconds(lambda: prompt_marks(tokens, 16, ''), 200, 20):6.1f} us")
    sketch = full_sketch()
    print(f"describing a cache: {microseconds(sketch.marks, 20, 20):6.1f} us, {len(sketch.marks())} bytes")


if __name__ == "__main__":
    main()
