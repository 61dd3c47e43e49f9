"""Keeps the engines of a deployment alive: starts them, gives each start a deadline, restarts or gives up.

Knows nothing of HTTP: it tells a listener what happens, on its own thread.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from fourfold.config.timeout_config import TimeoutConfig
from fourfold.errors import EngineError
from fourfold.messages import EngineFailed, EngineReady
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold_server.config import OnFailure
from fourfold_server.process_table import ProcessTable

logger = logging.getLogger(__name__)

ROLE = "engine_core"
RAPID_CRASH_SECONDS = 60.0
"""An engine that dies sooner than this after its start counts as crashing rapidly."""
MAX_RAPID_CRASHES = 3
_STARTUP_GRACE = 5.0
"""Seconds, or a tenth if that is less, beyond --startup-timeout: the engine, which knows for whom it waits, reports."""

_ENDING_TIMEOUT = 20.0
"""Seconds for an engine that has failed to end its workers and itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the deployment ends."""

    message: str
    status: int
    """The exit status that says so: 2 when config, checkpoint or plugins are at fault, else 1."""
    traceback: str = ""
    immediate: bool = False
    """Whether nothing is waited for any more."""


class EngineListener(Protocol):
    """Hears of engines. Called on the supervisor's thread; must return at once."""

    def engine_starting(self, engine: int, incarnation: int) -> None:
        """A new process will speak for the engine; older incarnations are not to be heard."""

    def engine_ready(self, ready: EngineReady) -> None:
        """The engine takes requests."""

    def engine_dead(self, engine: int, reason: str) -> None:
        """An engine that was ready takes no more requests; those that it had are lost."""

    def gave_up(self, failure: Failure) -> None:
        """The deployment cannot go on. Said once at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """How engine processes are started."""

    run_directory: Path
    num_api_servers: int
    log_level: str
    module: str = "fourfold.engine.process"

    def build(self, engine: int, incarnation: int) -> ChildCommand:
        """The command for one start of one engine."""
        arguments = [str(self.run_directory), "--engine", str(engine), "--incarnation", str(incarnation)]
        arguments += ["--num-api-servers", str(self.num_api_servers), "--log-level", self.log_level]
        return ChildCommand(module=self.module, label=f"{ROLE} DP{engine}", arguments=arguments)


@dataclass(kw_only=True, slots=True)
class _Engine:
    """One engine over its incarnations."""

    index: int
    incarnation: int = 0
    child: ChildProcess | None = None
    started: float = 0.0
    ready: bool = False
    ever_ready: bool = False
    last_word: EngineFailed | None = None
    overdue: str = ""
    """Why we ended it ourselves."""
    rapid_crashes: int = 0
    wake_time: float | None = None
    """When to look again: the deadline of a start, or the time of a restart."""
    on_wake: Callable[[], None] = field(default=lambda: None)

    @property
    def label(self) -> str:
        return f"DP{self.index}"


class EngineSupervisor:
    """Owns the engine processes and the thread that decides over them."""

    def __init__(
        self,
        command: EngineCommand,
        listener: EngineListener,
        table: ProcessTable,
        *,
        num_engines: int,
        timeouts: TimeoutConfig,
        on_failure: OnFailure,
    ) -> None:
        self._command = command
        self._listener = listener
        self._table = table
        self._timeouts = timeouts
        self._on_failure = on_failure
        self._engines = [_Engine(index=index) for index in range(num_engines)]
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._children = ChildSupervisor()
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Start all engines; the listener hears how it goes."""
        for engine in self._engines:
            self._events.put(partial(self._start, engine))
        self._thread.start()

    def close(self, *, grace: float = 5.0) -> None:
        """End all engines: those that are ready get ``grace`` seconds to end by themselves. Idempotent."""
        self._events.put(self._end)
        if self._thread.is_alive():
            self._thread.join(grace)
        loading = [engine.child for engine in self._engines if engine.child is not None and not engine.ready]
        self._children.end(loading, grace=0, terminate=0)
        # Engines ignore SIGTERM, which may come to the whole process group when it is for us alone.
        self._children.close(grace=grace, terminate=0)

    def _run(self) -> None:
        while not self._ended:
            wake_times = [engine.wake_time for engine in self._engines if engine.wake_time is not None]
            timeout = max(0.0, min(wake_times) - time.monotonic()) if wake_times else None
            try:
                self._events.get(timeout=timeout)()
            except queue.Empty:
                self._wake()
            except Exception as error:  # whatever it is: engines that nobody looks after must not go on
                logger.exception("the supervisor failed")
                self._give_up(Failure(message=f"the supervisor failed: {type(error).__name__}: {error}", status=1))

    def _wake(self) -> None:
        for engine in self._engines:
            if engine.wake_time is not None and engine.wake_time <= time.monotonic():
                engine.wake_time = None
                engine.on_wake()

    def _end(self) -> None:
        self._ended = True

    def _start(self, engine: _Engine) -> None:
        engine.incarnation += 1
        engine.ready, engine.last_word, engine.overdue = False, None, ""
        engine.started = time.monotonic()
        self._listener.engine_starting(engine.index, engine.incarnation)
        try:
            engine.child = child = self._children.start(
                self._command.build(engine.index, engine.incarnation),
                on_report=lambda _, report: self._events.put(partial(self._hear, engine, report)),
                on_exit=lambda _, how: self._events.put(partial(self._mourn, engine, how)),
            )
        except EngineError as error:
            self._give_up(Failure(message=str(error), status=1))
            return
        self._table.set(ROLE, engine.label, "starting", pid=child.pid)
        timeout = self._timeouts.startup_timeout
        engine.wake_time = engine.started + timeout + min(_STARTUP_GRACE, timeout / 10)
        engine.on_wake = partial(self._end_overdue, engine, child)

    def _hear(self, engine: _Engine, report: bytes) -> None:
        message = msgspec.msgpack.decode(report, type=EngineReady | EngineFailed)
        if isinstance(message, EngineFailed):
            if engine.last_word is None:  # what follows may be an echo
                engine.last_word = message
                if engine.ready and engine.child is not None:  # it has yet to end its workers
                    self._lose(engine, engine.child)
            return
        engine.ready = engine.ever_ready = True
        engine.wake_time = None
        if engine.child is not None:
            detail = f"{message.device} {message.dtype}, {message.kv_cache_tokens} tokens of KV cache"
            self._table.set(ROLE, engine.label, "running", pid=engine.child.pid, detail=detail)
        self._table.set_workers(engine.index, message.workers)
        self._listener.engine_ready(message)

    def _lose(self, engine: _Engine, child: ChildProcess) -> None:
        """A ready engine has said that it fails; its process ends later."""
        failure = self._explain(engine, None)
        self._listener.engine_dead(engine.index, failure.message)
        if self._on_failure == "exit":
            self._give_up(failure)
        engine.wake_time = time.monotonic() + _ENDING_TIMEOUT
        engine.on_wake = partial(child.send_signal, signal.SIGKILL)

    def _end_overdue(self, engine: _Engine, child: ChildProcess) -> None:
        engine.overdue = f"was not ready within {self._timeouts.startup_timeout:g} s (--startup-timeout)"
        child.send_signal(signal.SIGKILL)

    def _mourn(self, engine: _Engine, how: ChildExit) -> None:
        """A child has ended that we did not want to end."""
        engine.child, engine.wake_time = None, None
        self._table.remove(ROLE, engine.label)
        self._table.set_workers(engine.index, [])
        failure = self._explain(engine, how)
        if engine.ready and engine.last_word is None:
            self._listener.engine_dead(engine.index, failure.message)
        if not engine.ever_ready or self._on_failure == "exit":
            self._give_up(failure)
        else:
            self._restart(engine, failure)

    def _explain(self, engine: _Engine, how: ChildExit | None) -> Failure:
        phase = "while running" if engine.ready else "during start-up"
        name = f"{ROLE} {engine.label}"
        if engine.overdue:
            return Failure(message=f"{name} {engine.overdue}", status=1)
        if engine.last_word is None:
            return Failure(message=f"{name} {how} {phase}", status=1)
        word = engine.last_word
        if word.refused:
            return Failure(message=word.message, status=2)
        return Failure(message=f"{name} failed {phase}: {word.message}", status=1, traceback=word.traceback)

    def _restart(self, engine: _Engine, failure: Failure) -> None:
        rapid = time.monotonic() - engine.started < RAPID_CRASH_SECONDS
        engine.rapid_crashes = engine.rapid_crashes + 1 if rapid else 1
        if engine.rapid_crashes > MAX_RAPID_CRASHES:
            message = f"{failure.message}; it is not restarted again after {engine.rapid_crashes} rapid failures"
            self._give_up(Failure(message=message, status=1, traceback=failure.traceback))
            return
        # The first restart is at once; a start that goes on failing backs off 1, 2, ... seconds.
        delay = 0.0 if engine.rapid_crashes == 1 else 2.0 ** (engine.rapid_crashes - 2)
        if failure.traceback:
            logger.error("%s", failure.traceback.rstrip())
        logger.error("%s; restarting it in %g s", failure.message, delay)
        engine.wake_time = time.monotonic() + delay
        engine.on_wake = partial(self._start, engine)

    def _give_up(self, failure: Failure) -> None:
        self._ended = True
        self._listener.gave_up(failure)
