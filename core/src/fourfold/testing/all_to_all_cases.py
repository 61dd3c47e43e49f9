"""What ``AllToAllConformance`` runs on every rank. Experts multiply, so that what comes back can be computed here, and
each does so on its own rank only: an all-to-all that carries nothing brings NaN back.

Every rank can make the tokens of any other, and compares with the sum over ranks, in their order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.communicator import Communicator
from fourfold.contracts.mixture import AllToAll, DispatchedTokens
from fourfold.entries import AllToAllContext
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected, place
from fourfold.testing.rank_process import Rank

HIDDEN = 48
MAX_TOKENS = 40
TOP_K = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens of one rank in one step."""

    rank: int
    sizes: list[int]
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Step:
        """The same, elsewhere."""
        return replace(self, x=self.x.to(device, dtype), ids=self.ids.to(device), weights=self.weights.to(device))


def owners_of(world: int) -> torch.Tensor:
    """Two experts a rank and one more, neighbours on different ranks."""
    return torch.arange(2 * world + 1, dtype=torch.int32) % world


def make_step(
    rank: int, sizes: Sequence[int], num_experts: int, *, seed: int = 0, top_k: int = TOP_K, among: Sequence[int] = ()
) -> Step:
    """Noise of ``rank``; ``among`` are the experts that are chosen, all of them where there are none."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num_tokens, chosen = sizes[rank], torch.tensor(list(among) or range(num_experts), dtype=torch.int32)
    order = torch.rand(num_tokens, len(chosen), generator=generator).argsort(1)
    return Step(
        rank=rank,
        sizes=list(sizes),
        x=torch.randn(num_tokens, HIDDEN, generator=generator),
        ids=chosen[order[:, :top_k]],
        weights=torch.rand(num_tokens, top_k, generator=generator),
    )


def build_over(
    communicator: Communicator,
    name: str,
    device: torch.device,
    *,
    top_k: int = TOP_K,
    dtype: torch.dtype = torch.float32,
) -> AllToAll:
    """The all-to-all of this rank."""
    owners = owners_of(communicator.world_size)
    context = AllToAllContext(
        config=EngineConfig(),
        device=device,
        dtype=dtype,
        communicator=communicator,
        hidden_size=HIDDEN,
        top_k=top_k,
        num_experts=len(owners),
        owners=owners,
        max_tokens=MAX_TOKENS,
    )
    return load_plugins().all_to_alls()[name].build(context)


@contextmanager
def built(
    rank: Rank,
    name: str,
    communicator: str,
    device: str,
    *,
    top_k: int = TOP_K,
    dtype: torch.dtype = torch.float32,
) -> Iterator[AllToAll]:
    """``build_over`` a new communicator."""
    with connected(rank, communicator, device) as connection:
        all_to_all = build_over(connection, name, place(rank, device), top_k=top_k, dtype=dtype)
        try:
            assert isinstance(all_to_all.graph_safe, bool)
            yield all_to_all
        finally:
            all_to_all.close()


def factors(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[R, K] -> [R, 1]: expert e multiplies by e + 1, weighted and summed; an id of -1 counts nothing."""
    return ((ids + 1).float() * weights * (ids >= 0)).sum(1, keepdim=True)


def apply_experts(arrived: DispatchedTokens, rank: int, world: int) -> torch.Tensor:
    """What experts promise: rows without one here give 0, whatever they hold. One of another rank gives NaN."""
    # As ``owners_of`` has it, without a tensor of the host: a device graph may record this.
    strangers = ((arrived.ids >= 0) & (arrived.ids % world != rank)).any(1, keepdim=True)
    nobody = (arrived.ids < 0).all(1, keepdim=True)
    made = arrived.x.float() * factors(arrived.ids, arrived.weights)
    return made.masked_fill(nobody, 0.0).masked_fill(strangers, torch.nan).to(arrived.x.dtype)


