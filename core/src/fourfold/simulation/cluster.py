"""Runs a load through API servers with a policy each and many engines, in virtual time. The policies, and the table of
loads that they read, are the real ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fourfold.client.load_table import LoadTable
from fourfold.contracts.load_balancer import BalancedRequest, EngineState, LoadBalancer
from fourfold.engine.prefix_cache import MAX_ENDS, MAX_MARKED_BLOCKS
from fourfold.entries import LoadBalancerContext
from fourfold.simulation.engine_model import EngineModel, SimulatedEngine
from fourfold.simulation.ledger import Ledger, Standing
from fourfold.simulation.workload import Workload

REPORT_INTERVAL = 0.1
"""Seconds between snapshots."""
REPORT_DELAY = 0.01
"""Seconds from a snapshot to the API servers."""
DESCRIPTIONS_PER_SECOND = 200
"""Of prefix caches, over all engines; and once a second for each engine at most."""
_NEXT_BLOCK = 0x9E3779B1
"""Odd, so that the marks of a prefix do not repeat."""

Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What became of a load. Columns have one element a request, in the order of the workload."""

    workload: Workload
    engine: NDArray[np.int64]
    admitted: NDArray[np.float64]
    """Seconds, as in ``Workload.arrival``."""
    first: NDArray[np.float64]
    """When the first token came."""
    finished: NDArray[np.float64]
    hit_tokens: NDArray[np.int64]
    """Of the prompt, found in the engine's prefix cache."""
    busy_seconds: NDArray[np.float64]
    """By engine."""
    most_tokens: NDArray[np.float64]
    """At every snapshot, the tokens still to do on the engine with the most."""
    mean_tokens: NDArray[np.float64]
    """And on the average one."""


