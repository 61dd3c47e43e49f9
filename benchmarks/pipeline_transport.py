"""One hop of activations between two stages of this host: the stage transport, against tensors that go one by one.

The other way is two tensors after a pickled description of them, over the sends and receives of the same communicator.
Prints the median microseconds from the call that sends to the return of the one that receives, and the ratio. Aims, at
64 tokens of 4096 on two idle cores: 1.5x.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time

import torch

from fourfold.distributed.model_parallel import ModelParallel
from fourfold.distributed.stage_transport import StageTransport
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold.testing.stage_cases import stages

ROUNDS, WARM_UP = 300, 30
DTYPE = torch.bfloat16


def measure(rank: Rank, name: str, tokens: int, width: int) -> list[list[float]]:
    """[way][round] the time at which this rank began to send, or had received; clocks of one host agree."""
    hidden, residual = (torch.randn(tokens, width).to(DTYPE) for _ in range(2))
    with stages(rank, name, "cpu", 1) as parallel:
        ends = StageTransport(parallel, torch.device("cpu"), hidden_size=width, dtype=DTYPE, max_tokens=tokens, depth=2)
        times: list[list[float]] = [[], []]
        for number in range(ROUNDS + WARM_UP):
            for way in range(2):
                step = 2 * number + way
                started = time.perf_counter()
                if rank.rank == 0 and way == 0:
                    ends.send_activations(step, hidden, residual)
                elif rank.rank == 0:
                    send_described(parallel, {"hidden": hidden, "residual": residual})
                elif way == 0:
                    ends.receive_activations(step, tokens)
                else:
                    receive_described(parallel)
                if number >= WARM_UP:
                    times[way].append(started if rank.rank == 0 else time.perf_counter())
                if rank.rank == 0:  # the next hop starts when this one is over
                    ends.receive_ids(step, 1)
                else:
                    ends.send_ids(step, torch.tensor([number]))
        ends.close()
    return times


def send_described(parallel: ModelParallel, tensors: dict[str, torch.Tensor]) -> None:
    """The length of a description, the description, and each tensor."""
    description = pickle.dumps([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])
    parallel.pp.send(torch.tensor([len(description)]), 1)
    parallel.pp.send(torch.frombuffer(bytearray(description), dtype=torch.uint8), 1)
    handles = [parallel.pp.isend(tensor, 1) for tensor in tensors.values()]
    for handle in handles:
        handle.wait()


def receive_described(parallel: ModelParallel) -> dict[str, torch.Tensor]:
    """What ``send_described`` sent."""
    length = torch.zeros(1, dtype=torch.int64)
    parallel.pp.recv(length, 0)
    description = torch.zeros(int(length), dtype=torch.uint8)
    parallel.pp.recv(description, 0)
    tensors = {
        name: torch.empty(shape, dtype=dtype) for name, dtype, shape in pickle.loads(description.numpy().tobytes())
    }
    handles = [parallel.pp.irecv(tensor, 0) for tensor in tensors.values()]
    for handle in handles:
        handle.wait()
    return tensors


def main() -> None:
    """Print one line a communicator and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comm", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--hidden-size", type=int, nargs="+", default=[4096, 576])
    given = parser.parse_args()
    with RankPool(2) as pool:
        for name in given.comm:
            for tokens in given.tokens:
                for width in given.hidden_size:
                    sent, received = pool.run(measure, name, tokens, width, deadline=120.0)
                    fused, described = (
                        statistics.median(after - before for before, after in zip(*way)) * 1e6
                        for way in zip(sent, received)
                    )
                    print(
                        f"{name:5} T={tokens} H={width}: stage transport {fused:7.1f} us, two tensors and a pickled "
                        f"description {described:7.1f} us, ratio {described / fused:.2f}x",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
