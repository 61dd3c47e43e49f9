"""What /metrics shows: the requests of all API servers, and the engines' own counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from fourfold.client.engine_client import EngineClient
from fourfold.client.engine_link import EngineLink
from fourfold.contracts.load_balancer import EngineState

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


SHARING_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own: set when it is imported, instruments live in files of that folder, one a process."""


class Metrics:
    """Instruments of one API server, in a registry of their own."""

    def __init__(self, client: EngineClient, model_name: str, shared: Path | None = None) -> None:
        """``shared``: the folder where all API servers keep their instruments; None: there is one server."""
        self.registry = CollectorRegistry()
        self._engines = _EngineCollector(client, model_name)
        self._shared = shared
        label = {"model_name": model_name}
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", SECONDS, label
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "From one token of an output to the next.", SECONDS, label
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to the end of an output.", SECONDS, label
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", TOKENS, label)
        self.output_length = self._histogram("request_generation_tokens", "Output tokens of a choice.", TOKENS, label)
        self._requests = Counter(
            "fourfold_requests", "Choices that ended.", ("model_name", "finish_reason"), registry=self.registry
        )
        self._http_requests = Counter(
            "fourfold_http_requests", "Requests answered.", ("method", "path", "status"), registry=self.registry
        )
        self._model_name = model_name
        self.registry.register(self._engines)

    def count_choice(self, finish_reason: str) -> None:
        """Count a choice that ended; aborts have the reason ``abort``."""
        self._requests.labels(self._model_name, finish_reason).inc()

    def count_http(self, method: str, path: str, status: int) -> None:
        """Count an answered request; ``path`` is a route's, never what a client made up."""
        self._http_requests.labels(method, path, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads: sums over all API servers, those that have died included."""
        if self._shared is None:
            return bytes(generate_latest(self.registry))
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._shared))  # type: ignore[no-untyped-call]
        registry.register(self._engines)
        return bytes(generate_latest(registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], label: dict[str, str]) -> Histogram:
        family = Histogram(f"fourfold_{name}", text, tuple(label), buckets=buckets, registry=self.registry)
        return family.labels(**label)


def shared_metrics_folder() -> Path | None:
    """Where instruments of this process live, if other processes share them."""
    folder = os.environ.get(SHARING_VARIABLE)
    return Path(folder) if folder else None


class _EngineCollector(Collector):
    """The engines' last reports, one series an engine."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for name, text, read in _GAUGES:
            yield self._family(GaugeMetricFamily(f"fourfold_{name}", text, labels=_LABELS), read)
        for name, text, read in _COUNTERS:
            yield self._family(CounterMetricFamily(f"fourfold_{name}", text, labels=_LABELS), read)
        yield self._by_stage(
            CounterMetricFamily(
                "fourfold_stage_busy_seconds", "Seconds that a stage of the pipeline computed.", labels=_STAGE_LABELS
            ),
            lambda link: link.stats.stage_busy_seconds,
        )
        yield self._by_stage(
            GaugeMetricFamily(
                "fourfold_stage_bubble_share",
                "Share of the last steps' time in which a stage waited, 0 to 1.",
                labels=_STAGE_LABELS,
            ),
            lambda link: link.stats.stage_bubble_shares,
        )
        counted = (counters for link in self._client.links for counters in link.stats.layer_counters)
        for name in sorted({name for counters in counted for name in counters}):
            family = GaugeMetricFamily(f"fourfold_{name}", "Of the layers of a stage.", labels=_STAGE_LABELS)
            yield self._by_stage(family, partial(_layer_counter, name))

    def _by_stage(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[EngineLink], Sequence[float | None]]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for link in self._client.links:
            for stage, value in enumerate(read(link)):
                if value is not None:
                    family.add_metric([self._model_name, str(link.rank), str(stage)], value)
        return family

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[EngineLink], float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for link in self._client.links:
            family.add_metric([self._model_name, str(link.rank)], read(link))
        return family


def _layer_counter(name: str, link: EngineLink) -> list[float | None]:
    return [counters.get(name) for counters in link.stats.layer_counters]


_LABELS = ("model_name", "engine")
_STAGE_LABELS = (*_LABELS, "stage")
_Reading = tuple[str, str, Callable[[EngineLink], float]]
_GAUGES: tuple[_Reading, ...] = (
    ("engine_up", "1 when the engine takes requests.", lambda link: float(link.state is EngineState.READY)),
    ("engine_incarnation", "How often the engine was started.", lambda link: float(link.incarnation or 0)),
    ("engine_asleep", "1 when the engine sleeps.", lambda link: float(bool(link.stats.asleep))),
    ("num_requests_running", "Requests in the batch.", lambda link: link.stats.num_running),
    ("num_requests_waiting", "Requests in the queue.", lambda link: link.stats.num_waiting),
    ("kv_cache_usage", "Share of KV-cache blocks in use, 0 to 1.", lambda link: link.stats.kv_cache_usage),
)
_COUNTERS: tuple[_Reading, ...] = (
    ("steps", "Steps finished.", lambda link: link.stats.num_steps),
    ("prompt_tokens", "Prompt tokens computed or found.", lambda link: link.stats.prompt_tokens),
    ("generation_tokens", "Tokens sampled.", lambda link: link.stats.generation_tokens),
    ("num_preemptions", "Requests taken off the batch to free blocks.", lambda link: link.stats.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda link: link.stats.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda link: link.stats.prefix_cache_hits),
    ("step_seconds", "Seconds spent in steps.", lambda link: link.stats.step_seconds),
    ("step_overhead_seconds", "Of these, outside the model.", lambda link: link.stats.overhead_seconds),
    ("pipeline_seconds", "Seconds with steps in a pipeline.", lambda link: link.stats.pipeline_seconds),
)
