"""The roles of a deployment's processes: how each is started, and who hears what becomes of it.

All of it runs on the supervisor's thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fourfold.messages import EngineReady
from fourfold.process_messages import (
    DrainEngine,
    EngineDead,
    EngineDraining,
    EngineNotice,
    EngineOrder,
    EngineStarting,
    ForgetClient,
    ProcessReady,
    RestartEngine,
)
from fourfold.shared_memory import SharedMemory
from fourfold.supervision.child_process import ChildCommand
from fourfold_server.acceptor import Acceptor
from fourfold_server.process_table import ProcessTable
from fourfold_server.supervised_process import SupervisedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What all processes of a deployment are started with."""

    run_directory: Path
    num_engines: int
    num_api_servers: int
    log_level: str
    url: str = ""
    lockstep: bool = False
    """Whether the engines share experts: none can go on without all others."""
    local: range | None = None
    """The engines on this node; None: all."""
    first_rank: int = 0
    """The rank of engine 0's replica."""

    @property
    def engines(self) -> range:
        """The engines on this node."""
        return range(self.num_engines) if self.local is None else self.local

    @property
    def coordinated(self) -> bool:
        """Whether there is a coordinator."""
        return self.num_engines > 1

    def api_label(self, index: int) -> str:
        """An API server's label; the only one needs none."""
        return str(index) if self.num_api_servers > 1 else ""


class Elsewhere(Protocol):
    """Engines that other nodes start and watch."""

    def restart(self, order: RestartEngine) -> None:
        """Hand on the wish to the node that has the engine."""

    def forget_client(self, order: ForgetClient) -> None:
        """Let all of them end the requests of an API server that has died."""


class EngineRole:
    """One engine core a data-parallel rank of this node; of others it knows what they tell."""

    vital = True

    def __init__(
        self,
        shape: Shape,
        table: ProcessTable,
        module: str = "fourfold.engine.process",
        *,
        elsewhere: Elsewhere | None = None,
        incarnations: Mapping[int, int] | None = None,
    ) -> None:
        """``incarnations``: of each engine the last one that somebody has heard of."""
        self._shape = shape
        self._table = table
        self._module = module
        self._elsewhere = elsewhere
        self._memory = SharedMemory() if len(shape.engines) > 1 else None
        """What the replicas hold in common; alive as long as this process."""
        self._generation = 1
        self._listeners: list[Callable[[EngineNotice], None]] = []
        self._told: dict[int, list[EngineNotice]] = {}
        """What was said of the present incarnation of each engine, and of the one before if that failed to start."""
        self.processes = [
            SupervisedProcess(
                role="engine_core",
                index=index,
                label=f"DP{shape.first_rank + index}",
                incarnation=(incarnations or {}).get(index, 0),
            )
            for index in shape.engines
        ]

    @property
    def bound(self) -> bool:
        """See Engines."""
        return self._shape.lockstep

    def begin_generation(self) -> None:
        """See Engines."""
        self._generation += 1

    def add_listener(self, listener: Callable[[EngineNotice], None]) -> None:
        """Have every notice told to ``listener``, which must return at once."""
        self._listeners.append(listener)

    def present_state(self) -> list[EngineNotice]:
        """The notices from which a newcomer learns how things stand."""
        return [notice for told in self._told.values() for notice in told]

    def forget_client(self, order: ForgetClient) -> None:
        """Let all engines end the requests of an API server that has died."""
        for process in self.processes:
            _order(process, order)
        if self._elsewhere is not None:
            self._elsewhere.forget_client(order)

    def restart_elsewhere(self, order: RestartEngine) -> None:
        """See Engines."""
        if self._elsewhere is not None:
            self._elsewhere.restart(order)

    @property
    def ready_elsewhere(self) -> bool:
        """See Engines."""
        others = [told for engine, told in self._told.items() if engine not in self._shape.engines]
        return any(isinstance(told[-1], EngineReady) for told in others)

    def command(self, process: SupervisedProcess) -> ChildCommand:
        """See Role."""
        shape = self._shape
        self.tell(EngineStarting(engine=process.index, incarnation=process.incarnation))
        arguments = [str(shape.run_directory), "--engine", str(process.index)]
        arguments += ["--dp-rank", str(shape.first_rank + process.index)]
        arguments += ["--incarnation", str(process.incarnation), "--num-api-servers", str(shape.num_api_servers)]
        arguments += ["--log-level", shape.log_level]
        if shape.coordinated:
            arguments.append("--coordinated")
        if shape.lockstep:
            arguments += ["--meeting", f"file://{shape.run_directory}/meeting-{self._generation}"]
        environment = None if self._memory is None else self._memory.environment
        return ChildCommand(module=self._module, label=process.name, arguments=arguments, environment=environment)

    def started(self, process: SupervisedProcess) -> None:
        """See Role."""

    def describe(self, report: EngineReady | ProcessReady) -> str:
        """See Role."""
        if not isinstance(report, EngineReady):
            return ""
        return f"{report.device} {report.dtype}, {report.kv_cache_tokens} tokens of KV cache"

    def ready(self, process: SupervisedProcess, report: EngineReady | ProcessReady) -> None:
        """See Role."""
        if isinstance(report, EngineReady):
            self._table.set_workers(process.index, report.workers)
            self.tell(report)

    def drain(self, process: SupervisedProcess) -> None:
        """See Engines."""
        # Listeners first: what they send after this, the engine may not see, and they know.
        self.tell(EngineDraining(engine=process.index, incarnation=process.incarnation))
        _order(process, DrainEngine())

    def lost(self, process: SupervisedProcess, reason: str) -> None:
        """See Role."""
        self.tell(
            EngineDead(
                engine=process.index, incarnation=process.incarnation, reason=reason, planned=process.planned_end
            )
        )

    def gone(self, process: SupervisedProcess) -> None:
        """See Role."""
        self._table.set_workers(process.index, [])
        if process.start_failure:
            incarnation, reason = process.incarnation, process.start_failure
            self.tell(EngineDead(engine=process.index, incarnation=incarnation, reason=reason))

    def tell(self, notice: EngineNotice) -> None:
        """Tell every listener what becomes of an engine, of this node or of another one."""
        told = self._told.setdefault(notice.engine, [])
        if isinstance(notice, EngineStarting):
            failed = len(told) > 1 and isinstance(told[-1], EngineDead) and isinstance(told[-2], EngineStarting)
            told[:] = told[-2:] if failed else []
        told.append(notice)
        for listener in self._listeners:
            listener(notice)


