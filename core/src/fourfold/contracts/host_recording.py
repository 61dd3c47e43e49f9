"""The seam between who records a step on the host and who wants to be in it: C calls by address, and memory.

While a step is recorded, nothing computes: what takes part notes a C function and its argument instead of calling it;
what cannot take part raises Unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from fourfold.errors import Unsupported

if TYPE_CHECKING:
    import torch


class HostRecorder(Protocol):
    """Takes note of calls while a step is recorded, and makes them, in order, at each replay."""

    def record_call(
        self, function: int, argument: int, *, tensors: Sequence[torch.Tensor], keep: Sequence[object]
    ) -> None:
        """Note a call of the C function ``void (*)(const void *)`` at address ``function``.

        ``argument`` is what it is called with, ``tensors`` what it reads or writes through it, ``keep`` what else must
        live as long as the recording.
        """


_RECORDER: Final[ContextVar[HostRecorder | None]] = ContextVar("fourfold_host_recorder", default=None)


@contextmanager
def recording(recorder: HostRecorder) -> Iterator[None]:
    """The scope in which a step is recorded; raises Unsupported inside another one."""
    if _RECORDER.get() is not None:
        raise Unsupported("a step is being recorded already; recordings do not nest")
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def current_recorder() -> HostRecorder | None:
    """Who records the step that runs now; None: it runs for real."""
    return _RECORDER.get()


def refuse_recording(what: str) -> None:
    """Raise Unsupported where a step is being recorded; for calls that cannot be part of one."""
    if _RECORDER.get() is not None:
        raise Unsupported(f"{what} cannot be recorded")
