"""What ``CommunicatorConformance`` runs on every rank. Each case builds a communicator by name and closes it."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fourfold.contracts.communicator import Communicator, Receiver, Sender
from fourfold.contracts.split_sum import SplitSums
from fourfold.distributed.self_test import self_test
from fourfold.distributed.store import scoped
from fourfold.entries import CommunicatorContext
from fourfold.errors import EngineError, RpcTimeout, Unsupported
from fourfold.plugins import load_plugins
from fourfold.testing.rank_process import Rank

SIZES = ((0,), (1,), (3,), (7, 33), (64, 576), (300_007,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.int64: 0.0}


@contextmanager
def connected(
    rank: Rank, name: str, device: str, *, ranks: Sequence[int] | None = None, timeout: float = 30.0
) -> Iterator[Communicator]:
    """The communicator of this rank; ``ranks`` are the group's global ones, in order."""
    members = tuple(range(rank.world_size)) if ranks is None else tuple(ranks)
    entry = load_plugins().communicators()[name]
    # One for several hosts gets what it is for: all but the first two ranks count as being elsewhere.
    hosts = tuple(int(place > 1) if "several_hosts" in entry.capabilities else 0 for place in range(len(members)))
    context = CommunicatorContext(
        group="tp",
        ranks=members,
        rank=members.index(rank.rank),
        device=place(rank, device),
        store=scoped(rank.store, f"{name} {members}"),
        timeout=timeout,
        one_host=len(set(hosts)) == 1,
        hosts=hosts,
    )
    communicator = entry.build(context)
    try:
        yield communicator
    finally:
        communicator.close()


def place(rank: Rank, device: str) -> torch.device:
    """Where a rank's tensors are: ranks take turns on the devices that there are."""
    return torch.device("cpu") if device == "cpu" else torch.device(device, rank.rank % torch.cuda.device_count())


