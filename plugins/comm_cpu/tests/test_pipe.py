"""What the conformance suite does not ask of pipes: the twin, sleeping, more stages than cores, memory that goes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fourfold import native_build
from fourfold.contracts.host_recording import recording
from fourfold.distributed.store import scoped
from fourfold.entries import CommunicatorContext
from fourfold.errors import EngineError, RpcTimeout, Unsupported
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_cpu.shm import ShmCommunicator

Pool = Callable[[int], RankPool]
needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="no C++ compiler")


def context(rank: Rank, timeout: float = 20.0) -> CommunicatorContext:
    return CommunicatorContext(
        group="pp",
        ranks=tuple(range(10, 10 + rank.world_size)),
        rank=rank.rank,
        device=torch.device("cpu"),
        store=scoped(rank.store, "x"),
        timeout=timeout,
    )


def passes_messages(rank: Rank, native: list[bool]) -> int:
    """From the first rank to the second, one of which may be without the library: how many were right."""
    communicator = ShmCommunicator(context(rank), native=native[rank.rank])
    right = 0
    if rank.rank == 0:
        sender = communicator.sender(1, nbytes=4001, depth=2)
        for number in range(50):
            sender.send([torch.full((number,), number), torch.tensor([7, 8], dtype=torch.uint8)])
        rank.store.wait(["over"])
        return 50
    receiver = communicator.receiver(0, nbytes=4001, depth=2)
    for number in range(50):
        found, end = torch.zeros(number, dtype=torch.int64), torch.zeros(3, dtype=torch.uint8)
        length = receiver.receive([found, end])
        right += length == 8 * number + 2 and found.tolist() == [number] * number and end.tolist() == [7, 8, 0]
    rank.store.set("over", "")
    communicator.close()
    return right


@pytest.mark.parametrize(
    "native",
    [
        [False, False],
        pytest.param([True, True], marks=needs_compiler),
        pytest.param([True, False], marks=needs_compiler),
        pytest.param([False, True], marks=needs_compiler),
    ],
)
def test_the_twin_reads_and_writes_the_same_memory(rank_pool: Pool, native: list[bool]) -> None:
    assert rank_pool(2).run(passes_messages, native) == [50, 50]


def waits_for_a_second(rank: Rank, native: bool) -> float:
    """Processor seconds that the receiver takes while nothing comes; then nobody takes what the sender sends."""
    communicator = ShmCommunicator(context(rank, timeout=1.0), native=native)
    if rank.rank == 0:
        sender = communicator.sender(1, nbytes=8, depth=2)
        rank.store.wait(["over"])
        sender.send([torch.zeros(1)])
        sender.send([torch.zeros(1)])
        with pytest.raises(RpcTimeout, match=r"sending to rank 11 in group pp.*rank\(s\) 11"):
            sender.send([torch.zeros(1)])
        return 0.0
    receiver = communicator.receiver(0, nbytes=8, depth=2)
    began, wall = time.process_time(), time.monotonic()
    with pytest.raises(RpcTimeout, match=r"receiving from rank 10 in group pp.*rank\(s\) 10"):
        receiver.receive([torch.zeros(1)])
    used = time.process_time() - began
    assert 1.0 <= time.monotonic() - wall < 10
    rank.store.set("over", "")
    return used


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
def test_waiting_takes_no_core_and_names_the_peer(rank_pool: Pool, native: bool) -> None:
    assert rank_pool(2).run(waits_for_a_second, native)[1] < 0.3


def hands_on(rank: Rank, rounds: int) -> float:
    """Seconds that a token takes around a ring, on the first rank."""
    communicator = ShmCommunicator(context(rank), native=True)
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    if rank.rank == 0:
        sender = communicator.sender(after, nbytes=8, depth=1)
        receiver = communicator.receiver(before, nbytes=8, depth=1)
    else:
        receiver = communicator.receiver(before, nbytes=8, depth=1)
        sender = communicator.sender(after, nbytes=8, depth=1)
    token = torch.zeros(1, dtype=torch.int64)
    started = time.perf_counter()
    for number in range(rounds):
        if rank.rank == 0:
            sender.send([token])
        receiver.receive([token])
        token += 1
        if rank.rank != 0:
            sender.send([token])
        else:
            assert int(token) == rank.world_size * (number + 1)
    return (time.perf_counter() - started) / rounds


@needs_compiler
def test_more_stages_than_cores_do_not_collapse(rank_pool: Pool) -> None:
    stages = 2 * len(os.sched_getaffinity(0))
    hop = rank_pool(stages).run(hands_on, 500)[0] / stages
    assert hop < 0.002, "a stage that spins keeps the core from the one that it waits for"


def mappings() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:fourfold-pp" in line}


def lets_go(rank: Rank, native: bool) -> list[int]:
    """Mappings that a pipe adds, and those left of it; a closed one refuses."""
    communicator = ShmCommunicator(context(rank), native=native)
    before = mappings()
    end = (
        communicator.sender(1, nbytes=100, depth=2) if rank.rank == 0 else communicator.receiver(0, nbytes=100, depth=2)
    )
    added = len(mappings() - before)
    end.close()
    end.close()
    with pytest.raises(EngineError, match="this pipe is closed"):
        end.send([]) if rank.rank == 0 else end.receive([])
    gc.collect()
    return [added, len(mappings() - before)]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
def test_close_lets_go_of_the_memory(rank_pool: Pool, native: bool) -> None:
    assert rank_pool(2).run(lets_go, native) == [[1, 0], [1, 0]]


class Recorder:
    def record_call(self, function: int, argument: int, *, tensors: object, keep: object) -> None:
        raise AssertionError("nothing to record")


def cannot_be_recorded(rank: Rank) -> None:
    communicator = ShmCommunicator(context(rank), native=False)
    if rank.rank == 0:
        sender = communicator.sender(1, nbytes=16, depth=1)
        with pytest.raises(EngineError, match="a message of 20 bytes does not fit a pipe for messages of up to 16"):
            sender.send([torch.zeros(5)])
        with recording(Recorder()), pytest.raises(Unsupported, match="send cannot be recorded"):
            sender.send([torch.zeros(1)])
    else:
        receiver = communicator.receiver(0, nbytes=16, depth=1)
        with recording(Recorder()), pytest.raises(Unsupported, match="receive cannot be recorded"):
            receiver.receive([torch.zeros(1)])


def test_what_does_not_fit_or_is_recorded_is_refused(rank_pool: Pool) -> None:
    rank_pool(2).run(cannot_be_recorded)
