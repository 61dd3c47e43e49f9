"""Two microbatches in turns on streams: what is left of the link's time when one computes while the other travels.

On one device the link is a kernel that spins for a given time on one multiprocessor, half as long as the computing, as
long, and twice as long; on two it is ``peer``. The layers are large products before and after the tokens' travel.
Prints milliseconds in turns against the larger of computing in halves and of the link alone (at most 1.15x), and of
all tokens at once, where everything waits for the link; recorded as one device graph, and launched from Python.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.mixture import DispatchedTokens
from fourfold.entries import AllToAllContext
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_comm_nccl.autotune import microseconds
from fourfold_moe_ep.microbatch import GreenletTurns, MicrobatchContext
from fourfold_moe_ep.streamed_wire import StreamedWire

LAYERS, HIDDEN, TOP_K, NUM_EXPERTS = 12, 4096, 8, 128
TOKENS: Final = 8192
SHARES = (0.5, 1.0, 2.0)
"""Of the link's time in that of computing, on one device."""
REPLAYS = 7


@triton.jit  # type: ignore[untyped-decorator]
def spin(nanoseconds: tl.tensor) -> None:
    """Return after so long."""
    began = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = began
    while now - began < nanoseconds:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


class Link:
    """An all-to-all of one rank, on which each way takes ``nanoseconds`` for all of TOKENS; see AllToAll."""

    graph_safe = True

    def __init__(self, nanoseconds: float) -> None:
        self._nanoseconds = nanoseconds
        self._there: dict[int, DispatchedTokens] = {}
        self._back: dict[int, torch.Tensor] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        self._there[channel] = DispatchedTokens(x, ids, weights)
        self._spin(len(x))

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        return self._there.pop(channel)

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        self._back[channel] = partial
        self._spin(len(partial))

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        return self._back.pop(channel)

    def close(self) -> None: ...

    def _spin(self, rows: int) -> None:
        if self._nanoseconds:
            spin[(1,)](int(self._nanoseconds * rows / TOKENS), num_warps=1)


