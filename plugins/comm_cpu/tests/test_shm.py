"""What the conformance suite does not ask: the twin's bits, counters that wrap, failures that stay, nothing left."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold import native_build
from fourfold.contracts.host_recording import recording
from fourfold.distributed.self_test import self_test
from fourfold.distributed.store import scoped
from fourfold.entries import CommunicatorContext
from fourfold.errors import EngineError, FourfoldError, RpcTimeout, Unsupported
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_cpu import shm
from fourfold_comm_cpu.native_channel import SUMMABLE, NativeChannel
from fourfold_comm_cpu.shm import ShmCommunicator

CPU = torch.device("cpu")
SMALL = {"slot_bytes": 4096, "ring_bytes": 1000}
Pool = Callable[[int], RankPool]
needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="no C++ compiler")


def context(rank: Rank, name: str, timeout: float = 20.0) -> CommunicatorContext:
    return CommunicatorContext(
        group="tp",
        ranks=tuple(range(10, 10 + rank.world_size)),
        rank=rank.rank,
        device=CPU,
        store=scoped(rank.store, name),
        timeout=timeout,
    )


def both(rank: Rank) -> int:
    """How many sums had the same bits in C++ and in the twin, with pieces smaller than the messages."""
    native = ShmCommunicator(context(rank, "native"), native=True, **SMALL)
    twin = ShmCommunicator(context(rank, "twin"), native=False, **SMALL)
    compared = 0
    torch.manual_seed(rank.rank)
    for dtype in SUMMABLE:
        for count in (1, 63, 5000, 70_000):
            noise = (torch.randn(count) * 50).to(dtype) if dtype.is_floating_point else torch.randint(-9, 99, (count,))
            noise = noise.to(dtype)
            rows = [count // rank.world_size] * (rank.world_size - 1)
            rows.append(count - sum(rows))
            for operation in (
                lambda one, x=noise: one.all_reduce(x.clone()),
                lambda one, x=noise, rows=rows: one.reduce_scatter(x.clone(), sizes=rows),
                lambda one, x=noise: one.all_gather(x),
            ):
                found, expected = operation(native), operation(twin)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (dtype, count)
                compared += 1
    special = torch.tensor([float("nan"), float("inf"), -0.0, 3e38, 1e-40], dtype=torch.bfloat16)
    found, expected = (one.all_reduce(special.clone()) for one in (native, twin))
    assert torch.isnan(found).tolist() == torch.isnan(expected).tolist() == [True, False, False, False, False]
    assert torch.equal(found[1:].view(torch.int16), expected[1:].view(torch.int16))
    problems = [self_test(one, CPU) for one in (native, twin)]
    assert problems == [None, None]
    for one in (native, twin):
        one.close()
    return compared


@needs_compiler
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_twin_gives_the_same_bits(rank_pool: Pool, world_size: int) -> None:
    assert rank_pool(world_size).run(both, deadline=120) == [len(SUMMABLE) * 12] * world_size


def twin_messages(rank: Rank) -> list[float]:
    communicator = ShmCommunicator(context(rank, "twin"), native=False, **SMALL)
    peer = 1 - rank.rank
    send = communicator.isend(torch.full((5000,), float(rank.rank)), peer)
    target = torch.empty(5000)
    communicator.irecv(target, peer).wait()
    send.wait()
    communicator.close()
    return [float(target.min()), float(target.max())]


def test_messages_larger_than_a_ring_pass_through_the_twin(rank_pool: Pool) -> None:
    assert rank_pool(2).run(twin_messages) == [[1.0, 1.0], [0.0, 0.0]]


def without_compiler(rank: Rank) -> str:
    os.environ["CXX"] = "no-such-compiler"
    cached, shm.load = shm.load, lambda: native_build.ensure_built(shm_library())
    try:
        communicator = shm.build(context(rank, "x"))
        kind = type(communicator._channels[0]).__name__
        total = communicator.all_reduce(torch.ones(2)).tolist()
        communicator.close()
        return f"{kind} {total}"
    finally:
        del os.environ["CXX"]
        shm.load = cached


def shm_library() -> Any:
    from fourfold_comm_cpu.native import library

    return library()


def test_without_a_compiler_the_twin_serves(rank_pool: Pool) -> None:
    assert rank_pool(2).run(without_compiler) == ["TorchChannel [2.0, 2.0]"] * 2


def wraps(rank: Rank) -> int:
    communicator = ShmCommunicator(context(rank, "x"), native=True)
    channel = communicator._channels[0]
    assert isinstance(channel, NativeChannel)
    communicator.barrier()
    rank.store.set(f"passed {rank.rank}", "")
    rank.store.wait([f"passed {one}" for one in range(rank.world_size)])
    start = 2**32 - 16
    channel._state.sequence = start
    words = channel._memory[: 64 * rank.world_size].view(torch.int32).view(rank.world_size, 16)
    words[rank.rank, 0] = start - 2**32
    rank.store.set(f"ready {rank.rank}", "")
    rank.store.wait([f"ready {one}" for one in range(rank.world_size)])
    for number in range(50):
        found = communicator.all_reduce(torch.tensor([number + rank.rank, 7]))
        assert found.tolist() == [2 * number + 1, 14]
    sequence = int(channel._state.sequence)
    communicator.close()
    return sequence


@needs_compiler
def test_counters_wrap(rank_pool: Pool) -> None:
    assert rank_pool(2).run(wraps) == [2**32 - 16 + 50] * 2


def disagrees(rank: Rank, native: bool) -> list[str]:
    """One rank sums, the other one broadcasts; after that the channel stays broken."""
    communicator = ShmCommunicator(context(rank, "x", timeout=5.0), native=native)
    errors = []
    for _ in range(2):
        try:
            if rank.rank == 0:
                communicator.all_reduce(torch.ones(3))
            else:
                communicator.broadcast(torch.ones(3))
        except FourfoldError as error:
            errors.append(f"{type(error).__name__}: {error}")
    communicator.close()
    return errors


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
def test_ranks_that_do_different_things_are_told_at_once(rank_pool: Pool, native: bool) -> None:
    started = time.monotonic()
    for rank, errors in enumerate(rank_pool(2).run(disagrees, native)):
        assert len(errors) == 2
        assert re.match(
            rf"EngineError: rank 1{rank} runs .* in group tp, and rank\(s\) 1{1 - rank} run something else", errors[0]
        )
    assert time.monotonic() - started < 30


def times_out_once(rank: Rank, native: bool) -> list[str]:
    """Rank 1 comes after rank 0 has given up: neither may get data from then on."""
    communicator = ShmCommunicator(context(rank, "x", timeout=0.5), native=native)
    errors = []
    if rank.rank == 1:
        rank.store.wait(["gave up"])
    for _ in range(3):
        try:
            communicator.all_reduce(torch.ones(3))
        except RpcTimeout as error:
            errors.append(str(error.missing_ranks))
        rank.store.set("gave up", "")
    communicator.close()
    return errors


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
def test_a_timeout_is_for_good(rank_pool: Pool, native: bool) -> None:
    first, late = rank_pool(2).run(times_out_once, native)
    assert first == ["(11,)"] * 3
    assert late[-2:] == ["(10,)"] * 2, "a rank that was late must not go on alone"


def records(rank: Rank) -> list[str]:
    class Recorder:
        calls: list[int] = []

        def record_call(self, function: int, argument: int, *, tensors: Any, keep: Any) -> None:
            self.calls.append(function)

    communicator = ShmCommunicator(context(rank, "x"), native=True)
    recorder, tensor, refused = Recorder(), torch.ones(3), []
    with recording(recorder):
        assert communicator.all_reduce(tensor) is tensor
        for name, operation in {
            "broadcast": lambda: communicator.broadcast(tensor),
            "all_gather": lambda: communicator.all_gather(tensor),
            "gather": lambda: communicator.gather(tensor),
            "barrier": communicator.barrier,
            "irecv": lambda: communicator.irecv(tensor, 1 - rank.rank),
        }.items():
            with pytest.raises(Unsupported, match=name):
                operation()
            refused.append(name)
    assert len(recorder.calls) == 1
    assert tensor.tolist() == [1.0] * 3, "a recorded sum must not run"
    communicator.close()
    return refused


@needs_compiler
def test_sums_are_recorded_and_all_else_is_refused(rank_pool: Pool) -> None:
    assert rank_pool(2).run(records) == [["broadcast", "all_gather", "gather", "barrier", "irecv"]] * 2


def mappings(pid: int | str = "self") -> set[str]:
    """Inodes of shared memory of communicators that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:fourfold-tp" in line}