class ApiServerRole:
    """API servers 1 and above; the process that `fourfold serve` started is number 0."""

    vital = False

    def __init__(
        self,
        shape: Shape,
        engines: EngineRole,
        acceptor: Acceptor,
        on_ready: Callable[[], None],
        module: str = "fourfold_server.api_process",
    ) -> None:
        self._on_ready = on_ready
        self._shape = shape
        self._engines = engines
        self._acceptor = acceptor
        self._module = module
        self._channels: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.processes = [
            SupervisedProcess(role="api_server", index=index, label=shape.api_label(index))
            for index in range(1, shape.num_api_servers)
        ]
        engines.add_listener(self._tell)

    def command(self, process: SupervisedProcess) -> ChildCommand:
        """See Role."""
        shape = self._shape
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channels[process.index] = ours, theirs
        arguments = [str(shape.run_directory), "--index", str(process.index), "--channel", str(theirs.fileno())]
        arguments += ["--num-api-servers", str(shape.num_api_servers)]
        arguments += ["--label", process.label, "--log-level", shape.log_level]
        return ChildCommand(module=self._module, label=process.name, arguments=arguments, pass_fds=(theirs.fileno(),))

    def started(self, process: SupervisedProcess) -> None:
        """See Role."""
        self._channels[process.index][1].close()
        for notice in self._engines.present_state():
            _send(process, notice)

    def describe(self, report: EngineReady | ProcessReady) -> str:
        """See Role."""
        return self._shape.url

    def ready(self, process: SupervisedProcess, report: EngineReady | ProcessReady) -> None:
        """See Role."""
        self._acceptor.add(process.index, self._channels[process.index][0])
        self._on_ready()

    def lost(self, process: SupervisedProcess, reason: str) -> None:
        """See Role."""
        self._acceptor.remove(process.index)
        self._engines.forget_client(ForgetClient(client=process.index, died=time.time()))

    def gone(self, process: SupervisedProcess) -> None:
        """See Role."""
        self._acceptor.remove(process.index)
        for end in self._channels.pop(process.index, ()):
            end.close()

    def _tell(self, notice: EngineNotice) -> None:
        for process in self.processes:
            _send(process, notice)


class CoordinatorRole:
    """The process that knows all engines' loads; only where there are several."""

    vital = False

    def __init__(
        self, shape: Shape, on_ready: Callable[[], None], module: str = "fourfold.coordinator.process"
    ) -> None:
        self._on_ready = on_ready
        self._shape = shape
        self._module = module
        self.processes: Sequence[SupervisedProcess] = (
            [SupervisedProcess(role="coordinator", index=0, label="")] if shape.coordinated else []
        )

    def command(self, process: SupervisedProcess) -> ChildCommand:
        """See Role."""
        shape = self._shape
        arguments = [str(shape.run_directory), "--num-engines", str(shape.num_engines)]
        arguments += ["--num-api-servers", str(shape.num_api_servers), "--log-level", shape.log_level]
        return ChildCommand(module=self._module, label=process.name, arguments=arguments)

    def started(self, process: SupervisedProcess) -> None:
        """See Role."""

    def describe(self, report: EngineReady | ProcessReady) -> str:
        """See Role."""
        return ""

    def ready(self, process: SupervisedProcess, report: EngineReady | ProcessReady) -> None:
        """See Role."""
        self._on_ready()

    def lost(self, process: SupervisedProcess, reason: str) -> None:
        """See Role."""

    def gone(self, process: SupervisedProcess) -> None:
        """See Role."""


def _send(process: SupervisedProcess, notice: EngineNotice) -> None:
    if process.child is not None:
        process.child.send(msgspec.msgpack.encode(notice))


def _order(process: SupervisedProcess, order: EngineOrder) -> None:
    if process.child is not None:
        process.child.send(msgspec.msgpack.encode(order))