def compute(all_to_all: AllToAll, step: Step, *, poison: bool = False, channel: int = 0) -> torch.Tensor:
    """What this rank's experts make of the rows that arrive; ``poison`` makes those NaN that have no expert here."""
    arrived = all_to_all.dispatch_receive(channel=channel)
    rows = len(arrived.x)
    assert (arrived.x.shape, arrived.x.dtype) == ((rows, HIDDEN), step.x.dtype), "x as it was sent"
    assert (arrived.ids.shape, arrived.ids.dtype) == ((rows, step.ids.shape[1]), torch.int32), "int32 ids [R, K]"
    assert (arrived.weights.shape, arrived.weights.dtype) == (arrived.ids.shape, torch.float32), "fp32 weights [R, K]"
    if poison:
        arrived.x[(arrived.ids < 0).all(1)] = torch.nan
    return apply_experts(arrived, step.rank, len(step.sizes))


def travel(all_to_all: AllToAll, step: Step, *, poison: bool = False, channel: int = 0) -> torch.Tensor:
    """All four phases."""
    all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes, channel=channel)
    all_to_all.combine_send(compute(all_to_all, step, poison=poison, channel=channel), channel=channel)
    return all_to_all.combine_receive(channel=channel)


def expected(step: Step, world: int) -> torch.Tensor:
    """The sum over ranks, in their order, of what the experts of each make of the tokens."""
    owners = torch.cat([owners_of(world), torch.tensor([-1], dtype=torch.int32)])
    total = torch.zeros(step.x.shape)
    for rank in range(world):
        there = step.ids.cpu().masked_fill(owners[step.ids.cpu()] != rank, -1)
        total += apply_experts(DispatchedTokens(step.x.cpu(), there, step.weights.cpu()), rank, world).float()
    return total


def check(found: torch.Tensor, step: Step, world: int) -> None:
    """What came back is right, in shape, dtype and value."""
    tolerance = 1e-5 if step.x.dtype is torch.float32 else 2e-2
    assert found.dtype == step.x.dtype
    torch.testing.assert_close(found.cpu().float(), expected(step, world), rtol=tolerance, atol=tolerance)


