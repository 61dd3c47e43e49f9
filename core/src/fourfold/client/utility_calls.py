"""Calls of engine cores' methods by name, from an API server: to one engine, or to all in step. Knows no request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.client.engine_link import EngineLink
from fourfold.contracts.load_balancer import EngineState
from fourfold.engine.operations import Call
from fourfold.errors import EngineError, ExecutorFailed, RequestError
from fourfold.messages import CallUtility, UtilityReply

_UP = (EngineState.READY, EngineState.ASLEEP)
_NONE_UP = "no engine is up; try again later"


class UtilityCalls:
    """Those that wait for replies. All methods belong to one event loop."""

    def __init__(self, client: int, links: Sequence[EngineLink]) -> None:
        """``client`` is this API server's number."""
        self._client = client
        self._links = links
        self._waiting: dict[int, _Waiting] = {}
        # No reply to an earlier process under this number may be taken for one to this.
        self._call_ids = itertools.count(time.time_ns())

    async def call(self, engine: int, method: str, arguments: dict[str, Any], *, timeout: float) -> Any:
        """Call one engine; returns its reply.

        Raises RequestError for what it refuses, ExecutorFailed for a dead engine, and EngineError for what fails or
        brings no reply within ``timeout`` seconds.
        """
        link = self._links[engine]
        if link.state is EngineState.DEAD:
            raise ExecutorFailed(f"engine {link.rank} is dead: {link.reason}")
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = _Waiting(engine, method, future)
        try:
            link.send(CallUtility(client=self._client, call_id=call_id, method=method, arguments=arguments))
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError as error:
            raise EngineError(f"no reply to {method!r} within {timeout:g} s from engine {link.rank}") from error
        finally:
            self._waiting.pop(call_id, None)

    async def call_all(
        self, calls: Sequence[Call], *, timeout: float, engines: Mapping[int, int] | None = None
    ) -> None:
        """Make calls one after the other, each on all ``engines`` before the next one; ``timeout`` is each's.

        ``engines`` are those of ``engines_up``, of this moment by default. One that dies meanwhile is passed over:
        whoever starts it again tells it. Raises RequestError for what an engine refuses, with status 409 while one
        starts or drains and 503 when none is up; EngineError for what fails.
        """
        engines = self.engines_up() if engines is None else engines
        for method, arguments in calls:
            missed = self.engines_missed(engines)
            up = [engine for engine in engines if engine not in missed]
            if not up:
                raise RequestError(_NONE_UP, status=503)
            answers = await asyncio.gather(
                *(self.call(engine, method, arguments, timeout=timeout) for engine in up), return_exceptions=True
            )
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            survived = len(failures) < len(up)
            for failure in failures:
                if not (survived and isinstance(failure, ExecutorFailed)):
                    raise failure

    def answer(self, reply: UtilityReply) -> None:
        """Take a reply; one that nobody waits for any more is dropped."""
        waiting = self._waiting.get(reply.call_id)
        if waiting is None or waiting.future.done():
            return
        rank = self._links[reply.engine].rank
        if reply.error is None:
            waiting.future.set_result(reply.result)
        elif reply.error_status < 500 or reply.error_status == 503:
            refused = RequestError(f"engine {rank}: {reply.error}", status=reply.error_status)
            waiting.future.set_exception(refused)
        else:
            waiting.future.set_exception(EngineError(f"{waiting.method!r} failed on engine {rank}: {reply.error}"))

    def mourn(self, engine: int, reason: str) -> None:
        """End the calls of an engine that is no more."""
        for waiting in self._waiting.values():
            if waiting.engine == engine and not waiting.future.done():
                waiting.future.set_exception(
                    ExecutorFailed(f"engine {self._links[engine].rank} died during {waiting.method!r}: {reason}")
                )

    def engines_up(self) -> dict[int, int]:
        """Engine -> incarnation of those that ``call_all`` would call; raises as it does. One that drains computes with
        weights that all share. One that starts again and again is not waited for: what is wished of the others may
        help it.
        """
        for link in self._links:
            starts = link.state is EngineState.STARTING and not link.failure
            if starts or link.state is EngineState.DRAINING:
                raise RequestError(f"engine {link.rank} is {link.state}; try again when all are ready", status=409)
        up = {link.engine: link.incarnation or 0 for link in self._links if link.state in _UP}
        if not up:
            raise RequestError(_NONE_UP, status=503)
        return up

    def engines_missed(self, engines: Mapping[int, int]) -> list[int]:
        """Those that are not as ``engines_up`` found them, or not in it, and do not end already."""
        return [
            link.engine
            for link in self._links
            if not (link.state in _UP and engines.get(link.engine) == link.incarnation)
            and link.state is not EngineState.DRAINING
        ]


class _Waiting:
    """A call without its reply."""

    __slots__ = ("engine", "future", "method")

    def __init__(self, engine: int, method: str, future: asyncio.Future[Any]) -> None:
        self.engine = engine
        self.method = method
        self.future = future
