"""What executors have in common: the shape of a call, whether calls are taken, who hears of a failure."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from fourfold.contracts.executor import Aggregate, Method
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, EngineError, ExecutorClosed, ExecutorFailed
from fourfold.rpc_call import RpcCall
from fourfold.rpc_method import method_name

logger = logging.getLogger(__name__)

_LONGEST: Final = 1e9
"""Seconds; clocks take no more."""


class ExecutorShell(ABC):
    """See ``fourfold.contracts.executor.Executor``; a backend adds how a call reaches its ranks, and their end.

    It opens with the shell, fails once at most, and closes once. What it overrides begins with ``_``.
    """

    def __init__(self, context: ExecutorContext) -> None:
        self.world_size = context.layout.engine_world_size
        self.output_rank = context.layout.output_rank
        self._timeouts = context.config.timeouts
        self._state = threading.Lock()  # guards the three below, never held for long
        self._closed = False
        self._failure: EngineError | None = None
        self._callbacks: list[Callable[[EngineError], None]] = []

    def collective_rpc(
        self,
        method: Method,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        reply_rank: int | None = None,
        aggregate: Aggregate | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker method on every rank; see ``fourfold.contracts.executor.Executor``."""
        if reply_rank is not None and not 0 <= reply_rank < self.world_size:
            raise ConfigError(f"reply_rank is {reply_rank}; this executor has ranks 0 to {self.world_size - 1}")
        limit = self._timeouts.rpc_timeout if timeout is None else timeout
        if not 0 <= limit < _LONGEST:
            raise ConfigError(f"timeout is {limit:g}; seconds from 0 on, and below {_LONGEST:g}")
        call = RpcCall(
            name=method_name(method),
            args=args,
            kwargs=kwargs or {},
            timeout=limit,
            # With a fold every rank's reply is needed, whoever is to have the result.
            speaker=None if aggregate is not None else reply_rank,
            aggregate=aggregate,
        )
        return self._start(call) if non_block else self._call(call)

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once when the executor breaks for good; at once if it already has."""
        with self._state:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    @abstractmethod
    def _call(self, call: RpcCall) -> Any:
        """Return what came of it."""

    def _start(self, call: RpcCall) -> Future[Any]:
        """Return at once where that is possible; here it is not, and the future is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._call(call))
        except Exception as error:
            future.set_exception(error)
        return future

    def _check_open(self, name: str) -> None:
        """Raise for a call that comes too late."""
        with self._state:
            closed, failure = self._closed, self._failure
        if closed:
            raise ExecutorClosed(f"{name!r} was called after shutdown")
        if failure is not None:
            raise self._refusal(name, failure)

    def _refusal(self, name: str, failure: EngineError) -> ExecutorFailed:
        return ExecutorFailed(f"{name!r} was called, but the executor has failed: {failure}")

    def _fail(self, failure: EngineError, *, first: Callable[[], None] | None = None) -> EngineError:
        """Take no more calls, do what comes ``first``, then tell those who want to know.

        Returns what the executor failed with: an earlier failure if there was one. After ``_close`` nothing happens.
        """
        with self._state:
            if self._failure is not None or self._closed:
                return self._failure or failure
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
        if first is not None:
            first()
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:
                logger.exception("a callback for failures failed")
        return failure

    def _close(self) -> bool:
        """Take no more calls; whether this is the first time."""
        with self._state:
            first, self._closed = not self._closed, True
        return first
