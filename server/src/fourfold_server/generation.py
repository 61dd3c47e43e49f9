"""The choices of one HTTP request on their way: submits them, turns outputs into text at once, merges what waits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from fourfold.client.engine_client import EngineClient
from fourfold.contracts.tokenizer import Tokenizer
from fourfold.errors import RequestError
from fourfold.messages import AddRequest, FinishReason, RequestOutput
from fourfold.text.output_processor import Delta, OutputProcessor
from fourfold_server.metrics import Metrics

logger = logging.getLogger(__name__)


class Generation:
    """Stop strings are looked for as outputs arrive, so a client that reads slowly keeps no engine busy.

    What the client has not taken yet is one Delta a choice, however slowly it reads.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        requests: Sequence[AddRequest],
        *,
        arrival: float,
        rank: int | None = None,
    ) -> None:
        """``arrival``: when the HTTP request came, by the monotonic clock. ``rank``: the replica to begin on."""
        self._rank = rank
        self._client = client
        self._metrics = metrics
        self._requests = requests
        self._processors = [
            OutputProcessor(tokenizer, request.sampling, request.prompt_token_ids) for request in requests
        ]
        self._pending: dict[int, Delta] = {}
        self._unfinished: set[int] = set()
        self._last_token: list[float] = [0.0] * len(requests)
        self._arrival = arrival
        self._waiter: asyncio.Future[None] | None = None
        self._only_end = False
        self.error: RequestError | None = None
        """Why all choices ended, if the engine refused or failed one."""
        self.closed = False
        """Whether the client went away."""

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return not self._unfinished

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(processor.num_tokens for processor in self._processors)

    def cached_tokens(self, index: int) -> int:
        """Prompt tokens of a choice that were found in the prefix cache."""
        return self._processors[index].num_cached_tokens

    def submit(self) -> None:
        """Send every choice to an engine, all or none. Raises RequestError."""
        try:
            for index, request in enumerate(self._requests):
                self._unfinished.add(index)
                self._client.open(request, partial(self._receive, index), engine=self._rank)
        except BaseException:
            self.close()
            raise

    async def wait(self, *, until_end: bool = False) -> None:
        """Return when there is something to take, or nothing more will come; ``until_end``: only then."""
        self._only_end = until_end
        if self._unfinished and not self.closed and (until_end or not self._pending):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> dict[int, Delta]:
        """What is new of each choice since the last time. Raises RequestError if the engine refused or failed one."""
        if self.error is not None:
            raise self.error
        pending, self._pending = self._pending, {}
        return pending

    def close(self) -> None:
        """Abort what has not ended, at once. Twice is harmless."""
        self.closed = True
        self._abort_unfinished()
        self._wake()

    def _receive(self, index: int, output: RequestOutput) -> None:
        if index not in self._unfinished:
            return
        try:
            delta = self._processors[index].process(output)
        except Exception:
            logger.exception("request %s: its output cannot be turned into text", output.request_id)
            delta = Delta(finish_reason=FinishReason.ERROR, error="the output cannot be turned into text")
        self._observe(index, delta)
        if delta.finish_reason is not None:
            self._end(index, delta, in_engine=output.finish_reason is None)
        if not delta.empty or delta.prompt_logprobs is not None:
            earlier = self._pending.get(index)
            if earlier is None:
                self._pending[index] = delta
            else:
                earlier.merge(delta)
        if not (self._unfinished and self._only_end):
            self._wake()

    def _end(self, index: int, delta: Delta, *, in_engine: bool) -> None:
        self._unfinished.discard(index)
        if in_engine:
            self._client.abort([self._requests[index].request_id])
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.error = RequestError(delta.error or "the server is shutting down", status=_status(delta))
            self._abort_unfinished()

    def _abort_unfinished(self) -> None:
        ids = [self._requests[index].request_id for index in self._unfinished]
        self._unfinished.clear()
        if ids:
            self._client.abort(ids)
            for _ in ids:
                self._metrics.count_choice(FinishReason.ABORT)

    def _observe(self, index: int, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            last = self._last_token[index]
            if last:
                self._metrics.inter_token_latency.observe((now - last) / len(delta.token_ids))
            else:
                self._metrics.time_to_first_token.observe(now - self._arrival)
            self._last_token[index] = now
        if delta.finish_reason is not None:
            self._metrics.count_choice(delta.finish_reason)
            self._metrics.request_latency.observe(now - self._arrival)
            self._metrics.prompt_length.observe(len(self._requests[index].prompt_token_ids))
            self._metrics.output_length.observe(self._processors[index].num_tokens)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _status(delta: Delta) -> int:
    return delta.error_status if delta.finish_reason is FinishReason.ERROR else 503
