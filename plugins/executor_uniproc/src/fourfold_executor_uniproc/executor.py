"""Runs one worker in the caller's own thread. Knows no queue, no process and no socket."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, Final

from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.entries import ExecutorContext, WorkerContext
from fourfold.errors import ConfigError, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.executor_shell import ExecutorShell
from fourfold.rpc_call import RpcCall
from fourfold.rpc_method import bind_method
from fourfold.serialization import decode, encode

_log = logging.getLogger(__name__)
_RANK: Final = 0
_SHUTDOWN_WAIT: Final = 5.0  # seconds that shutdown waits for a call in progress before it leaves without the worker


class UniprocExecutor(ExecutorShell):
    """The one worker of a one-rank engine, called directly.

    A call is done when it returns, ``non_block`` or not, unless the worker defers its reply: that is taken when the
    future's result is asked for. Arguments and replies are encoded as they would be on a wire, so that nothing works
    here alone. A call that outlives its deadline cannot be interrupted; its reply is dropped and RpcTimeout raised when
    it returns.
    """

    max_in_flight = 2

    def __init__(self, context: ExecutorContext) -> None:
        ranks = context.layout.engine_world_size
        if ranks != 1:
            raise ConfigError(
                f"executor 'uniproc' runs one rank, and {context.layout} makes {ranks} for an engine; "
                "choose another one with --executor"
            )
        super().__init__(context)
        self._calls = threading.Lock()  # held by the call in progress
        self._worker = _build_worker(context)

    def processes(self) -> list[dict[str, Any]]:
        """None: the worker lives in the caller's process."""
        return []

    def shutdown(self) -> None:
        """Let the worker go, after the call in progress; idempotent."""
        self._close()
        if not self._calls.acquire(timeout=_SHUTDOWN_WAIT):
            _log.warning("rank 0 is still in a call after %g s; it is left to the end of the process", _SHUTDOWN_WAIT)
            return
        try:
            worker, self._worker = self._worker, None
            if worker is not None and self._failure is None:
                _end_worker(worker)
        finally:
            self._calls.release()

    def _call(self, call: RpcCall) -> Any:
        deadline = time.monotonic() + call.timeout
        return self._finish(call, self._begin(call), deadline)

    def _start(self, call: RpcCall) -> Future[Any]:
        deadline = time.monotonic() + call.timeout
        future: Future[Any] = Future()
        try:
            reply = self._begin(call)
            if isinstance(reply, DeferredReply):
                return LaterReply(lambda: self._finish(call, reply, deadline))
            future.set_result(self._finish(call, reply, deadline))
        except Exception as error:
            future.set_exception(error)
        return future

    def _begin(self, call: RpcCall) -> Any:
        """The reply, or what the worker defers."""
        if not self._calls.acquire(timeout=call.timeout):
            raise RpcTimeout(call.name, call.timeout, [_RANK])
        try:
            self._check_open(call.name)
            args = [_travel(value) for value in call.args]
            kwargs = {key: _travel(value) for key, value in call.kwargs.items()}
            with self._blamed(call):
                reply = bind_method(self._worker, call.name)(*args, **kwargs)
                return reply if isinstance(reply, DeferredReply) else _travel(reply)
        finally:
            self._calls.release()

    def _finish(self, call: RpcCall, reply: Any, deadline: float) -> Any:
        """What the caller gets, in time."""
        if isinstance(reply, DeferredReply):
            self._check_open(call.name)
            with self._blamed(call):
                reply = _travel(reply.take())
        if time.monotonic() > deadline:
            raise RpcTimeout(call.name, call.timeout, [_RANK])
        return call.shaped([reply])

    @contextmanager
    def _blamed(self, call: RpcCall) -> Iterator[None]:
        """What goes wrong inside is the worker's."""
        try:
            yield
        except SystemExit as error:  # what would end a worker process ends this worker
            raise self._fail(ExecutorFailed(f"rank 0 left with exit code {error.code} in {call.name}")) from error
        except Exception as error:
            raise WorkerError(_RANK, call.name, type(error).__name__, str(error), traceback.format_exc()) from error


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


def _build_worker(context: ExecutorContext) -> Any:
    worker = WorkerContext(
        config=context.config,
        layout=context.layout,
        rank=_RANK,
        local_rank=context.local_start,
        local_workers=context.local_workers,
        dp_rank=context.dp_rank,
    )
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
