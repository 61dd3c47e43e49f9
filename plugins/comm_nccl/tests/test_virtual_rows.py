"""Rows between 2, 4 and 8 ranks at once on one device: a stream each, over the same kernels as real ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fourfold_comm_nccl.failures import Failures
from fourfold_comm_nccl.row_exchange import RowExchange
from fourfold_comm_nccl.rows_region import RowsRegion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
HIDDEN, TOP_K, MAX_TOKENS = 512, 3, 32
"""Few tokens, since a token is a program here and all programs of all ranks spin at once."""


class Ranks:
    def __init__(self, world: int) -> None:
        self.world = world
        region = RowsRegion(world_size=world, max_tokens=MAX_TOKENS, top_k=TOP_K, row_bytes=HIDDEN * 2)
        self.owners = torch.arange(2 * world + 1, dtype=torch.int32, device=DEVICE) % world
        self.memory = [torch.zeros(region.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(world)]
        self.region = region
        self.failures = [Failures(world, DEVICE) for _ in range(world)]
        self.exchanges = [self._exchange([one.data_ptr() for one in self.memory], rank, 20.0) for rank in range(world)]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        self._load()

    def _exchange(self, addresses: list[int], rank: int, timeout: float) -> RowExchange:
        return RowExchange(addresses, self.region, self.owners, self.failures[rank], rank=rank, timeout=timeout)

    def _load(self) -> None:
        """Compile and load the kernels, since that may wait for what runs: one rank alone, which gives up at once."""
        spare = torch.zeros(self.region.nbytes, dtype=torch.uint8, device=DEVICE)
        failures, self.failures[0] = self.failures[0], Failures(self.world, DEVICE)
        alone = self._exchange([spare.data_ptr()] * self.world, 0, 0.001)
        x, ids, weights = tokens(self.world, 1)
        alone.dispatch(x, ids, weights, [1] * self.world)
        alone.combine(x.new_zeros(self.world, HIDDEN), x, [1] * self.world)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        self.failures[0] = failures

    def rows(self, rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What came: rows, and ids."""
        rows = self.memory[rank][self.region.rows_at :][: count * HIDDEN * 2].view(torch.bfloat16).view(count, HIDDEN)
        ids = self.memory[rank][self.region.ids_at :][: count * TOP_K * 4].view(torch.int32).view(count, TOP_K)
        return rows, ids

    def each(self) -> Iterator[tuple[int, RowExchange]]:
        here = torch.cuda.current_stream()
        for rank, (exchange, stream) in enumerate(zip(self.exchanges, self.streams)):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                yield rank, exchange
        for stream in self.streams:
            here.wait_stream(stream)


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def tokens(world: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, HIDDEN, device=DEVICE).bfloat16()
    ids = torch.rand(count, 2 * world + 1, device=DEVICE).argsort(1)[:, :TOP_K].int().contiguous()
    return x, ids, torch.rand(count, TOP_K, device=DEVICE)


def layer(ranks: Ranks, data: list[tuple[torch.Tensor, ...]], outs: list[torch.Tensor], naps: list[int]) -> None:
    """Experts give their rank's number times the row, and NaN for rows that they do not have.

    Nothing is allocated between launches that wait for each other, since that may wait for the device.
    """
    sizes, made = [len(x) for x, _, _ in data], []
    for rank, exchange in ranks.each():
        if naps[rank]:
            torch.cuda._sleep(naps[rank])
        exchange.dispatch(*data[rank], sizes)
    for rank, _ in ranks.each():
        rows, ids = ranks.rows(rank, sum(sizes))
        made.append((rows * (rank + 1)).masked_fill((ids < 0).all(1, keepdim=True), torch.nan))
    for rank, exchange in ranks.each():
        exchange.combine(made[rank], outs[rank], sizes)


def expected(ranks: Ranks, data: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    found = []
    for x, ids, _ in data:
        total = torch.zeros(x.shape, device=DEVICE)
        for rank in range(ranks.world):
            here = (ranks.owners[ids] == rank).any(1, keepdim=True)
            total += (x * (rank + 1)).float() * here
        found.append(total.bfloat16())
    return found


def test_rows_are_not_overwritten_too_soon(ranks: Ranks) -> None:
    """Many layers back to back, of new sizes and routing, with ranks late at random; compared bit by bit."""
    draw = random.Random(ranks.world)
    most = MAX_TOKENS if ranks.world < 8 else 16
    steps = [[tokens(ranks.world, draw.choice((0, 1, 2, most))) for _ in range(ranks.world)] for _ in range(60)]
    outs = [[torch.full_like(x, torch.nan) for x, _, _ in data] for data in steps]
    torch.cuda.synchronize()
    for data, out in zip(steps, outs):
        if any(len(x) for x, _, _ in data):
            layer(ranks, data, out, [draw.choice((0, 0, 0, 2_000, 30_000)) for _ in data])
    bad = [
        place
        for place, (data, out) in enumerate(zip(steps, outs))
        if not all(torch.equal(*both) for both in zip(out, expected(ranks, data)))
    ]
    assert bad == []
    assert not any(one.failed for one in ranks.failures)


def test_a_graph_of_an_odd_number_of_layers_can_be_replayed(ranks: Ranks) -> None:
    steps = [[tokens(ranks.world, 1 + rank % 3) for rank in range(ranks.world)] for _ in range(3)]
    outs = [[torch.full_like(x, torch.nan) for x, _, _ in data] for data in steps]
    graph = torch.cuda.CUDAGraph()
    layer(ranks, steps[0], outs[0], [0] * ranks.world)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for data, out in zip(steps, outs):
            layer(ranks, data, out, [0] * ranks.world)
    for _ in range(5):
        for data in steps:
            for one in data:
                for old, new in zip(one, tokens(ranks.world, len(one[0]))):
                    old.copy_(new)
        graph.replay()
        for data, out in zip(steps, outs):
            assert all(torch.equal(*both) for both in zip(out, expected(ranks, data)))


@pytest.mark.parametrize("number", [-9, 2**31 - 9], ids=["past zero", "past the sign"])
def test_the_counter_may_overflow(ranks: Ranks, number: int) -> None:
    for exchange in ranks.exchanges:
        exchange.count_from(number)
    for _ in range(10):
        data = [tokens(ranks.world, 2) for _ in range(ranks.world)]
        outs = [torch.full_like(x, torch.nan) for x, _, _ in data]
        layer(ranks, data, outs, [0] * ranks.world)
        assert all(torch.equal(*both) for both in zip(outs, expected(ranks, data)))
    assert not any(one.failed for one in ranks.failures)


def test_a_missing_rank_is_named_within_the_limit() -> None:
    ranks = Ranks(4)
    exchanges = [ranks._exchange([one.data_ptr() for one in ranks.memory], rank, 0.3) for rank in range(4)]
    x, ids, weights = tokens(4, 2)
    for rank in (0, 1, 3):
        with torch.cuda.stream(ranks.streams[rank]):
            exchanges[rank].dispatch(x, ids, weights, [2] * 4)
    torch.cuda.synchronize()
    assert [ranks.failures[rank].missing for rank in (0, 1, 3)] == [[2]] * 3
    assert not ranks.failures[2].failed
