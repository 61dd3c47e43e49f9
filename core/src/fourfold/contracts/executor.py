"""The executor contract: runs a worker method on every rank of one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, overload

from fourfold.errors import EngineError

Method = str | Callable[..., Any]
"""A worker method's name, or an importable ``f(worker, *args, **kwargs)``, which travels as ``module:qualname``."""

Aggregate = Callable[[list[Any]], Any]
"""Folds all ranks' replies, in rank order, onto one value."""


class Executor(Protocol):
    """Owns the workers of one engine: starts them, calls them, notices their death, ends them.

    A step is opaque bytes to an executor. Replies come in rank order, every call has its own id, an exception on any
    rank reaches the caller as ``WorkerError`` within 2 s, a timeout is ``RpcTimeout`` naming the missing ranks.
    """

    @property
    def world_size(self) -> int:
        """Ranks of this engine: TP x PP."""

    @property
    def output_rank(self) -> int:
        """The rank that samples and whose reply to a step is the output."""

    @property
    def max_in_flight(self) -> int:
        """How many steps may be called with ``non_block`` before the first one's reply is taken."""

    @overload
    def collective_rpc(
        self,
        method: Method,
        *,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | None = ...,
        reply_rank: int | None = ...,
        aggregate: Aggregate | None = ...,
        non_block: Literal[False] = ...,
    ) -> Any: ...

    @overload
    def collective_rpc(
        self,
        method: Method,
        *,
        args: Sequence[Any] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float | None = ...,
        reply_rank: int | None = ...,
        aggregate: Aggregate | None = ...,
        non_block: Literal[True],
    ) -> Future[Any]: ...

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
        """Call a worker method on every rank.

        Returns the list of replies in rank order; only one rank's value with ``reply_rank``; the folded value with
        ``aggregate``; a ``Future`` of any of these with ``non_block``. ``timeout`` is in seconds, None takes the
        executor's default (``--rpc-timeout``).

        Raises WorkerError (an exception on any rank, also one that does not reply), RpcTimeout, ExecutorFailed,
        ExecutorClosed.
        """

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Call back once when the executor breaks for good; at once if it already has."""

    def processes(self) -> list[dict[str, Any]]:
        """The ranks' own processes as rows of ``/topology``, in rank order; empty when they run in the caller's.

        A row is a ``fourfold.supervision.run_directory.ProcessState`` as plain values.
        """

    def shutdown(self) -> None:
        """End all workers. Idempotent, and safe in any half-built state."""


class Follower(Protocol):
    """Has the ranks of one node, of an engine whose executor is on another node."""

    name: str
    """What messages call this node."""

    def run(self) -> None:
        """Join the engine, and the next one if it is restarted; returns after its end or ``stop``.

        No process is left then. Raises ConfigError if this node is refused, EngineError for an engine that does not
        come, or not come back.
        """

    def stop(self) -> None:
        """Let ``run`` end the ranks and return. From any thread, and from a signal's handler."""