def lets_go(rank: Rank, native: bool) -> int:
    before = mappings()
    communicator = ShmCommunicator(context(rank, "x"), native=native)
    memory = communicator.peer_memory(100)
    communicator.barrier()
    assert len(mappings() - before) == 2
    memory.close()
    communicator.close()
    del memory, communicator
    gc.collect()
    return len(mappings() - before)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_compiler), False])
def test_close_lets_go_of_the_memory(rank_pool: Pool, native: bool) -> None:
    assert rank_pool(2).run(lets_go, native) == [0, 0]


def target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # a store opens and closes its file all the time
        return ""


def mapped(rank: Rank) -> list[str]:
    ShmCommunicator(context(rank, "x"), native=False).barrier()
    return sorted(mappings())


def test_killed_ranks_leave_no_memory() -> None:
    with RankPool(2) as pool:
        one, other = pool.run(mapped)
        assert one == other
        for pid in pool.pids():
            assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text(), "it has no name that could stay"
            assert not [path for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:fourfold" in target(path)]
            os.kill(pid, signal.SIGKILL)
    alive = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    assert not [pid for pid in alive if mappings(pid) & set(one)]


def test_gpus_and_crowds_are_refused() -> None:
    whole = {"group": "tp", "ranks": (0, 1), "rank": 0, "store": None, "timeout": 1.0}
    with pytest.raises(Unsupported, match="on a cpu, not on cuda"):
        shm.build(CommunicatorContext(**whole, device=torch.device("cuda")))
    with pytest.raises(Unsupported, match="up to 60 ranks, not 61"):
        shm.build(CommunicatorContext(**{**whole, "ranks": tuple(range(61))}, device=CPU))


def wrong_sizes(rank: Rank) -> list[str]:
    communicator = ShmCommunicator(context(rank, "x", timeout=5.0), native=True)
    errors = []
    for operation in (
        lambda: communicator.all_gather(torch.ones(3), sizes=[3, 3, 3]),
        lambda: communicator.reduce_scatter(torch.ones(3)),
        lambda: communicator.isend(torch.ones(1), rank.rank),
        lambda: communicator.all_reduce(torch.ones(2, dtype=torch.complex64)),
        lambda: communicator.all_reduce(torch.ones(2), channel=9),
        lambda: communicator.all_to_all(torch.ones(4), send_sizes=[2, 2], receive_sizes=[2, 3]),
    ):
        try:
            operation()
        except (EngineError, Unsupported) as error:
            errors.append(str(error))
    communicator.close()
    return errors


@needs_compiler
def test_sizes_that_do_not_fit_are_errors(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(wrong_sizes):
        assert len(errors) == 6
        assert "sizes are [3, 3, 3]" in errors[0]
        assert "reduce_scatter of 3 rows over 2 ranks needs sizes" in errors[1]