class SimulatedCluster:
    """Engines, API servers and what lies between. ``run`` once."""

    def __init__(
        self,
        workload: Workload,
        build: Callable[[LoadBalancerContext], LoadBalancer],
        *,
        num_engines: int,
        num_servers: int = 4,
        model: EngineModel,
        seed: int = 0,
    ) -> None:
        """``build`` makes the policy of one API server; requests come to these at random, by ``seed``."""
        random = np.random.default_rng(seed)
        self._workload = workload
        self._model = model
        self._ledger = Ledger(workload, random.integers(num_servers, size=len(workload)), num_engines)
        self._engines = [SimulatedEngine(index, model, self._ledger) for index in range(num_engines)]
        self._tables = [LoadTable(num_engines, server) for server in range(self._ledger.num_servers)]
        for table in self._tables:
            for engine in range(num_engines):
                table.set_state(engine, EngineState.READY)
        self._balancers = [
            build(
                LoadBalancerContext(
                    num_engines=num_engines, num_servers=num_servers, seed=seed + server, block_size=model.block_size
                )
            )
            for server in range(self._ledger.num_servers)
        ]
        self._bases = random.integers(1 << 32, size=2 * len(workload), dtype=np.uint32)
        """Numbers that marks are made of: one for each conversation, then one for each request, if it has none."""
        self._events: list[tuple[float, int, int]] = []
        """A heap of (end of a run, engine, its version)."""
        shares = self._ledger.num_servers, num_engines
        self._known_requests, self._known_tokens = np.zeros(shares, np.int64), np.zeros(shares, np.int64)
        """What each API server believes that it has running, and that this still needs."""
        self._most_and_mean: list[tuple[float, float]] = []
        self._next_described = 0
        self._described: list[dict[int, int]] = [{} for _ in range(num_engines)]

    def run(self, progress: Progress = lambda share: None) -> Outcome:
        """Play the whole load; ``progress`` hears now and then which share of the requests has arrived."""
        arrivals = self._workload.arrival.tolist()
        count, arrived = len(arrivals), 0
        events, engines = self._events, self._engines
        report_at, deliver_at, standing = REPORT_INTERVAL, math.inf, None
        while arrived < count or events:
            now = arrivals[arrived] if arrived < count else math.inf
            ends = events[0][0] if events else math.inf
            if min(report_at, deliver_at) < min(now, ends):
                if deliver_at < report_at and standing is not None:
                    self._deliver(standing)
                    deliver_at = math.inf
                else:
                    standing = self._report(report_at)
                    deliver_at, report_at = report_at + REPORT_DELAY, report_at + REPORT_INTERVAL
                    progress(arrived / count)
            elif now <= ends:
                self._send(arrived, now)
                arrived += 1
            else:
                _, index, version = heapq.heappop(events)
                engine = engines[index]
                if version == engine.version:
                    engine.finish_run(ends)
                    if engine.ends < math.inf:
                        heapq.heappush(events, (engine.ends, index, version))
        return self._outcome()

    def _send(self, request: int, now: float) -> None:
        ledger = self._ledger
        server = ledger.server[request]
        prompt, output = ledger.prompt_tokens[request], ledger.output_tokens[request]
        table = self._tables[server]
        balanced = BalancedRequest(
            num_prompt_tokens=prompt, max_tokens=output, read_marks=partial(self._marks, request)
        )
        chosen = self._balancers[server].choose(balanced, table.loads)
        table.begin(chosen, prompt + output)
        self._known_requests[server, chosen] += 1
        self._known_tokens[server, chosen] += prompt + output
        ledger.send(request, chosen)
        engine = self._engines[chosen]
        if engine.submit(request, now):
            heapq.heappush(self._events, (engine.ends, chosen, engine.version))

    def _marks(self, request: int) -> NDArray[np.uint32]:
        ledger = self._ledger
        num_blocks = min((ledger.prompt_tokens[request] - 1) // self._model.block_size, MAX_MARKED_BLOCKS)
        talk = ledger.conversation[request]
        base = self._bases[talk if talk >= 0 else len(self._workload) + request]
        marks: NDArray[np.uint32] = base + _BLOCKS[:num_blocks]
        return marks

    def _report(self, now: float) -> Standing:
        """A snapshot leaves the engines; API servers know by now how far their own requests are."""
        standing = self._ledger.standing(now)
        for server, table in enumerate(self._tables):
            table.end(
                slice(None),
                self._known_tokens[server] - standing.token_shares[server],
                count=self._known_requests[server] - standing.request_shares[server],
            )
        self._known_requests[:], self._known_tokens[:] = standing.request_shares, standing.token_shares
        tokens = standing.token_shares.sum(axis=0)
        self._most_and_mean.append((float(tokens.max()), float(tokens.mean())))
        return standing

    def _deliver(self, standing: Standing) -> None:
        """A snapshot reaches the API servers."""
        tokens = standing.token_shares.sum(axis=0)
        usage = standing.held_tokens / self._model.kv_cache_tokens
        for server, table in enumerate(self._tables):
            share = standing.request_shares[server], standing.token_shares[server]
            table.take(
                slice(None),
                running=standing.running,
                waiting=standing.waiting,
                tokens=tokens,
                share=share,
                kv_cache_usage=usage,
            )
        share_of_round = REPORT_INTERVAL * min(1.0, DESCRIPTIONS_PER_SECOND / len(self._engines))
        for _ in range(math.ceil(len(self._engines) * share_of_round)):
            self._describe(self._next_described)
            self._next_described = (self._next_described + 1) % len(self._engines)

    def _describe(self, index: int) -> None:
        """Tell all API servers what an engine's cache holds: where conversations ended, as ``PrefixSketch`` does."""
        talked, described = self._engines[index].talked, self._described[index]
        if not talked:
            return
        for talk, tokens in talked.items():
            described.pop(talk, None)
            num_blocks = tokens // self._model.block_size
            if 0 < num_blocks <= MAX_MARKED_BLOCKS:
                described[talk] = (int(self._bases[talk]) + (num_blocks - 1) * _NEXT_BLOCK) % (1 << 32)
        talked.clear()
        while len(described) > MAX_ENDS:
            del described[next(iter(described))]
        marks = np.fromiter(described.values(), np.uint32)
        for balancer in self._balancers:
            balancer.learn_prefixes(index, marks)

    def _outcome(self) -> Outcome:
        ledger = self._ledger
        most, mean = np.array(self._most_and_mean).reshape(-1, 2).T
        return Outcome(
            workload=self._workload,
            engine=np.array(ledger.engine),
            admitted=np.array(ledger.admitted),
            first=np.array(ledger.first),
            finished=np.array(ledger.finished),
            hit_tokens=np.array(ledger.hit_tokens),
            busy_seconds=np.array([engine.busy_seconds for engine in self._engines]),
            most_tokens=most,
            mean_tokens=mean,
        )


_BLOCKS = (np.arange(MAX_MARKED_BLOCKS, dtype=np.uint64) * _NEXT_BLOCK).astype(np.uint32)
