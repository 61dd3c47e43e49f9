"""Two microbatches that hand over to each other, so that one computes while the tokens of the other travel.

Both run on one thread, as greenlets: recording, exceptions and what libraries keep for a thread stay as they are
without. ``ThreadTurns`` does the same with a thread each; it is what the other is compared with. Knows no tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from greenlet import getcurrent, greenlet

from fourfold.errors import EngineError

Result = TypeVar("Result")
WAIT_SECONDS: Final = 600.0
"""For the twin's next hand-over, on threads."""

log = logging.getLogger(__name__)


class TwinFailed(BaseException):
    """Ends a microbatch whose twin has raised; not an Exception, so that nothing on the way takes it for its own."""


class MicrobatchContext(Protocol):
    """One microbatch, while it runs."""

    @property
    def index(self) -> int:
        """0 or 1; also the channel of what it has in the air."""

    def yield_to_other(self) -> None:
        """Let the other one run until it yields or ends; at once where it has ended. Raises TwinFailed if it raised."""


Body = Callable[[MicrobatchContext], Result]


class Turns(Protocol):
    """Runs microbatches, in turns."""

    def run(self, bodies: Sequence[Body[Result]]) -> list[Result]:
        """What each returns; the first begins. Raises EngineError naming the one that raised, once all have ended."""


class GreenletTurns:
    """See Turns; all on the calling thread."""

    def run(self, bodies: Sequence[Body[Result]]) -> list[Result]:
        """See Turns."""
        results: list[Any] = [None] * len(bodies)

        def body(index: int, context: _GreenletContext) -> None:
            results[index] = bodies[index](context)

        hub = getcurrent()
        waiting: list[tuple[int, Any]] = []
        for index in range(len(bodies)):
            context = _GreenletContext(index, hub)
            waiting.append((index, greenlet(partial(body, index, context), parent=hub)))
        while waiting:
            index, runner = waiting.pop(0)
            try:
                runner.switch()
            except Exception as error:
                _release([other for _, other in waiting])
                raise _failure(index, error) from error
            if not runner.dead:
                waiting.append((index, runner))
        return results


class _GreenletContext:
    """See MicrobatchContext."""

    def __init__(self, index: int, hub: Any) -> None:
        self.index = index
        self._hub = hub

    def yield_to_other(self) -> None:
        """The hub goes on with whoever is next."""
        self._hub.switch()


class ThreadTurns:
    """See Turns; a thread each, of which one runs at a time."""

    def run(self, bodies: Sequence[Body[Result]]) -> list[Result]:
        """See Turns."""
        baton = _Baton(len(bodies))
        results: list[Any] = [None] * len(bodies)

        def body(index: int) -> None:
            try:
                baton.wait_for(index)
                results[index] = bodies[index](_ThreadContext(index, baton))
            except TwinFailed:
                pass
            except Exception as error:  # named by who waits for all
                baton.fail(index, error)
            finally:
                baton.leave(index)

        threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if baton.failure is not None:
            index, error = baton.failure
            raise _failure(index, error) from error
        return results


class _Baton:
    """Whose turn it is."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._running = list(range(count))
        """The first of them has the turn."""
        self.failure: tuple[int, Exception] | None = None

    def wait_for(self, index: int) -> None:
        """Return once it is the turn of ``index``; raises TwinFailed where another one has failed."""
        with self._condition:
            mine = self._condition.wait_for(
                lambda: self.failure is not None or self._running[0] == index, timeout=WAIT_SECONDS
            )
            if self.failure is not None:
                raise TwinFailed
            if not mine:
                raise EngineError(f"microbatch {self._running[0]} did not hand over within {WAIT_SECONDS:g} s")

    def pass_on(self, index: int) -> None:
        """``index`` goes to the end of the queue."""
        with self._condition:
            self._running.remove(index)
            self._running.append(index)
            self._condition.notify_all()
        self.wait_for(index)

    def leave(self, index: int) -> None:
        """``index`` has ended."""
        with self._condition:
            self._running.remove(index)
            self._condition.notify_all()

    def fail(self, index: int, error: Exception) -> None:
        """``index`` has raised; the first to do so is who is named."""
        with self._condition:
            if self.failure is None:
                self.failure = (index, error)
            self._condition.notify_all()


class _ThreadContext:
    """See MicrobatchContext."""

    def __init__(self, index: int, baton: _Baton) -> None:
        self.index = index
        self._baton = baton

    def yield_to_other(self) -> None:
        """See MicrobatchContext."""
        self._baton.pass_on(self.index)


def _release(runners: Sequence[Any]) -> None:
    """End microbatches where they wait, so that what they hold is let go of."""
    for runner in runners:
        if runner.gr_frame is None:  # it has not begun
            continue
        try:
            runner.throw(TwinFailed)
        except TwinFailed:
            continue
        except Exception:
            log.exception("a microbatch failed as it was ended")


def _failure(index: int, error: Exception) -> EngineError:
    return EngineError(f"microbatch {index} failed: {type(error).__name__}: {error}")