class Layers:
    """LAYERS of two products, the travel, and experts: two products too, or with ``light`` a factor."""

    def __init__(self, device: torch.device, *, ranks: int, light: bool) -> None:
        self.x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        self.ids = torch.rand(TOKENS, NUM_EXPERTS, device=device).topk(TOP_K).indices.int()
        self.weights = torch.rand(TOKENS, TOP_K, device=device)
        narrow = HIDDEN // 2
        self._matrices = (torch.randn(4, HIDDEN, narrow, device=device) / narrow**0.5).bfloat16()
        self._ranks, self._light = ranks, light

    def whole(self, wire: Any) -> None:
        """All tokens at once."""
        self._run(wire, slice(0, TOKENS), 0, lambda: None)

    def halves(self, wire: Any) -> None:
        """Both halves, one after the other."""
        for index in range(2):
            self._run(wire, self._half(index), index, lambda: None)

    def turns(self, wire: Any) -> None:
        """Both halves, in turns."""

        def body(microbatch: MicrobatchContext) -> None:
            self._run(wire, self._half(microbatch.index), microbatch.index, microbatch.yield_to_other)

        GreenletTurns().run([body, body])

    def link(self, wire: Any) -> None:
        """The travel of both halves alone."""
        for _ in range(LAYERS):
            for index in range(2):
                tokens = self._half(index)
                sizes = [TOKENS // 2] * self._ranks
                wire.dispatch_send(self.x[tokens], self.ids[tokens], self.weights[tokens], sizes=sizes, channel=index)
                wire.combine_send(wire.dispatch_receive(channel=index).x, channel=index)
                wire.combine_receive(channel=index)

    def _half(self, index: int) -> slice:
        return slice(index * TOKENS // 2, (index + 1) * TOKENS // 2)

    def _run(self, wire: Any, tokens: slice, channel: int, hand_over: Callable[[], None]) -> None:
        x, (into, back, up, down) = self.x[tokens], self._matrices
        sizes = [len(x)] * self._ranks
        for _ in range(LAYERS):
            wire.dispatch_send(x @ into @ back.T, self.ids[tokens], self.weights[tokens], sizes=sizes, channel=channel)
            hand_over()
            rows = wire.dispatch_receive(channel=channel).x
            wire.combine_send(rows * 0.5 if self._light else rows @ up @ down.T, channel=channel)
            hand_over()
            x = wire.combine_receive(channel=channel)


def eager(run: Callable[[], object], meet: Callable[[], None]) -> float:
    """Microseconds of one call, launched from Python, at the median."""
    times: list[float] = []
    for _ in range(REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        meet()
        started.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) * 1000)
    return statistics.median(times)


def figures(layers: Layers, wire: Any, free: Any, device: torch.device, meet: Callable[[], None]) -> list[float]:
    """Milliseconds: computing in halves, the link, in turns, whole; recorded, then the last two from Python."""
    streamed = StreamedWire(wire, device)
    recorded = partial(microseconds, meet=meet, operations=1, replays=REPLAYS)
    turns, whole = partial(layers.turns, streamed), partial(layers.whole, wire)
    runs = [partial(layers.halves, free), partial(layers.link, wire), turns, whole]
    return [one / 1000 for one in [*map(recorded, runs), eager(turns, meet), eager(whole, meet)]]


def on_one_device() -> None:
    """A row for each share of the link."""
    device = torch.device("cuda", 0)
    layers = Layers(device, ranks=1, light=False)
    computing = microseconds(partial(layers.halves, Link(0)), lambda: None, operations=1, replays=REPLAYS)
    for share in SHARES:
        link = Link(share * computing * 1000 / (2 * LAYERS))
        show(f"link {share:.1f}x", figures(layers, link, Link(0), device, lambda: None))


def on_rank(rank: Rank) -> list[list[float]]:
    """With ``peer``: experts that are products, and light ones."""
    device, found = torch.device("cuda", rank.rank), []
    with connected(rank, "nccl", "cuda") as communicator, torch.inference_mode():
        meet = communicator.fast_path.custom.meet  # type: ignore[attr-defined]
        context = AllToAllContext(
            config=EngineConfig(parallel=ParallelConfig(enable_dbo=True)),
            device=device,
            dtype=torch.bfloat16,
            communicator=communicator,
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_experts=NUM_EXPERTS,
            owners=torch.arange(NUM_EXPERTS, dtype=torch.int32) * rank.world_size // NUM_EXPERTS,
            max_tokens=TOKENS,
        )
        peer = load_plugins().all_to_alls()["peer"].build(context)
        for light in (False, True):
            layers = Layers(device, ranks=rank.world_size, light=light)
            free = Widened(rank.world_size)
            found.append(figures(layers, peer, free, device, meet))
        peer.close()
    return found


class Widened(Link):
    """A link that takes no time, and brings as many rows as one of several ranks would."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0)
        self._ranks = ranks
        self._rows: dict[int, torch.Tensor] = {}

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        if len(x) not in self._rows:
            self._rows[len(x)] = x.repeat(self._ranks, 1)
        super().dispatch_send(self._rows[len(x)], ids, weights, sizes=sizes, channel=channel)

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        partial = super().combine_receive(channel=channel)
        return partial[: len(partial) // self._ranks]


def show(name: str, row: Sequence[float]) -> None:
    """One row of the table."""
    computing, link, turns, whole, eager_turns, eager_whole = row
    most = max(computing, link)
    print(
        f"{name:18} computing {computing:6.2f}   link {link:6.2f}   in turns {turns:6.2f} = {turns / most:.3f}x   "
        f"at once {whole:6.2f} = {whole / turns:.2f}x   from Python {eager_turns:6.2f} = {eager_turns / most:.3f}x, "
        f"{eager_whole:6.2f}",
        flush=True,
    )


def main() -> None:
    """One device, and two where there are two."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"{LAYERS} layers, {TOKENS} rows of {HIDDEN}, ms and ratios to the larger of computing and link")
    with torch.inference_mode():
        on_one_device()
    if torch.cuda.device_count() > 1:
        with RankPool(2) as pool:
            of_ranks = pool.run(on_rank, deadline=120.0)
        for name, *rows in zip(("peer, products", "peer, light"), *of_ranks):
            show(name, [max(values) for values in zip(*rows)])


if __name__ == "__main__":
    main()
