"""Sends a generation's answer, whole or as server-sent events, and ends the generation when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fourfold.errors import RequestError
from fourfold.messages import AddRequest
from fourfold_server.answer_writer import AnswerHead, AnswerWriter
from fourfold_server.disconnect import DisconnectWatch
from fourfold_server.errors import error_body
from fourfold_server.generating_request import GeneratingRequest
from fourfold_server.generation import Generation
from fourfold_server.preparation import Prompt
from fourfold_server.reply_headers import ignored_header
from fourfold_server.usage import Usage, count_usage

SEND_DEADLINE_SECONDS = 300.0
"""A client that takes nothing for this long is treated as gone."""
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; it tells the log and the metrics what happened."""

logger = logging.getLogger(__name__)


async def answer(
    request: GeneratingRequest,
    request_id: str,
    prompts: Sequence[Prompt],
    requests: Sequence[AddRequest],
    make_writer: Callable[[AnswerHead], AnswerWriter],
) -> Response:
    """Generate ``requests``, those of a prompt together, and answer. Raises RequestError for what fails before output.

    A stream's status and headers are sent with its first output, so that a refusal by the engine is still an HTTP
    error and no event.
    """
    state, stream = request.state, request.values["stream"]
    generation = Generation(
        state.client, request.model.tokenizer, state.metrics, requests, arrival=request.arrival, rank=request.rank
    )
    writer = make_writer(
        AnswerHead(
            request_id=request_id,
            created=int(time.time()),
            model=request.values["model"] if requests[0].adapter else state.served_names[0],
            include_usage=request.include_usage,
        )
    )

    def usage() -> Usage:
        first_choices = range(0, len(requests), request.values["n"])
        return count_usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=generation.completion_tokens,
            cached_tokens=sum(generation.cached_tokens(index) for index in first_choices),
        )

    headers = ignored_header(request.ignored)
    watch = DisconnectWatch(request.http.receive, generation.close)
    try:
        generation.submit()
        await generation.wait(until_end=not stream)
        if generation.closed:
            raise RequestError("the client disconnected", status=CLIENT_CLOSED_REQUEST)
        if generation.error is not None:
            raise generation.error
        if stream:
            return EventStream(
                generation, watch, writer, count_usage=usage if request.include_usage else None, headers=headers
            )
        body = writer.whole(generation.take(), usage())
    except BaseException:
        generation.close()
        watch.stop()
        raise
    watch.stop()
    return Response(body, media_type="application/json", headers=headers)


class EventStream(Response):
    """One event a chunk; ``data: [DONE]``, or an error event, at the end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        watch: DisconnectWatch,
        writer: AnswerWriter,
        *,
        count_usage: Callable[[], Usage] | None,
        headers: Mapping[str, str],
    ) -> None:
        """``count_usage`` None: the stream ends without usage."""
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        # The length is not known yet, so the header that says 0 must go.
        del self.headers["content-length"]
        self._generation = generation
        self._watch = watch
        self._writer = writer
        self._count_usage = count_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; aborts the generation if it cannot."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not self._generation.closed:
                await self._generation.wait()
                body, more = self._next()
                if body or not more:
                    async with asyncio.timeout(SEND_DEADLINE_SECONDS):
                        await send({"type": "http.response.body", "body": body, "more_body": more})
                if not more:
                    return
        except TimeoutError:
            logger.warning("a client took nothing of its stream for %g s", SEND_DEADLINE_SECONDS)
        finally:
            self._generation.close()
            self._watch.stop()

    def _next(self) -> tuple[bytes, bool]:
        """The events that are due, and whether more will come."""
        generation = self._generation
        try:
            chunks = [
                chunk for index, delta in generation.take().items() for chunk in self._writer.chunks(index, delta)
            ]
        except RequestError as error:
            return _events([error_body(error)]), False
        if not generation.finished:
            return _events(chunks), True
        if self._count_usage is not None:
            chunks.append(self._writer.usage_chunk(self._count_usage()))
        return _events([*chunks, b"[DONE]"]), False


def _events(chunks: Iterable[bytes]) -> bytes:
    return b"".join([b"data: " + chunk + b"\n\n" for chunk in chunks])
