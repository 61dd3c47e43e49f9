"""One request inside the engine core: its tokens, its counts and why it ends. Knows no queue, pool or message order."""

from __future__ import annotations

from enum import IntEnum

from fourfold.messages import AddRequest, FinishReason, TokenLogprobs


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Taken off the batch while steps that name it are in the air; waits again when they have returned."""
    FINISHED = 3


class Share:
    """What the requests of one API server ask of the engine."""

    __slots__ = ("num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        """Positions not yet computed, to the end of the longest output that each may have."""


class Request:
    """Counts come in two kinds: scheduled ones run ahead, confirmed ones follow as steps return."""

    __slots__ = (
        "_stops",
        "adapter",
        "adapter_slot",
        "arrival_time",
        "block_capacity",
        "blocks",
        "cache_salt",
        "client",
        "digests",
        "eos_token_ids",
        "max_total",
        "num_cached_tokens",
        "num_computed",
        "num_confirmed",
        "num_in_flight",
        "num_prompt",
        "num_remembered",
        "num_tokens",
        "num_trimmed",
        "order",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "scheduled_step",
        "share",
        "slot",
        "status",
        "stop_token_id",
        "token_ids",
    )

    def __init__(self, request: AddRequest, *, max_total: int, adapter_slot: int = 0) -> None:
        self.request_id = request.request_id
        self.client = request.client
        self.sampling = request.sampling
        self._stops = frozenset(request.sampling.stop_token_ids)
        self.eos_token_ids = request.eos_token_ids
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.cache_salt = request.cache_salt
        self.adapter = request.adapter
        self.adapter_slot = adapter_slot
        self.order: tuple[float, ...] = ()
        """The policy's key and, last, a serial number: a total order."""
        self.status = Status.WAITING

        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        """Prompt and accepted output."""
        self.num_prompt = len(request.prompt_token_ids)
        self.share = Share()
        """Its API server's, from ``Scheduler.add`` on; counts it until ``Scheduler.finish``."""
        self.max_total = max_total
        """Prompt and output tokens at most."""
        self.num_tokens = len(self.token_ids)
        """``token_ids`` and the tokens that steps in the air will bring."""
        self.num_computed = 0
        """Positions whose computation is scheduled."""
        self.num_confirmed = 0
        """Positions whose computation has returned."""
        self.num_in_flight = 0
        """Steps in the air that name this request."""
        self.scheduled_step = -1
        """The last step that names it."""
        self.stop_token_id: int | None = None

        self.slot = -1
        self.blocks: list[list[int]] = []
        """The block table of each KV-cache group."""
        self.block_capacity = 0
        """Positions that every block table covers."""
        self.digests: list[bytes] = []
        """Of the full blocks from the start, as far as they were needed."""
        self.num_remembered = 0
        """Blocks offered to the prefix cache."""
        self.num_trimmed: list[int] = []
        """For each group the blocks given back because they left the window."""
        self.num_cached_tokens = 0 if request.output_token_ids else -1
        """Prompt tokens found in the prefix cache at the first admission; -1: not yet admitted anywhere."""
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def num_output(self) -> int:
        """Accepted output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities are asked for and still to be sent."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt

    @property
    def has_begun(self) -> bool:
        """Whether it has been in a step, though it may wait again."""
        return self.num_cached_tokens >= 0

    def accept(self, token_id: int) -> FinishReason | None:
        """Append a sampled token; returns why the request ends with it, if it does."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        length = len(token_ids)
        if (self._stops or token_id in self.eos_token_ids) and length - self.num_prompt >= self.sampling.min_tokens:
            if token_id in self.eos_token_ids and not self.sampling.ignore_eos:
                return FinishReason.STOP
            if token_id in self._stops:
                self.stop_token_id = token_id
                return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_total else None

    def restart(self) -> None:
        """Forget all computation; tokens stay."""
        self.num_computed = 0
        self.num_confirmed = 0
        self.slot = -1
        self.prompt_logprobs = []
        self.status = Status.WAITING
