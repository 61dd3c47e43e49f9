"""Whether a communicator moves the right data: every collective once, with patterns that differ between ranks.

Expected values are computed here; all of them are exact in every dtype, so equality is bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator

DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64)
SIZES: Final = (1, 31, 4_099, 150_001)
"""Elements: one, few, odd, and more than fits in one piece of a usual buffer."""


def self_test(communicator: Communicator, device: torch.device) -> str | None:
    """What was wrong first, in words; None: all right. All ranks of the group must call this.

    It goes on after the first mistake: the other ranks may have seen none, and must not be left waiting.
    """
    problem: str | None = None
    for dtype in DTYPES:
        for size in SIZES:
            for operation, found, expected in _collectives(communicator, size, dtype, device):
                if problem is None and not (found.shape == expected.shape and torch.equal(found, expected)):
                    problem = (
                        f"{operation} of {size} {str(dtype).removeprefix('torch.')} gave wrong data on rank "
                        f"{communicator.rank} of the group{_where(found, expected)}"
                    )
    communicator.barrier()
    return problem


def pattern(rank: int, size: int, dtype: torch.dtype, world_size: int, device: torch.device) -> torch.Tensor:
    """[size] small numbers that differ between ranks and neighbours; sums over ranks stay exact in bfloat16."""
    modulus = max(2, min(13, 256 // world_size))
    index = torch.arange(size, device=device)
    return ((index * (rank + 3) + rank) % modulus).to(dtype)


def _collectives(
    communicator: Communicator, size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(operation, what it gave, what it should have given), one after the other."""
    rank, world = communicator.rank, communicator.world_size
    all_ranks = [pattern(one, size, dtype, world, device) for one in range(world)]
    mine, total = all_ranks[rank], torch.stack(all_ranks).sum(0).to(dtype)
    yield "all_reduce", communicator.all_reduce(mine.clone()), total
    uneven = [one[: size - (index % 2 if size > 1 else 0)] for index, one in enumerate(all_ranks)]
    sizes = [len(one) for one in uneven]
    yield "all_gather", communicator.all_gather(uneven[rank].clone(), sizes=sizes), torch.cat(uneven)
    parts = _parts(size, world)
    first = sum(parts[:rank])
    kept = total[first : first + parts[rank]]
    yield "reduce_scatter", communicator.reduce_scatter(mine.clone(), sizes=parts), kept
    source = world - 1
    yield "broadcast", communicator.broadcast(mine.clone(), source=source), all_ranks[source]
    gathered = communicator.gather(mine.clone(), destination=0)
    yield "gather", *(_stacked(gathered, mine), torch.stack(all_ranks) if rank == 0 else mine)
    arrived = [one[sum(parts[:rank]) :][: parts[rank]] for one in all_ranks]
    received = communicator.all_to_all(mine.clone(), send_sizes=parts, receive_sizes=[parts[rank]] * world)
    yield "all_to_all", received, torch.cat(arrived)
    target = torch.zeros_like(mine)
    receive = communicator.irecv(target, (rank - 1) % world)
    send = communicator.isend(mine.clone(), (rank + 1) % world)
    receive.wait()
    send.wait()
    yield "send", target, all_ranks[(rank - 1) % world]


def _parts(size: int, world: int) -> list[int]:
    each, left = divmod(size, world)
    return [each + (index < left) for index in range(world)]


def _stacked(gathered: Sequence[torch.Tensor] | None, otherwise: torch.Tensor) -> torch.Tensor:
    return otherwise if gathered is None else torch.stack(list(gathered))


def _where(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.shape != expected.shape:
        return f": shape {list(found.shape)}, not {list(expected.shape)}"
    at = int((found != expected).flatten().nonzero()[0])
    return f": element {at} is {found.flatten()[at].item()}, not {expected.flatten()[at].item()}"
