"""A call on its way to the ranks and back: what travels, how a rank runs it, what its replies become. Knows no wire."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.contracts.executor import Aggregate
from fourfold.errors import WorkerError
from fourfold.rpc_method import bind_method
from fourfold.serialization import decode, encode

Reply = bytes | bytearray | None
"""What ``run_call`` gave; None where no reply is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcCall:
    """What ``collective_rpc`` was asked, checked."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    timeout: float
    """Seconds."""
    speaker: int | None
    """The rank that alone is to reply; None: all are."""
    aggregate: Aggregate | None

    def encoded(self) -> bytes:
        """As it travels to ``run_call``. Raises Unsupported for what cannot."""
        return encode([self.name, list(self.args), dict(self.kwargs), self.speaker])

    def result(self, replies: Sequence[Reply]) -> Any:
        """What the caller gets for these replies, in rank order."""
        return self.shaped([None if reply is None else decode(reply) for reply in replies])

    def shaped(self, values: Sequence[Any]) -> Any:
        """The same, for what the replies mean."""
        if self.speaker is not None:
            return values[self.speaker]
        return list(values) if self.aggregate is None else self.aggregate(list(values))


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """An exception on a rank, as it travels."""

    phase: str
    type_name: str
    message: str
    traceback: str


def run_call(worker: object, content: bytes | bytearray, *, rank: int) -> bytes | None:
    """Run what ``RpcCall.encoded`` gave; the reply, where this rank's is asked for. Raises whatever comes of it."""
    reply = start_call(worker, content, rank=rank)
    taken: bytes | None = reply.take() if isinstance(reply, DeferredReply) else reply
    return taken


def start_call(worker: object, content: bytes | bytearray, *, rank: int) -> bytes | DeferredReply | None:
    """``run_call``, but what the worker defers is still to be waited for, whether it is asked for or not."""
    name, args, kwargs, speaker = decode(content)
    result = bind_method(worker, name)(*args, **kwargs)
    wanted = speaker in (None, rank)
    if not isinstance(result, DeferredReply):
        return encode(result) if wanted else None

    def take() -> bytes | None:
        value = result.take()
        return encode(value) if wanted else None

    return DeferredReply(take)


def report_error(error: Exception, phase: str) -> bytes:
    """For ``read_error``."""
    trace = "".join(traceback.format_exception(error))
    return msgspec.msgpack.encode(ErrorReport(phase, type(error).__name__, str(error), trace))


def read_error(report: bytes | bytearray, *, rank: int) -> WorkerError:
    """The error of ``rank``, which is printed with the traceback that it has there."""
    found = msgspec.msgpack.decode(report, type=ErrorReport)
    return WorkerError(rank, found.phase, found.type_name, found.message, found.traceback).shown_with_traceback()