def data(rank: int, shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Noise that depends on rank and seed; any rank can make any other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.int64:
        return torch.randint(-(2**40), 2**40, tuple(shape), generator=generator).to(device)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def digest(tensor: torch.Tensor) -> str:
    """Equal for equal bits."""
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in shape, dtype and value, as near as the dtype allows."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=4 * tolerance)


def passes_the_self_test(rank: Rank, name: str, device: str) -> Any:
    """What was wrong, or None."""
    with connected(rank, name, device) as communicator:
        return self_test(communicator, place(rank, device))


def reduces(rank: Rank, name: str, device: str) -> list[str]:
    """Digests of all results, in order."""
    world, found = rank.world_size, []
    with connected(rank, name, device) as communicator:
        for dtype in DTYPES:
            for shape in SIZES:
                everyone = [data(one, shape, dtype, device) for one in range(world)]
                total = torch.stack([one.double() for one in everyone]).sum(0).to(dtype)
                summed = communicator.all_reduce(everyone[rank.rank].clone())
                check(summed, total)
                found.append(digest(summed))
        strided = data(rank.rank, (6, 10), torch.float32, device).t()
        total = torch.stack([data(one, (6, 10), torch.float32, device).t().double() for one in range(world)]).sum(0)
        check(communicator.all_reduce(strided), total.float())
    return found


def splits_sums(rank: Rank, name: str, device: str) -> bool:
    """Two sums in the air at once, with other collectives in their way; False where sums are not split."""
    world, mine = rank.world_size, rank.rank
    with connected(rank, name, device) as communicator:
        if not isinstance(communicator, SplitSums):
            return False
        line = communicator.channels - 1
        for seed, shape in enumerate(SIZES):
            sums = []
            for channel in (0, line):
                everyone = [data(one, shape, torch.float32, device, seed=2 * seed + channel) for one in range(world)]
                total = torch.stack([one.double() for one in everyone]).sum(0).float()
                sums.append((communicator.start_all_reduce(everyone[mine].clone(), channel=channel), total))
            if seed % 2:
                ones = torch.ones(3, device=device)
                check(communicator.all_reduce(ones.clone(), channel=0), world * ones)
                check(communicator.all_gather(ones.clone(), channel=line), ones.repeat(world))
            for pending, total in sums[:: 1 if seed % 3 else -1]:
                check(pending.wait(), total)
        check(communicator.all_reduce(torch.ones(3, device=device)), torch.full((3,), float(world), device=device))
    return True


def gathers_and_scatters(rank: Rank, name: str, device: str) -> None:
    """Even and uneven rows, none included; every source and destination."""
    world, mine = rank.world_size, rank.rank
    with connected(rank, name, device) as communicator:
        for dtype in DTYPES:
            for rows, width in ((3, 5), (1, 40_000)):
                shapes = [(max(0, rows + one - 1) if one else 0, width) for one in range(world)]
                sizes = [shape[0] for shape in shapes]
                parts = [data(one, shape, dtype, device) for one, shape in enumerate(shapes)]
                check(communicator.all_gather(parts[mine].clone(), sizes=sizes), torch.cat(parts))
                even = [data(one, (rows, width), dtype, device) for one in range(world)]
                check(communicator.all_gather(even[mine].clone()), torch.cat(even))
                whole = [data(one, (sum(sizes), width), dtype, device) for one in range(world)]
                total = torch.stack([one.double() for one in whole]).sum(0).to(dtype)
                first = sum(sizes[:mine])
                kept = total[first : first + sizes[mine]]
                check(communicator.reduce_scatter(whole[mine].clone(), sizes=sizes), kept)
                for one in range(world):
                    check(communicator.broadcast(even[mine].clone(), source=one), even[one])
                    whole_rows = torch.zeros(rows, world * width, dtype=dtype, device=device)
                    for out in (
                        None,
                        torch.split(whole_rows, width, dim=1),
                        torch.zeros_like(torch.stack(even)).unbind(),
                    ):
                        given = out if one == mine else None
                        gathered = communicator.gather(even[mine].clone(), destination=one, out=given)
                        assert (gathered is None) == (one != mine)
                        for found, expected in zip(gathered or [], even):
                            check(found, expected)
                    if one == mine:
                        check(whole_rows, torch.cat(even, dim=1))


def broadcasts_in_place(rank: Rank, name: str, device: str) -> None:
    """Into the tensor that was given, strided or not."""
    with connected(rank, name, device) as communicator:
        for tensor in (torch.full((4, 3), float(rank.rank), device=device), torch.zeros(4, 6, device=device)[:, ::2]):
            tensor.fill_(float(rank.rank))
            communicator.broadcast(tensor, source=1)
            assert bool((tensor == 1.0).all())


def exchanges(rank: Rank, name: str, device: str) -> None:
    """all_to_all of random sizes, none included."""
    world, mine = rank.world_size, rank.rank
    with connected(rank, name, device) as communicator:
        for seed, scale in enumerate((3, 5, 3000, 0)):
            sizes = random.Random(seed)
            table = [[sizes.randint(0, scale) for _ in range(world)] for _ in range(world)]
            rows = [data(one, (sum(table[one]), 100), torch.float32, device, seed) for one in range(world)]
            expected = [one[sum(table[source][:mine]) :][: table[source][mine]] for source, one in enumerate(rows)]
            found = communicator.all_to_all(
                rows[mine], send_sizes=table[mine], receive_sizes=[table[source][mine] for source in range(world)]
            )
            check(found, torch.cat(expected))


def sends_in_order(rank: Rank, name: str, device: str) -> None:
    """Many messages around the ring both ways, larger than any buffer among them, all started before one is awaited."""
    world, mine = rank.world_size, rank.rank
    shapes = [(1,), (5, 7), (700_001,), (0,), (16,), (3, 1000)]
    with connected(rank, name, device) as communicator:
        peers = sorted({(mine + 1) % world, (mine - 1) % world})
        sends, receives = [], []
        for number, shape in enumerate(shapes):
            for peer in peers:
                target = torch.zeros(shape, device=device)
                sent = data(mine * world + peer, shape, torch.float32, device, number)
                if device == "cpu" or mine < peer:
                    sends.append(communicator.isend(sent, peer))
                    receives.append((communicator.irecv(target, peer), target, peer, number, shape))
                else:  # without buffers, one side must receive first
                    receives.append((communicator.irecv(target, peer), target, peer, number, shape))
                    sends.append(communicator.isend(sent, peer))
        for handle, target, peer, number, shape in receives:
            handle.wait()
            check(target, data(peer * world + mine, shape, torch.float32, device, number))
        for send in sends:
            send.wait()


def survives_skew(rank: Rank, name: str, device: str, rounds: int) -> str:
    """Back-to-back collectives of changing sizes, with ranks late at random: finds buffers that are reused too soon."""
    world, late = rank.world_size, random.Random(rank.rank)
    pause, sizes, seen = threading.Event(), random.Random(7), hashlib.sha256()
    with connected(rank, name, device) as communicator:
        for number in range(rounds):
            count = sizes.choice((1, 100, 3000, 70_000))
            if late.random() < 0.05:
                pause.wait(late.random() * 0.002)
            everyone = [torch.arange(count, device=device) % 97 + one * number for one in range(world)]
            found = communicator.all_reduce(everyone[rank.rank].clone())
            assert torch.equal(found, sum(everyone[1:], everyone[0]))
            if number % 3 == 0:
                source = number % world
                assert torch.equal(communicator.broadcast(everyone[rank.rank].clone(), source=source), everyone[source])
            seen.update(digest(found).encode())
    return seen.hexdigest()


def pipes(rank: Rank, name: str, device: str) -> list[int]:
    """Two pipes each way around the ring, all filled to their depth before one is emptied; lengths that came."""
    world, mine, depth = rank.world_size, rank.rank, 3
    after, before = (mine + 1) % world, (mine - 1) % world
    where, lengths = place(rank, device), []
    with connected(rank, name, device) as communicator:
        senders: list[Sender] = []
        receivers: list[Receiver] = []
        for _ in range(2):
            for end in range(2):  # each rank opens in the order in which its peers do
                if (end == 0) == (mine == 0):
                    senders.append(communicator.sender(after, nbytes=4000, depth=depth))
                else:
                    receivers.append(communicator.receiver(before, nbytes=4000, depth=depth))
        for number in range(4 * depth):
            rows = 1000 if number % 2 else number
            for way, sender in enumerate(senders):
                whole = data(10 * mine + way, (rows,), torch.float32, "cpu", number).to(where)
                sender.send([whole[: rows // 3], whole[rows // 3 :]])
                whole.fill_(-1.0)
            if number < depth - 1:
                continue
            late = number - depth + 1
            rows = 1000 if late % 2 else late
            for way, receiver in reversed(list(enumerate(receivers))):
                target = torch.zeros(rows, device=where)
                lengths.append(receiver.receive([target[: rows // 2], target[rows // 2 :]]))
                check(target, data(10 * before + way, (rows,), torch.float32, "cpu", late))
        communicator.barrier()  # what a peer has not received may be lost when its sender closes
        for close in [one.close for one in senders] + [one.close for one in receivers]:
            close()
            close()
    return lengths


def names_who_is_missing(rank: Rank, name: str, device: str) -> Any:
    """On rank 0, which waits for the last rank in vain: (error, ranks it names, seconds)."""
    with connected(rank, name, device, timeout=2.0) as communicator:
        communicator.barrier()
        if rank.rank == rank.world_size - 1:
            rank.store.wait(["over"])
            return None
        started = time.monotonic()
        try:
            communicator.all_reduce(torch.ones(10, device=device))
            if device != "cpu":  # queued, not done: the barrier waits for the device
                communicator.barrier()
        except RpcTimeout as error:
            return type(error).__name__, list(error.missing_ranks), time.monotonic() - started
        finally:
            rank.store.set("over", "")
        return "nothing", [], 0.0


def keeps_groups_apart(rank: Rank, name: str, device: str) -> None:
    """Two groups of two at once, with their own ranks."""
    ranks = (0, 1) if rank.rank < 2 else (2, 3)
    with connected(rank, name, device, ranks=ranks) as communicator:
        found = communicator.all_reduce(torch.full((1000,), float(rank.rank), device=device))
        assert bool((found == float(sum(ranks))).all())


def shares_memory(rank: Rank, name: str, device: str) -> str:
    """``Unsupported``, or ``works`` when every rank sees what every other wrote."""
    with connected(rank, name, device) as communicator:
        try:
            memory = communicator.peer_memory(1000)
        except Unsupported:
            communicator.barrier()  # a peer may still be connecting
            return "Unsupported"
        for one in range(rank.world_size):
            memory.buffer(one)[rank.rank] = 10 * rank.rank + one
        memory.barrier()
        mine = memory.buffer(rank.rank)
        assert mine.shape == (1000,)
        assert [int(mine[one]) for one in range(rank.world_size)] == [
            10 * one + rank.rank for one in range(rank.world_size)
        ]
        memory.barrier()
        memory.close()
        memory.close()
        return "works"


def uses_its_channels(rank: Rank, name: str, device: str) -> int:
    """The number of channels, each of which sums on its own."""
    with connected(rank, name, device) as communicator:
        for channel in range(communicator.channels):
            found = communicator.all_reduce(torch.full((9,), 1.0 + channel, device=device), channel=channel)
            assert bool((found == (1.0 + channel) * rank.world_size).all())
        return communicator.channels


def closes_twice(rank: Rank, name: str, device: str) -> None:
    """After which it refuses."""
    with connected(rank, name, device) as communicator:
        communicator.barrier()
        communicator.close()
        communicator.close()
        try:
            communicator.all_reduce(torch.ones(3, device=device))
        except EngineError:
            return
        raise AssertionError("a closed communicator went on")
