"""Every error that fourfold raises on purpose, as one tree.

FourfoldError
├── ConfigError            an option, a value or a combination that cannot work; raised before anything starts
│   └── CheckpointError    a model that is missing, corrupt, truncated or does not fit its description
├── PluginError            a plugin that is missing, broken, misspelt or clashes with another
├── RequestError           one request that is refused; carries the parameter and a code for the API
├── Unsupported            a backend that was asked for something it does not claim
└── EngineError            the engine or one of its workers failed while running
    ├── ExecutorFailed     the executor is broken and takes no more calls
    ├── ExecutorClosed     a call after shutdown
    ├── WorkerError        an exception on a rank, with rank, phase and traceback
    └── RpcTimeout         a deadline passed; names the ranks that did not answer (also a TimeoutError)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Self

_FRAME: Final = re.compile(r'File "(?:.*/)?([^"]+)", line (\d+), in (.+)')


class FourfoldError(Exception):
    """The root of the tree: ``except FourfoldError`` catches what fourfold raises on purpose."""


class ConfigError(FourfoldError):
    """An option, a value or a combination of them that cannot work."""


class CheckpointError(ConfigError):
    """A model that is missing, corrupt, truncated, or does not fit its own description."""


class PluginError(FourfoldError):
    """A plugin that is missing, broken, misspelt, or clashes with another one."""


class RequestError(FourfoldError):
    """One request is refused; no other request is affected.

    Attributes: ``parameter`` is the request field at fault, ``code`` the API's error code, ``status`` the HTTP status.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code
        self.status = status


class Unsupported(FourfoldError):
    """A backend was asked for something that it does not claim to do."""


class EngineError(FourfoldError):
    """The engine or one of its workers failed while running."""


class ExecutorFailed(EngineError):
    """The executor is permanently broken and takes no more calls; ``rank`` is the one that was lost, if it was one."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ExecutorClosed(EngineError):
    """A call reached an executor after its shutdown."""


class WorkerError(EngineError):
    """An exception on one rank, carried to the caller with where and when it happened.

    Its text names the rank, the phase and, after the message, the line that raised.
    """

    def __init__(self, rank: int, phase: str, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"rank {rank} failed in {phase}: {type_name}: {message}{_place(traceback)}")
        self.rank = rank
        self.phase = phase
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def shown_with_traceback(self) -> Self:
        """Itself, printed with the rank's traceback; for whoever raises it in another process than the rank's."""
        if self.traceback:
            self.add_note(f"on rank {self.rank}:\n{self.traceback.rstrip()}")
        return self


class RpcTimeout(EngineError, TimeoutError):
    """A call's deadline passed; ``missing_ranks`` did not answer."""

    def __init__(self, method: str, timeout: float, missing_ranks: Sequence[int]) -> None:
        ranks = ", ".join(map(str, missing_ranks))
        super().__init__(f"no reply to {method!r} within {timeout:g} s from rank(s) {ranks}")
        self.method = method
        self.timeout = timeout
        self.missing_ranks = tuple(missing_ranks)


def _place(traceback: str) -> str:
    """The innermost line of a traceback, in brackets; of the file its name alone."""
    frames = _FRAME.findall(traceback)
    return " ({}, line {}, in {})".format(*frames[-1]) if frames else ""
