"""Runs one worker in the caller's own thread. Knows no queue, no process and no socket."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any, Final

from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.contracts.executor import Aggregate, Method
from fourfold.entries import ExecutorContext, WorkerContext
from fourfold.errors import ConfigError, EngineError, ExecutorClosed, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.rpc_method import bind_method, method_name
from fourfold.serialization import decode, encode

_log = logging.getLogger(__name__)
_RANK: Final = 0
_SHUTDOWN_WAIT: Final = 5.0  # seconds that shutdown waits for a call in progress before it leaves without the worker


class UniprocExecutor:
    """The one worker of a one-rank engine, called directly.

    A call is done when it returns, ``non_block`` or not, unless the worker defers its reply: that is taken when the
    future's result is asked for. Arguments and replies are encoded as they would be on a wire, so that nothing works
    here alone. A call that outlives its deadline cannot be interrupted; its reply is dropped and RpcTimeout raised when
    it returns.
    """

    world_size = 1
    output_rank = _RANK
    max_in_flight = 2

    def __init__(self, context: ExecutorContext) -> None:
        ranks = context.layout.engine_world_size
        if ranks != 1:
            raise ConfigError(
                f"executor 'uniproc' runs one rank, and {context.layout} makes {ranks} for an engine; "
                "choose another one with --executor"
            )
        self._timeout = context.config.timeouts.rpc_timeout
        self._calls = threading.Lock()  # held by the call in progress
        self._state = threading.Lock()  # guards the three below, never held for long
        self._closed = False
        self._failure: EngineError | None = None
        self._callbacks: list[Callable[[EngineError], None]] = []
        self._worker = _build_worker(context)

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
        """Call a worker method; see ``fourfold.contracts.executor.Executor``."""
        name = method_name(method)
        if reply_rank not in (None, _RANK):
            raise ConfigError(f"reply_rank is {reply_rank}; this executor has rank 0 only")
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        if not non_block:
            reply = self._call(name, args, kwargs, limit)
            if isinstance(reply, DeferredReply):
                reply = self._take(name, reply, limit, deadline)
            return _shape(reply, reply_rank, aggregate)
        future: Future[Any] = Future()
        try:
            reply = self._call(name, args, kwargs, limit)
            if isinstance(reply, DeferredReply):
                return LaterReply(lambda: _shape(self._take(name, reply, limit, deadline), reply_rank, aggregate))
            future.set_result(_shape(reply, reply_rank, aggregate))
        except Exception as error:
            future.set_exception(error)
        return future

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once when the worker is gone for good; at once if it is already."""
        with self._state:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def processes(self) -> list[dict[str, Any]]:
        """None: the worker lives in the caller's process."""
        return []

    def shutdown(self) -> None:
        """Let the worker go, after the call in progress; idempotent."""
        with self._state:
            self._closed = True
        if not self._calls.acquire(timeout=_SHUTDOWN_WAIT):
            _log.warning("rank 0 is still in a call after %g s; it is left to the end of the process", _SHUTDOWN_WAIT)
            return
        try:
            worker, self._worker = self._worker, None
            if worker is not None and self._failure is None:
                _end_worker(worker)
        finally:
            self._calls.release()

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        if not self._calls.acquire(timeout=timeout):
            raise RpcTimeout(name, timeout, [_RANK])
        try:
            self._check_open(name)
            reply = self._run(name, args, kwargs or {})
        finally:
            self._calls.release()
        if time.monotonic() > deadline:
            raise RpcTimeout(name, timeout, [_RANK])
        return reply

    def _run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        travelled_args = [_travel(value) for value in args]
        travelled_kwargs = {key: _travel(value) for key, value in kwargs.items()}
        try:
            reply = bind_method(self._worker, name)(*travelled_args, **travelled_kwargs)
            return reply if isinstance(reply, DeferredReply) else _travel(reply)
        except SystemExit as error:  # what would end a worker process ends this worker
            failure = ExecutorFailed(f"rank 0 left with exit code {error.code} in {name}")
            self._fail(failure)
            raise failure from error
        except Exception as error:
            raise WorkerError(_RANK, name, type(error).__name__, str(error), traceback.format_exc()) from error

    def _take(self, name: str, reply: DeferredReply, limit: float, deadline: float) -> Any:
        """What the worker deferred."""
        self._check_open(name)
        try:
            value = _travel(reply.take())
        except Exception as error:
            raise WorkerError(_RANK, name, type(error).__name__, str(error), traceback.format_exc()) from error
        if time.monotonic() > deadline:
            raise RpcTimeout(name, limit, [_RANK])
        return value

    def _check_open(self, name: str) -> None:
        with self._state:
            closed, failure = self._closed, self._failure
        if closed:
            raise ExecutorClosed(f"{name!r} was called after shutdown")
        if failure is not None:
            raise ExecutorFailed(f"{name!r} was called, but the executor has failed: {failure}")

    def _fail(self, failure: EngineError) -> None:
        with self._state:
            self._failure = failure
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(failure)


class LaterReply(Future[Any]):
    """A future that is done when somebody asks for its result, on whose thread the rest of the work is."""

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._finishing = threading.Lock()
        self._take: Callable[[], Any] | None = take

    def result(self, timeout: float | None = None) -> Any:
        """See Future; ``timeout`` is not looked at, since what runs in the caller's thread cannot be left."""
        self._finish()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See Future and ``result``."""
        self._finish()
        return super().exception(0)

    def _finish(self) -> None:
        with self._finishing:
            take, self._take = self._take, None
            if take is None:
                return
            try:
                self.set_result(take())
            except Exception as error:
                self.set_exception(error)


def _shape(reply: Any, reply_rank: int | None, aggregate: Aggregate | None) -> Any:
    if aggregate is not None:
        return aggregate([reply])
    return [reply] if reply_rank is None else reply


def _build_worker(context: ExecutorContext) -> Any:
    worker = WorkerContext(config=context.config, layout=context.layout, rank=_RANK, dp_rank=context.dp_rank)
    return resolve_name(context.worker)(worker)


def _end_worker(worker: Any) -> None:
    end = getattr(worker, "shutdown", None)
    if end is None:
        return
    try:
        end()
    except Exception:  # a worker that ends badly must not keep the engine from ending
        _log.exception("rank 0 failed in shutdown")


def _travel(value: Any) -> Any:
    """``value`` as it would arrive; bytes cannot change on the way and are passed as they are."""
    return value if isinstance(value, bytes) or value is None else decode(encode(value))
