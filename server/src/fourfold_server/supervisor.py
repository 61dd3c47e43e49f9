"""Keeps the processes of a deployment alive: starts them, gives each start a deadline, restarts or gives up.

Knows nothing of HTTP. Roles know how a process is started and who hears of it, on the supervisor's thread.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from fourfold.config.timeout_config import TimeoutConfig
from fourfold.errors import EngineError
from fourfold.messages import EngineFailed, EngineReady
from fourfold.process_messages import ProcessFailed, ProcessReady, ProcessReport, RestartEngine
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold_server.config import OnFailure
from fourfold_server.process_table import ProcessTable
from fourfold_server.supervised_process import Failure, SupervisedProcess

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""In a row, of every engine: then the deployment ends. One that starts and is killed again and again is no such."""
_STARTUP_GRACE = 5.0
"""Seconds, or a tenth if that is less, beyond --startup-timeout: the process itself knows for whom it waits."""
_ENDING_TIMEOUT = 20.0
"""Seconds for a process that has failed to end its children and itself."""


class Role(Protocol):
    """What is special about the processes of one role. All methods run on the supervisor's thread."""

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        """Those of this role, by index."""

    @property
    def vital(self) -> bool:
        """Whether requests are lost with a process, so that --on-failure and the limit of failed starts hold for it."""

    def command(self, process: SupervisedProcess) -> ChildCommand:
        """The command of a new incarnation, about to be started."""

    def started(self, process: SupervisedProcess) -> None:
        """The process runs: ``process.child``."""

    def describe(self, report: EngineReady | ProcessReady) -> str:
        """What `fourfold ps` says of one that is ready."""

    def ready(self, process: SupervisedProcess, report: EngineReady | ProcessReady) -> None:
        """It does its work now."""

    def lost(self, process: SupervisedProcess, reason: str) -> None:
        """One that was ready is no more, or is about to end. Said once an incarnation."""

    def gone(self, process: SupervisedProcess) -> None:
        """The process has ended, ready or not."""


class Engines(Role, Protocol):
    """The role of the engines, which can be restarted one by one, unless they are bound to each other."""

    @property
    def bound(self) -> bool:
        """Whether no engine can go on without all others, so that they are started anew together."""

    def begin_generation(self) -> None:
        """Engines that are started from now on meet apart from those before."""

    def drain(self, process: SupervisedProcess) -> None:
        """Let it finish its requests and end."""

    def restart_elsewhere(self, order: RestartEngine) -> None:
        """Have another node restart its engine."""

    @property
    def ready_elsewhere(self) -> bool:
        """Whether another node has an engine that serves."""


