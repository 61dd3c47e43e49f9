"""A toy worker that believes nothing: it keeps state as a real one would, and checks every count, slot and block."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec
import pytest

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.lora_config import LoraConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.contracts.scheduling_policy import SchedulingPolicy
from fourfold.engine.engine_core import EngineCore
from fourfold.engine.policies import FirstComeFirstServed, PriorityFirst
from fourfold.entries import SchedulerContext
from fourfold.messages import (
    AddRequest,
    EngineStats,
    FinishReason,
    NewRequest,
    RequestOutput,
    ScheduledRequest,
    StageFigures,
    StepMessage,
    StepOutput,
    TokenLogprobs,
)
from fourfold.sampling_params import SamplingParams

VOCABULARY = 40
EOS = 1
Block = tuple[int, int]
"""(group, block)."""


def next_token(tokens: list[int]) -> int:
    """The toy model: depends on every token before."""
    return crc32(bytes(tokens)) % VOCABULARY


def reference(request: AddRequest, max_total: int) -> tuple[list[int], FinishReason]:
    """What ``request`` must produce, by the plainest loop."""
    tokens, sampling = list(request.prompt_token_ids), request.sampling
    limit = min(max_total, len(tokens) + (sampling.max_tokens or max_total))
    output: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        stops = (not sampling.ignore_eos and token in request.eos_token_ids) or token in sampling.stop_token_ids
        if stops and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) >= limit:
            return output, FinishReason.LENGTH


class LazyFuture(Future[StepOutput]):
    """Is computed when its result is taken, or earlier."""

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self.compute = compute

    def result(self, timeout: float | None = None) -> StepOutput:
        self.compute()
        return super().result(timeout)


@dataclass
class Row:
    """The state of one slot."""

    new: NewRequest
    known: list[int]
    num_known: int
    """With tokens that steps in the air will bring."""
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)


@dataclass
class Sent:
    """A step whose result was not taken yet."""

    message: StepMessage
    future: LazyFuture
    uses: dict[int, set[Block]]
    """slot -> blocks it reads or writes."""
    computed: bool = False


class ToyClient:
    """Stands where the executor's client stands; computes steps late, early or anywhere between."""

    def __init__(self, config: EngineConfig, cache: KVCacheConfig, max_model_len: int, rng: random.Random) -> None:
        self.max_in_flight = config.scheduler.max_in_flight or 1
        self.steps = 0
        self.failing: dict[str, str] = {}
        """request id -> the error that its next sampled token brings."""
        self.step_error: Exception | None = None
        self.operations: list[str] = []
        self.operation_error: Exception | None = None
        self.widest_overlap = 0
        """Most steps in the air that named one request."""
        self.shut_down = False
        self.messages: list[StepMessage] = []
        self._config = config
        self._groups = cache.groups
        self._num_blocks = cache.num_blocks
        self._size = cache.groups[0].spec.block_size
        self._max_model_len = max_model_len
        self._rng = rng
        self._rows: dict[int, Row] = {}
        self._cells: dict[tuple[int, int, int], tuple[int, str]] = {}
        """(group, block, offset) -> (digest of the tokens up to there, salt)."""
        self._sent: deque[Sent] = deque()

    def shutdown(self) -> None:
        self.shut_down = True

    def sleep(self, level: int) -> None:
        self._operate(f"sleep {level}")
        self._cells.clear()

    def wake_up(self, tags: Sequence[str], *, complete: bool) -> None:
        self._operate(f"wake_up {','.join(tags)}{' complete' if complete else ''}")

    def check_weights(self, model: str) -> None:
        self.operations.append(f"check {model}")

    def discard_weights(self) -> None:
        self._operate("discard")
        self._cells.clear()

    def load_weights(self, model: str) -> None:
        self._operate(f"load {model}")

    def layer_report(self) -> list[dict[str, Any]]:
        return [{"operations": list(self.operations)}]

    def load_adapter(self, slot: int, folder: str) -> None:
        self.operations.append(f"load_adapter {slot} {folder}")

    def unload_adapter(self, slot: int) -> None:
        self.operations.append(f"unload_adapter {slot}")

    def _operate(self, what: str) -> None:
        assert not self._sent, "a step is in the air"
        self.operations.append(what)
        if self.operation_error is not None:
            raise self.operation_error

    def stage_figures(self) -> Future[list[StageFigures]]:
        future: Future[list[StageFigures]] = Future()
        future.set_result([StageFigures(busy_seconds=part * self.steps, counters={}) for part in (0.5, 0.25)])
        return future

    def execute_model(self, message: StepMessage) -> Future[StepOutput]:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StepMessage)
        assert message.step == self.steps, "steps are numbered without gaps"
        assert message.scheduled, "an empty step"
        assert len(self._sent) < self.max_in_flight
        self.steps += 1
        self.messages.append(message)
        self._end(message)
        self._begin(message)
        uses = self._check(message)
        sent = Sent(message, LazyFuture(lambda: self._compute_up_to(sent)), uses)
        self._sent.append(sent)
        named = [slot for one in self._sent for slot in one.uses]
        self.widest_overlap = max(self.widest_overlap, *(named.count(slot) for slot in named))
        if self._rng.random() < 0.3:
            self._compute_up_to(sent, taken=False)
        return sent.future

    # --- checks when a step arrives ---

    def _end(self, message: StepMessage) -> None:
        for slot in message.ended:
            assert slot in self._rows, f"slot {slot} ended but is empty"
            assert all(slot not in sent.uses for sent in self._sent), f"slot {slot} ended while in the air"
            del self._rows[slot]

    def _begin(self, message: StepMessage) -> None:
        resets = {entry.slot for entry in message.scheduled if entry.reset_blocks}
        assert resets == {new.slot for new in message.new}, "new requests and resets differ"
        for new in message.new:
            assert 0 <= new.slot < self._config.scheduler.num_slots
            assert new.slot not in self._rows, f"slot {new.slot} is taken"
            known = [*new.prompt_token_ids, *new.output_token_ids]
            self._rows[new.slot] = Row(new, known, len(known), tables=[[] for _ in self._groups])

    def _check(self, message: StepMessage) -> dict[int, set[Block]]:
        config = self._config.scheduler
        assert sum(entry.num_tokens for entry in message.scheduled) <= config.max_num_batched_tokens
        assert len({entry.slot for entry in message.scheduled}) == len(message.scheduled) <= config.max_num_seqs
        uses: dict[int, set[Block]] = {}
        writes: dict[int, set[Block]] = {}
        for entry in message.scheduled:
            row = self._rows[entry.slot]
            self._advance(row, entry)
            writes[entry.slot] = self._blocks(row, entry, written=True)
            uses[entry.slot] = self._blocks(row, entry, written=False) | writes[entry.slot]
        for users in (uses, *(sent.uses for sent in self._sent)):
            for slot, written in writes.items():
                for other, used in users.items():
                    assert other == slot or not written & used, f"slots {slot}, {other} clash on {written & used}"
        return uses

    def _advance(self, row: Row, entry: ScheduledRequest) -> None:
        assert entry.num_tokens > 0
        assert len(entry.new_blocks) == len(self._groups)
        assert entry.reset_blocks or entry.num_computed == row.computed, "a gap in the positions"
        for table, blocks in zip(row.tables, entry.new_blocks):
            assert all(0 <= block < self._num_blocks for block in blocks)
            table.extend(blocks)
        row.computed = entry.num_computed + entry.num_tokens
        assert row.computed <= row.num_known, "positions whose tokens nobody knows"
        assert entry.samples == (row.computed == row.num_known)
        if entry.samples:
            row.num_known += 1
            assert row.num_known <= self._max_model_len
            assert row.num_known <= len(row.new.prompt_token_ids) + (row.new.sampling.max_tokens or 10**6)

    def _blocks(self, row: Row, entry: ScheduledRequest, *, written: bool) -> set[Block]:
        found: set[Block] = set()
        for group, table in enumerate(row.tables):
            window = self._groups[group].spec.sliding_window
            start = entry.num_computed
            if not written:
                start = max(0, start - window + 1) if window else 0
            for index in range(start // self._size, (row.computed - 1) // self._size + 1):
                assert table[index] != 0, "a position that is still needed has the null block"
                found.add((group, table[index]))
        return found

    # --- the model ---

    def _compute_up_to(self, last: Sent, *, taken: bool = True) -> None:
        for sent in self._sent:
            if not sent.computed:
                sent.computed = True
                self._compute(sent)
            if sent is last:
                break
        if taken:
            assert self._sent[0] is last, "results are taken in order"
            self._sent.popleft()

    def _compute(self, sent: Sent) -> None:
        if self.step_error is not None:
            sent.future.set_exception(self.step_error)
            return
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for entry in sent.message.scheduled:
            row = self._rows[entry.slot]
            new = row.new
            for position in range(entry.num_computed, entry.num_computed + entry.num_tokens):
                self._attend(row, position)
            if new.sampling.prompt_logprobs is not None and not new.output_token_ids:
                ends = range(entry.num_computed + 1, entry.num_computed + entry.num_tokens + 1)
                prompt_logprobs[entry.slot] = [
                    TokenLogprobs(token_id=row.known[end], logprob=-float(end), rank=1, top=[])
                    for end in ends
                    if end < len(new.prompt_token_ids)
                ]
            if entry.samples:
                if new.request_id in self.failing:
                    errors[entry.slot] = self.failing[new.request_id]
                token = next_token(row.known)
                row.known.append(token)
                token_ids.append(token)
                wanted = new.sampling.logprobs is not None
                logprobs.append(TokenLogprobs(token, -1.0, 1, []) if wanted else None)
        sent.future.set_result(
            StepOutput(
                step=sent.message.step,
                token_ids=token_ids,
                logprobs=logprobs if any(logprobs) else [],
                prompt_logprobs=prompt_logprobs,
                errors=errors,
            )
        )

    def _attend(self, row: Row, position: int) -> None:
        """Write one position, then read everything that it sees; a cell of another prefix or salt is a fault."""
        salt = row.new.request_id.partition("@")[2]
        for group, table in enumerate(row.tables):
            window = self._groups[group].spec.sliding_window
            for seen in range(max(0, position - window + 1) if window else 0, position + 1):
                cell = (group, table[seen // self._size], seen % self._size)
                content = (crc32(bytes(row.known[: seen + 1])), salt)
                if seen == position:
                    self._cells[cell] = content
                assert self._cells.get(cell) == content, f"{row.new.request_id}: position {seen} was overwritten"


class Recorder:
    """Events, as a plugin would hear them."""

    def __init__(self) -> None:
        self.finished: list[RequestOutput] = []
        self.steps = 0

    def step_finished(self, stats: EngineStats) -> None:
        self.steps += 1

    def request_finished(self, output: RequestOutput) -> None:
        self.finished.append(output)


class ToyEngine:
    """A real core over the toy client, and what came out of it."""

    def __init__(
        self,
        *,
        depth: int = 1,
        num_blocks: int = 64,
        block_size: int = 8,
        windows: tuple[int, ...] = (0,),
        max_model_len: int = 128,
        policy: str = "fcfs",
        seed: int = 0,
        pipeline_parallel_size: int = 1,
        prefix_caching: bool = True,
        lora: LoraConfig | None = None,
        **scheduler: Any,
    ) -> None:
        scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **scheduler}
        self.config = EngineConfig(
            cache=CacheConfig(block_size=8, prefix_caching=prefix_caching),
            scheduler=SchedulerConfig(max_in_flight=depth, **scheduler),
            parallel=ParallelConfig(pipeline_parallel_size=pipeline_parallel_size),
            timeouts=TimeoutConfig(rpc_timeout=10),
            lora=lora or LoraConfig(),
        )
        self.cache = KVCacheConfig(
            groups=tuple(
                KVCacheGroup(
                    spec=KVCacheSpec(block_size=block_size, bytes_per_block=1, sliding_window=window), layers=(index,)
                )
                for index, window in enumerate(windows)
            ),
            num_blocks=num_blocks,
        )
        self.max_model_len = max_model_len
        self.client = ToyClient(self.config, self.cache, max_model_len, random.Random(seed))
        context = SchedulerContext(config=self.config)
        policies: dict[str, SchedulingPolicy] = {
            "fcfs": FirstComeFirstServed(context),
            "priority": PriorityFirst(context),
        }
        self.events = Recorder()
        self.core = EngineCore(
            self.config,
            self.client,
            kv_cache=self.cache,
            max_model_len=max_model_len,
            vocabulary_size=VOCABULARY,
            policy=policies[policy],
            events=self.events,
        )
        self.requests: dict[str, AddRequest] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.arrivals = 0

    def add(
        self,
        prompt: list[int],
        *,
        request_id: str | None = None,
        salt: str = "",
        priority: int = 0,
        client: int = 0,
        output: Sequence[int] = (),
        adapter: str = "",
        **sampling: Any,
    ) -> str:
        """Add a request that must be accepted; returns its id."""
        request_id, refusal = self.try_add(
            prompt,
            request_id=request_id,
            salt=salt,
            priority=priority,
            client=client,
            output=output,
            adapter=adapter,
            **sampling,
        )
        assert refusal is None, refusal
        return request_id

    def try_add(
        self,
        prompt: list[int],
        *,
        request_id: str | None = None,
        salt: str = "",
        priority: int = 0,
        client: int = 0,
        output: Sequence[int] = (),
        adapter: str = "",
        **sampling: Any,
    ) -> tuple[str, RequestOutput | None]:
        self.arrivals += 1
        name = request_id or f"r{self.arrivals}@{salt}"
        request = AddRequest(
            request_id=name,
            client=client,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            eos_token_ids=(EOS,),
            priority=priority,
            arrival_time=float(self.arrivals),
            cache_salt=salt,
            adapter=adapter,
            output_token_ids=list(output),
            attempt=bool(output),
        )
        refusal = self.core.add(request)
        if refusal is None:
            self.requests[name] = request
            self.outputs[name] = []
        return name, refusal

    def step(self) -> None:
        for client, outputs in self.core.step().items():
            for output in outputs:
                assert self.requests[output.request_id].client == client
                previous = self.outputs[output.request_id]
                assert not previous or previous[-1].finish_reason is None, "an output after the last"
                previous.append(output)

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def expected(self, request_id: str) -> tuple[list[int], FinishReason]:
        return reference(self.requests[request_id], self.max_model_len)

    def check_finished(self, request_id: str) -> None:
        assert (self.tokens(request_id), self.finish_reason(request_id)) == self.expected(request_id)

    def check_idle(self) -> None:
        """Nothing is held, nothing is counted twice or forgotten."""
        scheduler = self.core._scheduler
        stats = self.core.stats
        assert not self.core.has_work
        assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (0, 0, 0)
        assert stats.kv_cache_usage == 0
        for pool in scheduler._cache.pools:
            assert sorted(pool._free) == list(range(1, self.cache.num_blocks))
            assert not any(pool._references)
        assert sorted(scheduler._free_slots) == list(range(self.config.scheduler.num_slots))
        assert not scheduler._leaving
        assert not scheduler._num_returning


@pytest.fixture
def toy_engine() -> type[ToyEngine]:
    """The class, to be built with the sizes that a test needs."""
    return ToyEngine