def routes_at_random(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Sizes that differ, the most that fit among them."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        for seed, base in enumerate((1, 7, MAX_TOKENS - world)):
            step = make_step(rank.rank, [base + one for one in range(world)], len(owners_of(world)), seed=seed)
            step = step.to(place(rank, device), torch.float32)
            check(travel(all_to_all, step), step, world)


def routes_to_one_rank(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Each rank in turn gets everything, and the others nothing."""
    world = rank.world_size
    owners = owners_of(world).tolist()
    with built(rank, name, communicator, device, top_k=2) as all_to_all:
        for target in range(world):
            theirs = [expert for expert, owner in enumerate(owners) if owner == target]
            step = make_step(rank.rank, [9] * world, len(owners), seed=target, among=theirs, top_k=2)
            step = step.to(place(rank, device), torch.float32)
            check(travel(all_to_all, step), step, world)


def has_ranks_without_tokens(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Each rank in turn has none, then nobody has any."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        for idle in range(world + 1):
            sizes = [0 if idle in (one, world) else 5 + one for one in range(world)]
            step = make_step(rank.rank, sizes, len(owners_of(world)), seed=idle).to(place(rank, device), torch.float32)
            check(travel(all_to_all, step), step, world)


def routes_to_one_expert(rank: Rank, name: str, communicator: str, device: str) -> None:
    """K is 1."""
    world = rank.world_size
    with built(rank, name, communicator, device, top_k=1) as all_to_all:
        step = make_step(rank.rank, [11] * world, len(owners_of(world)), top_k=1).to(place(rank, device), torch.float32)
        check(travel(all_to_all, step), step, world)


def carries_tokens_without_experts(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Ids of -1: a choice of fewer experts, and padding, which may hold NaN."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        step = make_step(rank.rank, [8] * world, len(owners_of(world))).to(place(rank, device), torch.float32)
        step.ids[1, 0] = -1
        step.ids[2:4] = -1
        step.x[3] = torch.nan
        found = travel(all_to_all, step)
        check(found, step, world)
        assert not found[2:4].any()


def poisons_holes(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Rows without an expert here are made NaN after they came, in steps one after the other."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        for seed in range(4):
            step = make_step(rank.rank, [13] * world, len(owners_of(world)), seed=seed)
            step = step.to(place(rank, device), torch.float32)
            check(travel(all_to_all, step, poison=True), step, world)


def leaves_inputs_alone(rank: Rank, name: str, communicator: str, device: str) -> None:
    """What is sent is still the caller's, whose shared experts read it afterwards."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        step = make_step(rank.rank, [12] * world, len(owners_of(world))).to(place(rank, device), torch.float32)
        sent = replace(step, x=step.x.clone(), ids=step.ids.clone(), weights=step.weights.clone())
        check(travel(all_to_all, sent), step, world)
        assert torch.equal(sent.x, step.x), "x is as it was"
        assert torch.equal(sent.ids, step.ids), "ids are as they were"
        assert torch.equal(sent.weights, step.weights), "weights are as they were"


def carries_bfloat16(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Half the bytes."""
    world = rank.world_size
    with built(rank, name, communicator, device, dtype=torch.bfloat16) as all_to_all:
        step = make_step(rank.rank, [6] * world, len(owners_of(world))).to(place(rank, device), torch.bfloat16)
        check(travel(all_to_all, step), step, world)


def repeats_itself(rank: Rank, name: str, communicator: str, device: str) -> None:
    """The same step twice, another one between."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        steps = [make_step(rank.rank, [17] * world, len(owners_of(world)), seed=seed) for seed in (0, 1, 0)]
        first, _, last = (travel(all_to_all, step.to(place(rank, device), torch.float32)).clone() for step in steps)
        assert torch.equal(first, last)


def survives_skew(rank: Rank, name: str, communicator: str, device: str, rounds: int) -> None:
    """Steps of random sizes, back to back, with ranks late at random: finds rows that are reused too soon."""
    world, sizes, late = rank.world_size, random.Random(7), random.Random(rank.rank)
    pause = threading.Event()
    with built(rank, name, communicator, device) as all_to_all:
        for seed in range(rounds):
            counts = [sizes.choice((0, 1, 2, 5, MAX_TOKENS)) for _ in range(world)]
            step = make_step(rank.rank, counts, len(owners_of(world)), seed=seed)
            step = step.to(place(rank, device), torch.float32)
            all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes)
            if late.random() < 0.05:
                pause.wait(late.random() * 0.002)
            made = compute(all_to_all, step)
            all_to_all.combine_send(made)
            if late.random() < 0.05:
                pause.wait(late.random() * 0.002)
            check(all_to_all.combine_receive(), step, world)


def overlaps_channels(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Two batches that take turns, phase by phase."""
    world = rank.world_size
    with built(rank, name, communicator, device) as all_to_all:
        for seed in range(10):
            sizes = [[3 + one + seed for one in range(world)], [MAX_TOKENS - seed] * world]
            steps = [
                make_step(rank.rank, counts, len(owners_of(world)), seed=2 * seed + channel)
                for channel, counts in enumerate(sizes)
            ]
            steps = [step.to(place(rank, device), torch.float32) for step in steps]
            for channel, step in enumerate(steps):
                all_to_all.dispatch_send(step.x, step.ids, step.weights, sizes=step.sizes, channel=channel)
            for channel, step in enumerate(steps):
                all_to_all.combine_send(compute(all_to_all, step, channel=channel), channel=channel)
            found = [all_to_all.combine_receive(channel=channel) for channel in range(2)]
            for out, step in zip(found, steps):
                check(out, step, world)


def closes_twice(rank: Rank, name: str, communicator: str, device: str) -> None:
    """Nothing happens."""
    with built(rank, name, communicator, device) as all_to_all:
        all_to_all.close()
