"""What travels between API servers, engine cores and workers; typed msgpack, no torch, no pickle."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheSpec
from fourfold.contracts.step_part import StepVote
from fourfold.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# --- API server -> engine core -----------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One choice of one request; ``n`` choices are ``n`` of these."""

    request_id: str
    client: int
    """The API server that gets the outputs."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """With seed and max_tokens filled in."""
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    """Unix seconds."""
    cache_salt: str = ""
    """Only requests of equal salt share prefix-cache blocks."""
    adapter: str = ""
    """The LoRA adapter that computes it, as ``load_adapter`` named it; empty: the model alone."""
    adapter_folder: str = ""
    """Where that is."""
    output_token_ids: list[int] = []
    """What it brought on another engine, before that one ended: goes on after these, and they count as output."""
    attempt: int = 0
    """How many engines had it before. One that had is not refused for want of room in the queue."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Ids that are unknown or ended are ignored."""

    request_ids: list[str]


class CallUtility(msgspec.Struct, frozen=True, kw_only=True, tag="utility"):
    """A named method of the engine core, answered by UtilityReply with the same ``call_id``."""

    client: int
    call_id: int
    method: str
    arguments: dict[str, Any] = {}


EngineInput = AddRequest | AbortRequests | CallUtility


# --- engine core -> API server -----------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest."""
    top: list[tuple[int, float]]
    """(token id, log probability), likeliest first."""


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step brought one request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One a prompt token, the first None; sent once, with the first token."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it; None for eos and for length."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; sent with the first token."""
    error: str | None = None
    """With finish_reason ERROR: what went wrong, for the client."""
    error_status: int = 500
    """The HTTP status that says whose fault it was."""


class EngineStats(msgspec.Struct, kw_only=True):
    """The engine as it stands after a step; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens to compute and output tokens to come, at most, of all requests."""
    shares: dict[int, tuple[int, int]] = {}
    """API server -> (its running and waiting requests, its part of ``num_queued_tokens``)."""
    kv_cache_usage: float = 0.0
    num_steps: int = 0
    last_step_time: float = 0.0
    """Unix seconds; 0: none yet."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    """Prompt tokens looked up, and of these those that were found."""
    preemptions: int = 0
    requests_finished: int = 0
    step_seconds: float = 0.0
    overhead_seconds: float = 0.0
    """Seconds spent in steps, and of these outside the model: scheduling, message building, output handling."""
    pipeline_seconds: float = 0.0
    """Seconds with steps in the air, when the stages of a pipeline were last asked for the next two."""
    stage_busy_seconds: list[float] = []
    """For each stage the seconds that it computed; empty without a pipeline."""
    stage_bubble_shares: list[float] = []
    """For each stage the share of the time between the last two questions in which it waited, 0 to 1."""
    layer_counters: list[dict[str, float]] = []
    """For each stage the figures that its layers keep, by name, as of the last steps; empty where none keep any."""
    prefix_marks: bytes | None = None
    """What the prefix cache holds, for ``prefix_cache.read_marks``: up to 4 KiB, last used last. None: as before."""
    asleep: tuple[str, ...] = ()
    """Which of ``fourfold.sleep_tags`` are; while any is, no request is taken."""
    paused: bool = False
    """Whether it has come to a stop until it is told to go on; requests are taken and wait."""
    state_changes: int = 0
    """How often ``asleep`` or ``paused`` has changed."""

    @property
    def version(self) -> int:
        """Grows with all that happens, so that of two reports of one incarnation the later one is known."""
        taken = 2 * self.requests_finished + self.num_running + self.num_waiting
        return self.num_steps + taken + self.state_changes


class StageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage of a pipeline holds."""

    first_layer: int
    last_layer: int
    ranks: list[int]
    """Within the engine; they share the layers."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once, after a real forward pass."""

    engine: int
    incarnation: int
    num_blocks: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    max_model_len: int
    device: str
    dtype: str
    backends: dict[str, str]
    """Kind -> the chosen name."""
    workers: list[dict[str, Any]] = []
    """A ``ProcessState`` a process, as plain values, without the engine's own."""
    stages: list[StageInfo] = []
    """Of a pipeline, first to last; empty without one."""


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine's last word."""

    engine: int
    incarnation: int
    message: str
    traceback: str = ""
    refused: bool = False
    """Whether config, checkpoint or plugins are at fault, so that the next start would end the same way."""


