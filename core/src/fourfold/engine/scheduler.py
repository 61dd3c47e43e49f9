"""Decides what each step computes, in counts, and takes in what steps return. Sends nothing, waits for nothing, and
never looks at a clock; tokens that steps in the air will bring are counted before they are known.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from fourfold.contracts.scheduling_policy import SchedulingPolicy
from fourfold.engine.batch import Batch
from fourfold.engine.kv_cache_manager import KVCacheManager
from fourfold.engine.request import Request, Share, Status
from fourfold.engine.waiting_queue import WaitingQueue
from fourfold.errors import EngineError
from fourfold.messages import (
    EngineStats,
    FinishReason,
    NewRequest,
    RequestOutput,
    ScheduledRequest,
    StepMessage,
    StepOutput,
)


class Scheduler:
    """Requests from ``add`` to their last output; running ones, waiting ones, and slots."""

    def __init__(
        self,
        *,
        cache: KVCacheManager,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_slots: int,
        num_batches: int = 1,
    ) -> None:
        """``num_batches`` steps take turns on the stages of a pipeline, each with an even share of the requests; a
        request is then in one of them at a time, but for the parts of its prompt, which may follow each other.
        """
        self.stats = EngineStats()
        """Counters; ``snapshot`` completes them."""
        self.requests: dict[str, Request] = {}
        """All that are not finished."""
        self.admits_new = True
        """Whether requests may begin; those that were preempted go on in any case."""
        self._cache = cache
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = -(-max_num_batched_tokens // num_batches)
        self._num_batches = num_batches
        self._running: list[Request] = []
        """In policy order: the last is preempted first."""
        self._waiting = WaitingQueue()
        self._leaving: set[Request] = set()
        """Finished or preempted while steps in the air name them; they hold slot and blocks until those return."""
        self._num_returning = 0
        """How many of these are preempted and will wait again."""
        self._shares: dict[int, Share] = {}
        """By API server."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._ended: list[int] = []
        self._next_step = 0
        self._serial = 0

    @property
    def num_vacant(self) -> int:
        """Requests that could join the batch."""
        return self._max_num_seqs - len(self._running)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the first time or again."""
        return len(self._waiting) + self._num_returning

    @property
    def has_begun(self) -> bool:
        """Whether a request that has begun can go on while none may begin."""
        first = self._waiting.first()
        return bool(self._running or self._num_returning or (first is not None and first.has_begun))

    def snapshot(self) -> EngineStats:
        """The counters, with the gauges as they stand."""
        stats = self.stats
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        stats.shares = {client: (share.num_requests, share.num_tokens) for client, share in self._shares.items()}
        stats.num_queued_tokens = sum(share.num_tokens for share in self._shares.values())
        stats.kv_cache_usage = self._cache.usage
        return stats

    def add(self, request: Request) -> None:
        """Queue a request whose id is not in ``requests`` and which fits the cache by itself."""
        request.order = (*self._policy.key(request), self._serial)
        self._serial += 1
        self.requests[request.request_id] = request
        self._waiting.push(request)
        request.share = self._shares.setdefault(request.client, Share())
        request.share.num_requests += 1
        request.share.num_tokens += request.max_total

    # --- a step goes out -----------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can be computed before a step in the air returns."""
        batch = Batch(StepMessage(step=self._next_step), [])
        budget = self._max_num_tokens
        num_preempted = self.stats.preemptions
        decoding: list[Request] = []
        prefilling: list[Request] = []
        num_decoding = 0
        for request in self._running:
            if request.status is Status.RUNNING:
                decodes = request.num_tokens - request.num_computed == 1
                num_decoding += decodes
                if self._may_continue(request):
                    (decoding if decodes else prefilling).append(request)
        # Decodes first: a long prompt must not delay tokens of others.
        share = self._share(num_decoding)
        for request in decoding if len(decoding) <= share else sorted(decoding, key=attrgetter("scheduled_step")):
            if share and request.status is Status.RUNNING and self._decode(batch, request):
                budget -= 1
                share -= 1
        for request in prefilling:
            if budget and request.status is Status.RUNNING:
                budget -= self._continue(batch, request, budget)
        if self.stats.preemptions == num_preempted:
            if budget and not self._num_returning:
                self._admit_waiting(batch, budget)
        else:
            self._running = [request for request in self._running if request.status is Status.RUNNING]
        return self._send_off(batch) if batch.requests else None

    def idle(self) -> Batch:
        """A step of nothing, for engines that step together with others."""
        return self._send_off(Batch(StepMessage(step=self._next_step), []))

    def _send_off(self, batch: Batch) -> Batch:
        batch.message.ended.extend(self._ended)
        self._ended.clear()
        self._next_step += 1
        return batch

    def _may_continue(self, request: Request) -> bool:
        """Whether a token is left to compute, which it is not when the steps in the air bring the last one, and its
        value will be where it is needed: in a pipeline the stages that sample it and take it in are far apart.
        """
        return request.num_tokens < request.max_total and (
            self._num_batches == 1 or request.num_computed < len(request.token_ids)
        )

    def _share(self, num_decoding: int) -> int:
        """Requests that one batch may continue. Without it batches stay as uneven as arrivals and ends have made them,
        and stages wait for the largest.
        """
        return -(-num_decoding // self._num_batches)

    def _continue(self, batch: Batch, request: Request, budget: int) -> int:
        """Schedule a running request; returns how many tokens, 0 if it has to wait for blocks."""
        count = min(request.num_tokens - request.num_computed, budget)
        position = request.num_computed + count
        appended = self._cache.no_blocks
        if position > request.block_capacity:
            if not self._make_room(request):
                return 0
            position = min(position, self._cache.reach(request))
            count = position - request.num_computed
            appended = self._cache.extend(request, position)
        self._put(batch, request, count, appended)
        return count

    def _make_room(self, request: Request) -> bool:
        """Preempt requests after ``request`` in policy order until it can go on; False if it has to wait."""
        while self._cache.reach(request) <= request.num_computed:
            if self._leaving:
                return False  # their blocks come back soon; preempting more would be for nothing
            victim = next((other for other in reversed(self._running) if self._may_preempt(other)), None)
            if victim is None or victim.order <= request.order:
                return False
            self._preempt(victim)
        return True

    def _may_preempt(self, request: Request) -> bool:
        return request.status is Status.RUNNING and request.scheduled_step != self._next_step

    def _preempt(self, request: Request) -> None:
        self.stats.preemptions += 1
        request.status = Status.PREEMPTED
        self._num_returning += 1
        self._leaving.add(request)
        if not request.num_in_flight:
            self._leave(request)

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        """Admit in policy order until something is short; the first that does not fit holds back the others."""
        while budget and self._free_slots and len(self._running) < self._max_num_seqs:
            # One block for each running request, so that admitting this one does not preempt the next.
            reserve = len(self._running)
            if self._cache.is_short(reserve):
                return
            request = self._waiting.first()
            if request is None or not (self.admits_new or request.has_begun):
                return
            hit = self._cache.find_hit(request)
            count = self._cache.admit(request, hit, min(request.num_tokens - hit, budget), reserve)
            if count == 0:
                return
            self._waiting.pop()
            self._start(batch, request, hit)
            self._put(batch, request, count, [list(table) for table in request.blocks], reset_blocks=True)
            budget -= count

    def _start(self, batch: Batch, request: Request, hit: int) -> None:
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed = hit
        self._set_confirmed(request, hit)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = hit
            self.stats.prefix_cache_hits += hit
            self.stats.prefix_cache_queries += request.num_prompt
        insort(self._running, request, key=attrgetter("order"))
        known, num_prompt = request.token_ids, request.num_prompt
        batch.message.new.append(
            NewRequest(
                request_id=request.request_id,
                slot=request.slot,
                prompt_token_ids=known[:num_prompt],
                sampling=request.sampling,
                eos_token_ids=request.eos_token_ids,
                output_token_ids=known[num_prompt:],
                adapter=request.adapter_slot,
            )
        )

    def _put(
        self, batch: Batch, request: Request, count: int, blocks: list[list[int]], *, reset_blocks: bool = False
    ) -> None:
        """Write ``count`` tokens of ``request`` into the step, and count a sampled token as if it were here."""
        start = request.num_computed
        request.num_computed = start + count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_tokens += 1
        request.num_in_flight += 1
        request.scheduled_step = self._next_step
        batch.requests.append(request)
        batch.message.scheduled.append(
            ScheduledRequest(request.slot, count, start, blocks, reset_blocks=reset_blocks, samples=samples)
        )

    def _decode(self, batch: Batch, request: Request) -> int:
        """Let ``request`` compute one token; 0 where it must wait for blocks."""
        if request.num_computed >= request.block_capacity:
            return self._continue(batch, request, 1)
        self._put_next(batch, request)
        return 1

    def _put_next(self, batch: Batch, request: Request) -> None:
        """``_put`` for the one token that most steps add to most requests."""
        start = request.num_computed
        request.num_computed = start + 1
        request.num_tokens += 1
        request.num_in_flight += 1
        request.scheduled_step = self._next_step
        batch.requests.append(request)
        batch.message.scheduled.append(ScheduledRequest(request.slot, 1, start, self._cache.no_blocks))

    # --- a step comes back ---------------------------------------------------------------------------------------

    def update(self, batch: Batch, output: StepOutput) -> dict[int, list[RequestOutput]]:
        """Take in the oldest step in the air; returns what it brought, by client, for requests not ended before."""
        scheduled = batch.message.scheduled
        num_rows = sum(entry.samples for entry in scheduled)
        if output.step != batch.message.step or len(output.token_ids) != num_rows:
            raise EngineError(
                f"step {batch.message.step} with {num_rows} rows was answered by step {output.step} with "
                f"{len(output.token_ids)} rows; engine and workers disagree"
            )
        outputs: dict[int, list[RequestOutput]] = {}
        row = -1
        for request, entry in zip(batch.requests, scheduled):
            request.num_in_flight -= 1
            row += entry.samples
            if request.status is not Status.FINISHED:
                result = self._take(request, entry, output, row)
                if result is not None:
                    outputs.setdefault(request.client, []).append(result)
            if request.status is not Status.RUNNING and not request.num_in_flight:
                self._leave(request)
        return outputs

    def _take(self, request: Request, entry: ScheduledRequest, output: StepOutput, row: int) -> RequestOutput | None:
        """One request's part of a step."""
        if output.errors and entry.slot in output.errors:
            self.finish(request)
            return failure(request.request_id, output.errors[entry.slot])
        confirmed = entry.num_computed + entry.num_tokens
        request.share.num_tokens -= confirmed - request.num_confirmed
        request.num_confirmed = confirmed
        self._cache.confirm(request)
        if output.prompt_logprobs and request.wants_prompt_logprobs:
            request.prompt_logprobs.extend(output.prompt_logprobs.get(entry.slot, ()))
        if not entry.samples:
            return None
        token_id = output.token_ids[row]
        result = RequestOutput(request_id=request.request_id, token_ids=[token_id])
        if output.logprobs:
            logprobs = output.logprobs[row]
            result.logprobs = None if logprobs is None else [logprobs]
        if len(request.token_ids) == request.num_prompt:
            self._add_prompt(request, result)
        self.stats.generation_tokens += 1
        reason = request.accept(token_id)
        if reason is not None:
            result.finish_reason = reason
            result.stop_token_id = request.stop_token_id
            self.finish(request)
        return result

    def _add_prompt(self, request: Request, result: RequestOutput) -> None:
        """What is told once, with the first token."""
        result.num_cached_tokens = request.num_cached_tokens
        self.stats.prompt_tokens += request.num_prompt
        if request.wants_prompt_logprobs:
            result.prompt_logprobs = [None, *request.prompt_logprobs]

    def _set_confirmed(self, request: Request, num_positions: int) -> None:
        request.share.num_tokens -= num_positions - request.num_confirmed
        request.num_confirmed = num_positions

    # --- a request ends ------------------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """End a request wherever it is. What steps in the air bring it is dropped; until they have returned it keeps
        its slot and blocks.
        """
        previous = request.status
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        self.stats.requests_finished += 1
        request.share.num_requests -= 1
        request.share.num_tokens -= request.max_total - request.num_confirmed
        if previous is Status.WAITING:
            self._waiting.withdraw()
        elif previous is Status.PREEMPTED:
            self._num_returning -= 1
        else:
            self._running.remove(request)
            self._leaving.add(request)
            if not request.num_in_flight:
                self._leave(request)

    def preempt_all(self) -> None:
        """Let all running requests wait, without slots and blocks. Only when no step is in the air."""
        for request in list(self._running):
            self._preempt(request)
        self._running.clear()

    def drop(self, batch: Batch) -> None:
        """Take a step in the air as returned with nothing. Only when its requests are finished."""
        for request in batch.requests:
            request.num_in_flight -= 1
            if not request.num_in_flight:
                self._leave(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._cache.reset()

    def prefix_marks(self) -> bytes:
        """What the prefix cache holds, as ``EngineStats.prefix_marks``."""
        return self._cache.prefix_marks()

    def _leave(self, request: Request) -> None:
        """No step in the air names ``request`` any more: its slot and blocks are free, and it waits if preempted."""
        if request not in self._leaving:
            return
        self._leaving.remove(request)
        self._cache.release(request)
        self._free_slots.append(request.slot)
        self._ended.append(request.slot)
        if request.status is Status.PREEMPTED:
            self._num_returning -= 1
            self._set_confirmed(request, 0)
            request.restart()
            self._waiting.push(request)


def failure(request_id: str, error: str, status: int = 500) -> RequestOutput:
    """The last output of a request that failed; ``status`` is the HTTP status."""
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error, error_status=status)
