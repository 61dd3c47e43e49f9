"""Experts spread over ranks of this host: tokens that travel, the vote before a step, and the balancing of experts.

Medians in microseconds, in turns within one run, and ratios. Aims on two idle cores: dispatch and combine in shared
memory 4x faster than ``all_to_all_single`` over gloo at 64 tokens; the vote 8x faster than over gloo; 256 experts in 60
layers balanced within 0.5 s, to 0.98 for 8 ranks with one redundant expert each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.communicator import Communicator
from fourfold.contracts.mixture import AllToAll, RebalancerContext
from fourfold.contracts.step_part import StepVote
from fourfold.distributed.ballot import Ballot
from fourfold.entries import AllToAllContext
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold.testing.routing import expert_load
from fourfold_moe_ep.expert_copies import first_map
from fourfold_moe_ep.placement import Linear
from fourfold_moe_ep.rebalancer import GreedyRebalancer, balancedness

HIDDEN, TOP_K, NUM_EXPERTS = 2048, 8, 64
TOKENS = (1, 8, 64, 512)
WIRES = (
    ("shm", "shm"),
    ("allgather_reducescatter", "shm"),
    ("all_to_all_single", "shm"),
    ("all_to_all_single", "gloo"),
)
ROUNDS = 60


def build(communicator: Communicator, name: str) -> AllToAll:
    owners = Linear().place(NUM_EXPERTS, communicator.world_size)
    context = AllToAllContext(
        config=EngineConfig(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        communicator=communicator,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        num_experts=NUM_EXPERTS,
        owners=torch.tensor(owners, dtype=torch.int32),
        max_tokens=max(TOKENS),
    )
    return load_plugins().all_to_alls()[name].build(context)


def median(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Microseconds of each, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 5):
        for call, taken in zip(calls, times):
            started = time.perf_counter()
            call()
            if number >= 5:
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) * 1e6 for taken in times]


def travel(rank: Rank) -> list[list[float]]:
    """[tokens][wire]: dispatch and combine, without experts."""
    rows = []
    with ExitStack() as stack:
        links = {name: stack.enter_context(connected(rank, name, "cpu")) for name in ("shm", "gloo")}
        wires = [build(links[communicator], name) for name, communicator in WIRES]
        for count in TOKENS:
            generator = torch.Generator().manual_seed(rank.rank)
            x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
            ids = torch.rand(count, NUM_EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.int32)
            weights = torch.rand(count, TOP_K, generator=generator)

            def trip(wire: AllToAll, x: torch.Tensor = x, ids: torch.Tensor = ids, w: torch.Tensor = weights) -> None:
                wire.dispatch_send(x, ids, w, sizes=[len(x)] * rank.world_size)
                wire.combine_send(wire.dispatch_receive().x)
                wire.combine_receive()

            rows.append(median([partial(trip, wire) for wire in wires], ROUNDS))
    return rows


def vote(rank: Rank) -> list[float]:
    """Over shared memory, and over gloo."""
    with ExitStack() as stack:
        ballots = [Ballot(stack.enter_context(connected(rank, name, "cpu")), 1) for name in ("shm", "gloo")]
        mine = StepVote(has_work=True, may_pause=False)
        return median([partial(ballot.hold, 7, mine, wants_cut=False) for ballot in ballots], 5 * ROUNDS)


def balance() -> None:
    for num_ranks in (8, 32):
        for kind in ("zipf", "lognormal"):
            load = expert_load(kind, 60, 256)
            slots = 256 + num_ranks
            started = time.perf_counter()
            balanced = GreedyRebalancer(RebalancerContext()).balance(load, num_ranks, slots)
            seconds = time.perf_counter() - started
            owners = Linear().place(slots, num_ranks)
            before = balancedness(load, first_map(60, 256, slots), owners, num_ranks)
            after = balancedness(load, balanced, owners, num_ranks)
            print(
                f"256 experts x 60 layers, {num_ranks:2} ranks, {kind:9}   balancedness {before:.3f} -> {after:.3f}",
                end="",
            )
            print(f"   solved in {seconds:.3f} s")


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with RankPool(given.ranks) as pool:
        print(f"{given.ranks} ranks, hidden size {HIDDEN}, bfloat16, {TOP_K} of {NUM_EXPERTS} experts, microseconds")
        for count, row in zip(TOKENS, pool.run(travel, deadline=150.0)[0]):
            columns = "".join(f"   {name} over {link} {value:8.0f}" for (name, link), value in zip(WIRES, row))
            print(f"{count:5} tokens{columns}   {row[-1] / row[0]:5.1f}x", flush=True)
        shared, gloo = pool.run(vote, deadline=60.0)[0]
        print(f"vote   shm {shared:7.1f}   gloo {gloo:7.1f}   {gloo / shared:5.1f}x")
    balance()


if __name__ == "__main__":
    main()