class EngineOutputs(msgspec.Struct, kw_only=True, tag="outputs"):
    """What one step brought one API server."""

    engine: int
    incarnation: int
    outputs: list[RequestOutput]
    stats: EngineStats


class UtilityReply(msgspec.Struct, frozen=True, kw_only=True, tag="utility_reply"):
    """The answer to CallUtility; ``error`` is None on success, and else has an HTTP status."""

    engine: int
    incarnation: int
    call_id: int
    result: Any = None
    error: str | None = None
    error_status: int = 500


# --- engine core -> coordinator -> API servers -------------------------------------------------------------------


class EngineReport(msgspec.Struct, kw_only=True, tag="report"):
    """How an engine stands."""

    engine: int
    incarnation: int
    stats: EngineStats


class JoinReports(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """An API server has started and wants to hear of all engines."""

    client: int


CoordinatorInput = EngineReport | JoinReports


class LoadReports(msgspec.Struct, kw_only=True, tag="loads"):
    """The engines that have changed since the last time."""

    reports: list[EngineReport]


EngineMessage = EngineReady | EngineFailed | EngineOutputs | UtilityReply
ApiServerInput = EngineMessage | LoadReports


# --- engine core -> workers (opaque bytes to executors) ----------------------------------------------------------


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the workers do not hold: a new one, or one that comes back after a preemption.

    They keep it until its slot is in ``ended``. A preempted request gives up its slot like one that is finished; when
    it is admitted again it is sent anew, with the output so far, which counts for penalties and seeds as output.
    """

    request_id: str
    slot: int
    """The row of the workers' persistent state, below ``SchedulerConfig.num_slots``; free again after ``ended``."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    output_token_ids: list[int] = []
    """Output before a preemption; known tokens are the prompt and these. If there are any, prompt log probabilities
    were sent already.
    """
    adapter: int = 0
    """The slot of its LoRA adapter; 0: none."""


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request's part of one step: counts, never token values."""

    slot: int
    num_tokens: int
    """Tokens computed in this step: positions num_computed to num_computed + num_tokens - 1."""
    num_computed: int
    new_blocks: list[list[int]]
    """For each KV-cache group the block ids to append to the block table; 0 where no position is read any more."""
    reset_blocks: bool = False
    """Start an empty block table first: the request is in ``new`` of this step."""
    samples: bool = True
    """Whether this step samples a token: it reaches the end of what is known of the request."""


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One step; only what changed since the last one."""

    step: int
    new: list[NewRequest] = []
    scheduled: list[ScheduledRequest] = []
    """Order is the order of the batch."""
    ended: list[int] = []
    """Slots freed before ``new``, which may use them again; no step that names their requests is in the air."""
    vote: StepVote | None = None
    """Of an engine that steps together with others; it may have nothing scheduled then."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output rank's reply; rows are the sampling requests of the step in its order."""

    step: int
    token_ids: list[int]
    """One a row; any value in the row of a request in ``errors``."""
    logprobs: list[TokenLogprobs | None] = []
    """Empty, or one a row."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """slot -> log probabilities of the prompt tokens that this step's positions predict."""
    errors: dict[int, str] = {}
    """slot -> what failed for this request alone."""
    forward_seconds: float = 0.0
    """Time in the model and the sampler."""
    vote: StepVote | None = None
    counters: dict[str, float] = {}
    """Of the layers, now and then; those of a pipeline are asked for."""


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage of a pipeline has to say of itself so far."""

    busy_seconds: float
    """Spent in steps, without its waits for other stages; on the host's side."""
    counters: dict[str, float]
    """Of its layers."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself after loading."""

    rank: int
    device: str
    dtype: str
    asynchronous: bool = False
    """Whether a step is only started when it is called, so that the next one is best called meanwhile."""
    available_bytes: int
    """Memory that the KV cache may take."""
    memory_bytes: int | None = None
    """Memory of the device, free or not, which no cache can exceed; None where that is not known."""
    kv_cache_specs: dict[int, KVCacheSpec]
    """By layer number of the whole model."""
    backends: dict[str, str]


class InitializeCache(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the worker method ``initialize_cache``."""

    cache: KVCacheConfig