class Supervisor:
    """Owns the processes and the thread that decides over them."""

    def __init__(
        self,
        engines: Engines,
        others: Sequence[Role],
        table: ProcessTable,
        *,
        gave_up: Callable[[Failure], None],
        timeouts: TimeoutConfig,
        on_failure: OnFailure,
    ) -> None:
        """``gave_up`` hears why the deployment cannot go on, once at most."""
        self._engines = engines
        self._roles = (engines, *others)
        self._gave_up = gave_up
        self._table = table
        self._timeouts = timeouts
        self._on_failure = on_failure
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending: frozenset[str] = frozenset()
        """Roles whose processes end now, and are not started again."""
        self._ended = False
        self._children = ChildSupervisor(stall_timeout=timeouts.stall_timeout)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start all processes; the roles hear how it goes."""
        for role in self._roles:
            for process in role.processes:
                self._events.put(partial(self._start, role, process))
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether every process does its work. From any thread."""
        return all(process.ready and process.child is not None for process in self._all())

    def post(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the supervisor's thread, while there is one. From any thread."""
        self._events.put(task)

    def give_up(self, failure: Failure) -> None:
        """End the deployment for a reason that no process of it has. On the supervisor's thread."""
        if not self._ended:
            self._give_up(failure)

    def restart(self, order: RestartEngine) -> None:
        """Let an engine finish what it has and start it anew, if it is ready; or start it anew now, in any state."""
        self._events.put(partial(self._obey, order))

    def stop_all(self, role: str) -> None:
        """Ask all processes of a role to end by themselves; they are not started again. Once more: asks again.

        Those that are not ready yet have nothing to finish, and are ended.
        """
        self._events.put(partial(self._stop_all, role))

    def hurry(self, role: str) -> None:
        """Let all processes of a role end without finishing anything. From any thread, also after giving up."""
        for process in self._all():
            child = process.child  # which the supervisor's thread may take away meanwhile
            if process.role == role and child is not None:
                child.request_stop()
                child.request_stop()

    def wait(self, role: str, timeout: float) -> list[str]:
        """Wait until the processes of a role have ended; returns those that have not after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        found = [process for one in self._roles for process in one.processes if process.role == role]
        children = [process.child for process in found if process.child is not None]
        return [str(child) for child in children if child.wait(max(0.0, deadline - time.monotonic())) is None]

    def close(self, *, grace: float = 5.0) -> None:
        """End all processes: those that are ready get ``grace`` seconds to end by themselves. Idempotent."""
        self._events.put(self._end)
        if self._thread.is_alive():
            self._thread.join(grace)
        loading = [process.child for process in self._all() if process.child is not None and not process.ready]
        self._children.end(loading, grace=0, terminate=0)
        # Children ignore SIGTERM, which may come to the whole process group when it is for us alone.
        self._children.close(grace=grace, terminate=0)

    def _all(self) -> list[SupervisedProcess]:
        return [process for role in self._roles for process in role.processes]

    def _run(self) -> None:
        while not self._ended:
            wake_times = [process.wake_time for process in self._all() if process.wake_time is not None]
            timeout = max(0.0, min(wake_times) - time.monotonic()) if wake_times else None
            try:
                self._events.get(timeout=timeout)()
            except queue.Empty:
                self._wake()
            except Exception as error:  # whatever it is: processes that nobody looks after must not go on
                logger.exception("the supervisor failed")
                self._give_up(Failure(message=f"the supervisor failed: {type(error).__name__}: {error}", status=1))

    def _wake(self) -> None:
        for process in self._all():
            if process.wake_time is not None and process.wake_time <= time.monotonic():
                process.wake_time = None
                process.on_wake()

    def _end(self) -> None:
        self._ended = True

    def _stop_all(self, role: str) -> None:
        self._ending |= {role}
        for process in self._all():
            if process.role == role:
                process.wake_time = None
                if process.child is not None and process.ready:
                    process.child.request_stop()
                elif process.child is not None:
                    _kill(process.child)

    # --- a process starts ----------------------------------------------------------------------------------------

    def _start(self, role: Role, process: SupervisedProcess) -> None:
        process.begin()
        try:
            process.child = child = self._children.start(
                role.command(process),
                on_report=lambda _, report: self._events.put(partial(self._hear, role, process, report)),
                on_exit=lambda _, how: self._events.put(partial(self._mourn, role, process, how)),
            )
        except EngineError as error:
            self._give_up(Failure(message=str(error), status=1))
            return
        role.started(process)
        self._table.set(process.role, process.label, "starting", pid=child.pid)
        timeout = self._timeouts.startup_timeout
        deadline = process.started + timeout + min(_STARTUP_GRACE, timeout / 10)
        process.wake_at(deadline, partial(self._end_overdue, process, child))

    def _end_overdue(self, process: SupervisedProcess, child: ChildProcess) -> None:
        process.overdue = f"was not ready within {self._timeouts.startup_timeout:g} s (--startup-timeout)"
        child.send_signal(signal.SIGKILL)

    def _hear(self, role: Role, process: SupervisedProcess, report: bytes) -> None:
        message = msgspec.msgpack.decode(report, type=ProcessReport)
        match message:
            case EngineReady() | ProcessReady():
                process.ready = process.ever_ready = True
                process.failed_starts = 0
                process.start_failure = ""
                process.wake_time = None
                if process.child is not None:
                    detail = role.describe(message)
                    self._table.set(process.role, process.label, "running", pid=process.child.pid, detail=detail)
                role.ready(process, message)
            case EngineFailed() | ProcessFailed():
                if process.last_word is None:  # what follows may be an echo
                    process.last_word = message
                    if process.ready and process.child is not None:  # it has yet to end its workers
                        self._lose(role, process, process.child, message)
            case RestartEngine():
                self._obey(message)

    # --- a process ends ------------------------------------------------------------------------------------------

    def _obey(self, order: RestartEngine) -> None:
        process = next((one for one in self._engines.processes if one.index == order.engine), None)
        if process is None:
            self._engines.restart_elsewhere(order)
        elif order.now:
            self._start_over(process)
        else:
            self._drain_engine(process)

    def _start_over(self, process: SupervisedProcess) -> None:
        """With what holds now: what it started with does no more."""
        process.rapid_crashes = process.failed_starts = 0
        if process.child is not None:
            # One that is bound to others takes them with it when it crashes, and not when that is planned.
            process.planned_end = not self._engines.bound
            _kill(process.child)
        elif process.wake_time is not None:
            process.wake_at(time.monotonic(), process.on_wake)

    def _drain_engine(self, process: SupervisedProcess) -> None:
        if process.child is None or not process.ready or process.planned_end or process.last_word is not None:
            return
        if self._engines.bound:
            logger.warning("%s goes on: engines that share experts are not restarted one by one", process.name)
            return
        process.planned_end = True
        logger.info("%s is restarted once its requests have ended, or after --drain-timeout", process.name)
        self._table.set(process.role, process.label, "draining", pid=process.child.pid)
        self._engines.drain(process)
        process.wake_at(time.monotonic() + self._timeouts.drain_timeout, partial(_kill, process.child))

    def _lose(
        self, role: Role, process: SupervisedProcess, child: ChildProcess, word: EngineFailed | ProcessFailed
    ) -> None:
        """One that was ready has said that it fails; it ends later."""
        failure = process.explain_word(word)
        role.lost(process, failure.message)
        if role.vital and self._on_failure == "exit" and not process.planned_end:
            self._give_up(failure)
        process.wake_at(time.monotonic() + _ENDING_TIMEOUT, partial(_kill, child))

    def _mourn(self, role: Role, process: SupervisedProcess, how: ChildExit) -> None:
        """A child has ended that we did not end."""
        process.child, process.wake_time = None, None
        self._table.remove(process.role, process.label)
        failure = process.explain(how)
        failed = process.ever_ready and not process.ready and not process.planned_end
        process.start_failure = failure.message if failed else ""
        if process.ready and process.last_word is None:
            role.lost(process, "it is being restarted" if process.planned_end else failure.message)
        role.gone(process)
        if process.role in self._ending:
            return
        if role is self._engines and self._engines.bound and not process.planned_end:
            self._end_others(process)
        if process.planned_end:
            self._start(role, process)
        elif not process.ever_ready or (role.vital and self._on_failure == "exit"):
            self._give_up(failure)
        else:
            self._restart(role, process, failure)

    def _end_others(self, lost: SupervisedProcess) -> None:
        """Start all engines anew with the one that was lost, whose experts they need."""
        self._engines.begin_generation()
        for process in self._engines.processes:
            if process is not lost and process.child is not None and not process.planned_end:
                process.planned_end = True
                logger.info("%s is restarted with %s, whose experts it needs", process.name, lost.name)
                _kill(process.child)
        for role in self._roles[1:]:
            for process in role.processes:
                if process.role == "coordinator" and process.child is not None:
                    _kill(process.child)  # it must not take the new engines for the old ones

    def _restart(self, role: Role, process: SupervisedProcess, failure: Failure) -> None:
        delay = process.count_crash()
        # Of engines that are bound to each other only the first to fail counts; it takes the others with it.
        judged = [process] if self._engines.bound else role.processes
        hopeless = all(one.failed_starts >= MAX_FAILED_STARTS for one in judged) and not self._engines.ready_elsewhere
        if role.vital and hopeless:
            message = f"{failure.message}; it is not restarted again after {process.failed_starts} starts that failed"
            self._give_up(Failure(message=message, status=1, traceback=failure.traceback))
            return
        if failure.traceback:
            logger.error("%s", failure.traceback.rstrip())
        logger.error("%s; restarting it in %g s", failure.message, delay)
        process.wake_at(time.monotonic() + delay, partial(self._start, role, process))

    def _give_up(self, failure: Failure) -> None:
        self._ended = True
        self._gave_up(failure)


def _kill(child: ChildProcess) -> None:
    child.send_signal(signal.SIGKILL)
