"""Named points that code passes, and what the environment says shall happen at them.

``FAULTS`` is ``rank:point:nth:what``, more of them after commas; a rank of ``*`` is every one, ``nth`` counts from 0.
What happens: ``raise``, ``kill``, ``stop`` (SIGSTOP), ``exit``, ``delay=SECONDS``, ``drop`` (the call is not made, and
its first argument given back), ``corrupt`` (one number of the result is another).
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

VARIABLE = "FAULTS"


class Fault(NamedTuple):
    """One thing that shall happen."""

    rank: str
    point: str
    nth: int
    what: str


def read_faults(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """All that shall happen."""
    words = [one.split(":") for one in environment.get(VARIABLE, "").split(",") if one]
    return [Fault(rank, point, int(nth), what) for rank, point, nth, what in words]


class Points:
    """The points of one rank, each with its own count."""

    def __init__(self, rank: int | str) -> None:
        self._faults = [fault for fault in read_faults() if fault.rank in ("*", str(rank))]
        self._passed: Counter[str] = Counter()

    def reach(self, point: str) -> str:
        """Let happen what shall; what is left to whoever makes the call, or nothing."""
        nth = self._passed[point]
        self._passed[point] += 1
        for fault in self._faults:
            if (fault.point, fault.nth) == (point, nth):
                return _happen(fault.what)
        return ""

    def wrap(self, point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with ``point`` before it."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            match self.reach(point):
                case "drop":
                    return args[0] if args else None
                case "corrupt":
                    return _corrupted(call(*args, **kwargs))
            return call(*args, **kwargs)

        return wrapped


def _happen(what: str) -> str:
    kind, _, seconds = what.partition("=")
    match kind:
        case "raise":
            raise RuntimeError("a fault on purpose")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(9)
        case "delay":
            threading.Event().wait(float(seconds))
        case "drop" | "corrupt":
            return kind
        case _:
            raise ValueError(f"no fault called {what!r}")
    return ""


def _corrupted(result: Any) -> Any:
    changed = result.clone()
    changed.view(-1)[-1] += 1
    return changed
