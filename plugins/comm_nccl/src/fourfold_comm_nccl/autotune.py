"""Measures our sums against the library's in device graphs, size by size, and makes a table of the faster ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

from fourfold_comm_nccl.custom_all_reduce import BLOCK_BYTES, CustomAllReduce
from fourfold_comm_nccl.size_table import Plan, SizeTable

SMALLEST_BYTES: Final = 8 << 10
PROGRAMS: Final = (32, 64, 128)
TWO_SHOT_FROM: Final = 128 << 10
"""Bytes below which a second meeting never pays."""
OPERATIONS: Final = 10
"""In one graph, so that starting it does not count."""
REPLAYS: Final = 5
_SLEEP_CYCLES: Final = 200_000
"""About 0.1 ms, in which the host queues what is measured."""


def tune(custom: CustomAllReduce, library: Callable[[torch.Tensor], object], device: torch.device) -> SizeTable:
    """All ranks must call this at once, with ``library`` summing in place; takes about a second.

    Each rank gets a table of its own: they must agree on one.
    """
    sizes = list(ladder(custom.region.max_bytes))
    data = torch.randn(sizes[-1] // 2, device=device).to(torch.bfloat16)
    plans: list[Plan | None] = []
    for nbytes in sizes:
        tensor = data[: nbytes // 2]
        best, plan = microseconds(partial(library, tensor), custom.meet), None
        for candidate in candidates(nbytes, custom):
            taken = microseconds(partial(custom.all_reduce, candidate, tensor, tensor), custom.meet)
            if taken < best:
                best, plan = taken, candidate
        plans.append(plan)
    return SizeTable(sizes=tuple(sizes), plans=tuple(plans))


def ladder(largest: int) -> Iterator[int]:
    """Sizes to measure: powers of two, and halfway between them."""
    size = SMALLEST_BYTES
    while size < largest:
        yield from (size, size * 3 // 2)
        size *= 2
    yield largest


def candidates(nbytes: int, custom: CustomAllReduce) -> Iterator[Plan]:
    """What may sum ``nbytes``; of launches that would be alike, one."""
    blocks = -(-nbytes // BLOCK_BYTES)
    yield from (Plan("one_shot", programs) for programs in _distinct(blocks))
    if nbytes >= TWO_SHOT_FROM:
        yield from (Plan("two_shot", programs) for programs in _distinct(-(-blocks // custom.world_size)))


def microseconds(
    run: Callable[[], object], meet: Callable[[], None], *, operations: int = OPERATIONS, replays: int = REPLAYS
) -> float:
    """Of one call of ``run`` within a graph of many, at the median; ``meet`` lines the ranks up before each replay."""
    run()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(operations):
                run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        meet()
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) * 1000 / operations)
    return statistics.median(times)


def _distinct(blocks: int) -> list[int]:
    return [programs for place, programs in enumerate(PROGRAMS) if place == 0 or PROGRAMS[place - 1] < blocks]
