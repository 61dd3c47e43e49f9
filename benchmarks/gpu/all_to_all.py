"""Tokens to the experts of other CUDA devices and back: ``peer`` against NCCL, in device graphs.

Dispatch, with ids, weights and the wait for all ranks, against an all-gather of the tokens alone; combine, with the
wait, against a reduce-scatter. The shape is that of Qwen3-30B-A3B. Prints the best median of several turns, in us.
Aims on two devices: at least 1.7x each way at every size, 2.0x where it can be had.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import AllToAllContext
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_nccl.autotune import microseconds

HIDDEN, TOP_K, NUM_EXPERTS = 2048, 8, 128
TOKENS = (8, 64, 256, 1024, 4096)
AIM = 1.7
OPERATIONS, REPLAYS, TURNS = 20, 9, 3


def measure(rank: Rank, hidden: int, top_k: int) -> list[list[float]]:
    """[tokens]: tokens a rank; microseconds of dispatch, all-gather, combine, reduce-scatter."""
    rows, device = [], torch.device("cuda", rank.rank)
    with connected(rank, "nccl", "cuda") as communicator, torch.inference_mode():
        found: Any = communicator
        group, meet = found._group, found.fast_path.custom.meet
        context = AllToAllContext(
            config=EngineConfig(),
            device=device,
            dtype=torch.bfloat16,
            communicator=communicator,
            hidden_size=hidden,
            top_k=top_k,
            num_experts=NUM_EXPERTS,
            owners=torch.arange(NUM_EXPERTS, dtype=torch.int32) * rank.world_size // NUM_EXPERTS,
            max_tokens=max(TOKENS),
        )
        peer = load_plugins().all_to_alls()["peer"].build(context)
        for count in TOKENS:
            x = torch.randn(count, hidden, device=device).bfloat16()
            ids = torch.rand(count, NUM_EXPERTS, device=device).topk(top_k).indices.int()
            weights = torch.rand(count, top_k, device=device)
            everything, sums = x.repeat(rank.world_size, 1), torch.empty_like(x)

            def gather(out: torch.Tensor = everything, x: torch.Tensor = x) -> None:
                group._allgather_base(out, x).wait()

            def scatter(out: torch.Tensor = sums, x: torch.Tensor = everything) -> None:
                group._reduce_scatter_base(out, x).wait()

            def combine(partial: torch.Tensor = everything) -> None:
                peer.combine_send(partial)
                peer.combine_receive()

            dispatch = partial(peer.dispatch_send, x, ids, weights, sizes=[count] * rank.world_size)
            times = alternate([dispatch, gather, combine, scatter], meet)
            rows.append([float(count), *times])
        peer.close()
    return rows


def alternate(runs: list[Callable[[], object]], meet: Callable[[], None]) -> list[float]:
    """The better of several turns of each, in turn."""
    turns = [[microseconds(run, meet, operations=OPERATIONS, replays=REPLAYS) for run in runs] for _ in range(TURNS)]
    return [min(times) for times in zip(*turns)]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    given = parser.parse_args()
    with RankPool(given.ranks) as pool:
        of_ranks = pool.run(measure, given.hidden, given.top_k, deadline=240.0)
    print(f"{given.ranks} devices, rows of {given.hidden} in bfloat16, {given.top_k} of {NUM_EXPERTS} experts a token")
    for rows in zip(*of_ranks):
        count, dispatch, gather, combine, scatter = (max(values) for values in zip(*rows))
        there = f"dispatch {dispatch:7.1f}   all-gather {gather:7.1f}   {gather / dispatch:5.2f}x"
        back = f"combine {combine:7.1f}   reduce-scatter {scatter:7.1f}   {scatter / combine:5.2f}x"
        print(f"{count:6.0f} tokens   {there}   {back}   (at least {AIM}x)")


if __name__ == "__main__":
    main()
