"""The all-to-all ``peer`` on two devices and on four: the contract, recorded steps, and a rank that never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fourfold.errors import EngineError, RpcTimeout
from fourfold.testing import all_to_all_cases as cases
from fourfold.testing.all_to_all import AllToAllConformance
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_nccl import peer_all_to_all

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
REPLAYS = 5


class TestTwoDevices(AllToAllConformance):
    name = "peer"
    communicator = "nccl"
    device = "cuda"


class TestFourDevices(AllToAllConformance):
    name = "peer"
    communicator = "nccl"
    device = "cuda"
    world_size = 4


@pytest.fixture
def run(rank_pool: Callable[[int], RankPool]) -> Callable[..., list[Any]]:
    return rank_pool(2).run


def replays(rank: Rank) -> list[bool]:
    """Three layers in one graph, new tokens and routing at each replay, one rank late at each."""
    world, device = rank.world_size, torch.device("cuda", rank.rank)
    sizes, found = [23, 40], []
    with cases.built(rank, "peer", "nccl", "cuda") as all_to_all:
        steps = [cases.make_step(rank.rank, sizes, 2 * world + 1, seed=seed) for seed in range(3 * REPLAYS)]
        inputs = [one.to(device, torch.float32) for one in steps[:3]]
        for one in inputs:
            cases.travel(all_to_all, one)  # compiles and loads
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [cases.travel(all_to_all, one) for one in inputs]
        for replay in range(REPLAYS):
            current = [steps[3 * replay + place].to(device, torch.float32) for place in range(3)]
            for one, other in zip(inputs, current):
                for name in ("x", "ids", "weights"):
                    getattr(one, name).copy_(getattr(other, name))
            if replay % 2 == rank.rank:
                torch.cuda._sleep(3_000_000)
            graph.replay()
            for out, one in zip(outs, current):
                cases.check(out, one, world)
            found.append(True)
        graph.reset()
    return found


def test_recorded_steps_carry_what_their_inputs_hold(run: Callable[..., list[Any]]) -> None:
    assert run(replays) == [[True] * REPLAYS] * 2


def gives_the_bits_of_the_twin(rank: Rank) -> bool:
    """Of the all-to-all that any communicator can do."""
    step = cases.make_step(rank.rank, [31, 40], 2 * rank.world_size + 1)
    device = torch.device("cuda", rank.rank)
    found = []
    with connected(rank, "nccl", "cuda") as communicator:
        for name in ("peer", "allgather_reducescatter"):
            all_to_all = cases.build_over(communicator, name, device)
            found.append(cases.travel(all_to_all, step.to(device, torch.float32)).clone())
            all_to_all.close()
    return torch.equal(*found)


def test_sums_have_the_bits_of_a_gathered_sum(run: Callable[..., list[Any]]) -> None:
    assert run(gives_the_bits_of_the_twin) == [True, True]


@contextmanager
def everything_copied() -> Iterator[None]:
    """Batches of any size go as large ones do where microbatches overlap."""
    least = peer_all_to_all._least_to_copy
    peer_all_to_all._least_to_copy = lambda context: 1
    try:
        yield
    finally:
        peer_all_to_all._least_to_copy = least


def copies(rank: Rank, case: str, *args: int) -> None:
    with everything_copied():
        getattr(cases, case)(rank, "peer", "nccl", "cuda", *args)


def replays_copies(rank: Rank) -> list[bool]:
    with everything_copied():
        return replays(rank)


@pytest.mark.parametrize(
    ("case", "args"),
    [
        ("routes_at_random", ()),
        ("has_ranks_without_tokens", ()),
        ("carries_tokens_without_experts", ()),
        ("poisons_holes", ()),
        ("survives_skew", (100,)),
        ("overlaps_channels", ()),
    ],
)
def test_large_batches_are_copied(run: Callable[..., list[Any]], case: str, args: tuple[int, ...]) -> None:
    run(copies, case, *args)


def test_recorded_steps_copy_what_their_inputs_hold(run: Callable[..., list[Any]]) -> None:
    assert run(replays_copies) == [[True] * REPLAYS] * 2


def misses(rank: Rank) -> list[list[int]]:
    """Whom rank 0, which sends without the last rank, names from then on."""
    device = torch.device("cuda", rank.rank)
    named: list[list[int]] = []
    with connected(rank, "nccl", "cuda", timeout=2.0) as communicator:
        all_to_all = cases.build_over(communicator, "peer", device)
        step = cases.make_step(rank.rank, [4] * rank.world_size, 2 * rank.world_size + 1).to(device, torch.float32)
        cases.travel(all_to_all, step)
        communicator.barrier()
        if rank.rank == rank.world_size - 1:
            rank.store.wait(["over"])
            return named
        for _ in range(2):
            try:
                cases.travel(all_to_all, step)
                communicator.barrier()
            except RpcTimeout as error:
                named.append(list(error.missing_ranks))
        rank.store.set("over", "")
    return named


def test_a_rank_that_a_kernel_misses_is_named_from_then_on(run: Callable[..., list[Any]]) -> None:
    assert run(misses)[0] == [[1], [1]]


def refuses(rank: Rank) -> str:
    """What is said to more tokens than there are places for."""
    with cases.built(rank, "peer", "nccl", "cuda") as all_to_all:
        step = cases.make_step(rank.rank, [41] * rank.world_size, 2 * rank.world_size + 1)
        step = step.to(torch.device("cuda", rank.rank), torch.float32)
        with pytest.raises(EngineError, match=r"41 tokens on rank \d, of .* places for 40") as caught:
            all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes)
    return str(caught.value)


def test_too_many_tokens_are_refused(run: Callable[..., list[Any]]) -> None:
    assert all(run(refuses))
