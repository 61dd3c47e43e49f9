"""The outputs of one request as an async iterator whose buffer is one merged output. Knows no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from fourfold.messages import RequestOutput


class RequestStream(AsyncIterator[RequestOutput]):
    """Ends after the output with a finish reason. A slow reader gets several steps' outputs merged into one."""

    def __init__(self, request_id: str, abort: Callable[[list[str]], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._arrival = asyncio.Event()
        self._ended = False

    def receive(self, output: RequestOutput) -> None:
        """Take one step's output."""
        self._pending = output if self._pending is None else merge_outputs(self._pending, output)
        self._arrival.set()

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._arrival.wait()
        output, self._pending = self._pending, None
        self._arrival.clear()
        if output is None:
            raise StopAsyncIteration
        self._ended = output.finish_reason is not None
        return output

    def close(self) -> None:
        """Abort the request unless it has ended; a waiting reader stops. Twice is harmless."""
        if not self._ended:
            self._ended = True
            self._pending = None
            self._arrival.set()
            self._abort([self.request_id])


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Both outputs of one request, in order, as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return RequestOutput(
        request_id=first.request_id,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        error=second.error,
        error_status=second.error_status,
    )
