"""The head's side of nodes with replicas: lets them in, carries their engines' messages, says what becomes of them.

What concerns engines happens on the supervisor's thread, messages of requests on the threads of listener and relay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from fourfold.addresses import COORDINATOR, api_socket, engine_socket
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import NodePlan
from fourfold.errors import ConfigError, FourfoldError
from fourfold.manifest import Fingerprint, compare
from fourfold.messages import EngineReady
from fourfold.nodes.addresses import listening_address
from fourfold.nodes.listener import NodeListener
from fourfold.nodes.relay import Relay
from fourfold.nodes.secret import required_secret
from fourfold.process_messages import EngineDead, EngineNotice, EngineStarting, ForgetClient, RestartEngine
from fourfold.supervision.deployment_state import read_state
from fourfold.supervision.run_directory import ProcessState
from fourfold_server.config import OnFailure
from fourfold_server.node_protocol import (
    FromNode,
    NodeFailed,
    NoticeSent,
    ProcessesShown,
    Relayed,
    ReplicaNode,
    StateTold,
    Welcome,
    pack,
    pack_relayed,
    unpack,
)
from fourfold_server.node_table import NodeTable
from fourfold_server.process_table import ProcessTable
from fourfold_server.supervised_process import Failure

logger = logging.getLogger(__name__)

_OPTION = "--data-parallel-address and --data-parallel-rpc-port"


class Owner(Protocol):
    """Who decides over the deployment."""

    def post(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the supervisor's thread."""

    def give_up(self, failure: Failure) -> None:
        """The deployment cannot go on."""


class NodeHub:
    """The engines on other nodes."""

    def __init__(
        self,
        config: EngineConfig,
        plan: NodePlan,
        run_directory: Path,
        num_api_servers: int,
        fingerprint: Fingerprint,
        *,
        table: ProcessTable,
        nodes: NodeTable,
        on_failure: OnFailure,
    ) -> None:
        """Listen; ``start`` has to follow. Raises ConfigError for an address, a port or a secret that will not do."""
        self._plan = plan
        self._num_api_servers = num_api_servers
        self._fingerprint = fingerprint
        self._table = table
        self._nodes = nodes
        self._on_failure = on_failure
        self._timeout = config.timeouts.startup_timeout
        self._lock = threading.Lock()  # guards the two below
        self._members: dict[str, range] = {}
        self._incarnations = dict.fromkeys(plan.elsewhere, 0)
        self._awaited = set(plan.elsewhere)
        """Engines that have not been ready yet; while there are any, the deployment starts."""
        self._alive: dict[int, int] = {}
        """Engine -> its incarnation."""
        self._owner: Owner | None = None
        self._tell: Callable[[EngineNotice], None] = lambda notice: None
        self._run_directory = run_directory
        self._relay = Relay(run_directory, self._forward)
        for name in (COORDINATOR, *map(api_socket, range(num_api_servers))):
            self._relay.open_outlet(name)
        self._deadline = threading.Timer(self._timeout, self._end_overdue)
        self._deadline.daemon = True
        try:
            self._listener = NodeListener(
                listening_address(
                    config.nodes.data_parallel_address, config.nodes.node_interface, option="--data-parallel-address"
                ),
                config.nodes.data_parallel_rpc_port,
                secret=required_secret(config),
                admit=self._admit,
                on_message=self._receive,
                on_lost=lambda node, reason, planned: self._post(partial(self._mourn, node, reason, planned)),
                option=_OPTION,
            )
        except BaseException:
            self._relay.close()
            raise

    def start(self, owner: Owner, tell: Callable[[EngineNotice], None]) -> None:
        """Let nodes in from now on. ``tell`` hears what becomes of engines, on the supervisor's thread."""
        self._tell = tell
        self._owner = owner
        self._deadline.start()
        logger.info("waiting for the nodes with replicas %s at %s", _spell(self._plan.elsewhere), self._listener.url)

    def close(self, reason: str) -> None:
        """Tell all nodes to end; an empty reason is a clean end. Idempotent."""
        self._deadline.cancel()
        self._listener.close(reason)
        self._relay.close()

    # --- on the supervisor's thread ----------------------------------------------------------------------------------

    def restart(self, order: RestartEngine) -> None:
        """Hand on the wish to the node that has the engine, after the state that it is to start with."""
        for node, engines in self._present():
            if order.engine in engines:
                self._listener.send(node, pack(StateTold(state=read_state(self._run_directory))))
                self._listener.send(node, pack(order))

    def forget_client(self, order: ForgetClient) -> None:
        """Let all engines end the requests of an API server that has died."""
        self._relay.open_outlet(api_socket(order.client))
        for node, _ in self._present():
            self._listener.send(node, pack(order))

    def _hear(self, node: str, content: bytes) -> None:
        message = msgspec.msgpack.decode(content, type=FromNode)
        match message:
            case NoticeSent():
                if isinstance(message.notice, EngineStarting):
                    self._listener.send(node, pack(StateTold(state=read_state(self._run_directory))))
                self._note(message.notice)
            case ProcessesShown():
                self._table.set_node(node, msgspec.convert(message.processes, list[ProcessState]))
            case NodeFailed():
                text = f"node {node}: {message.message}"
                logger.error("%s", text)
                if self._awaited or self._on_failure == "exit":
                    self._give_up(Failure(message=text, status=message.status, traceback=message.traceback))

    def _note(self, notice: EngineNotice) -> None:
        engine = notice.engine
        if isinstance(notice, EngineStarting):
            with self._lock:
                self._incarnations[engine] = notice.incarnation
            self._alive[engine] = notice.incarnation
            self._relay.open_inlet(engine_socket(engine, notice.incarnation))
        elif isinstance(notice, EngineReady):
            self._awaited.discard(engine)
            if not self._awaited:
                self._deadline.cancel()
        elif isinstance(notice, EngineDead):
            self._alive.pop(engine, None)
            self._relay.close_inlet(engine_socket(engine, notice.incarnation))
        self._tell(notice)

    def _join(self, node: str, engines: range) -> None:
        logger.info("node %s has joined with replicas %s", node, _spell(engines))
        self._nodes.join(node, engines)

    def _mourn(self, node: str, reason: str, planned: bool) -> None:
        with self._lock:
            engines = self._members.pop(node, range(0))
        text = f"node {node} is lost: {reason or 'it has ended'}"
        logger.error("%s; it had replicas %s", text, _spell(engines))
        self._table.set_node(node, [])
        self._nodes.lose(node)
        for engine in engines:
            if engine in self._alive:
                incarnation = self._alive[engine]
                dead = EngineDead(engine=engine, incarnation=incarnation, reason=text, planned=planned, with_node=True)
                self._note(dead)
        if self._awaited.intersection(engines) or (self._on_failure == "exit" and not planned):
            self._give_up(Failure(message=f"{text}; it had replicas {_spell(engines)}", status=1))

    def _refuse(self, node: str, error: FourfoldError) -> None:
        if self._awaited:
            self._give_up(Failure(message=f"node {node} does not fit: {error}", status=2))

    def _miss(self) -> None:
        present = {engine for _, engines in self._present() for engine in engines}
        absent = sorted(self._awaited - present)
        if absent:
            text = f"no node has joined with replicas {_spell(absent)}"
        elif self._awaited:
            late = [node for node, engines in self._present() if self._awaited.intersection(engines)]
            text = f"node {', '.join(late)} has no ready engine for replicas {_spell(sorted(self._awaited))}"
        else:
            return
        self._give_up(Failure(message=f"{text} within {self._timeout:g} s (--startup-timeout)", status=1))

    def _give_up(self, failure: Failure) -> None:
        if self._owner is not None:
            self._owner.give_up(failure)

    # --- on other threads --------------------------------------------------------------------------------------------

    def _post(self, task: Callable[[], None]) -> None:
        if self._owner is not None:
            self._owner.post(task)

    def _end_overdue(self) -> None:
        self._post(self._miss)

    def _present(self) -> list[tuple[str, range]]:
        with self._lock:
            return list(self._members.items())

    def _admit(self, node: str, body: bytes) -> bytes:
        join = msgspec.msgpack.decode(body, type=ReplicaNode)
        engines = range(join.first, join.first + join.count)
        try:
            compare(self._fingerprint, join.fingerprint)
            self._check_free(engines)
        except FourfoldError as error:
            self._post(partial(self._refuse, node, error))
            raise
        with self._lock:
            self._members[node] = engines
            incarnations = [self._incarnations[engine] for engine in engines]
        self._post(partial(self._join, node, engines))
        welcome = Welcome(
            num_api_servers=self._num_api_servers,
            incarnations=incarnations,
            state=read_state(self._run_directory),
        )
        return msgspec.msgpack.encode(welcome)

    def _check_free(self, engines: range) -> None:
        strange = [engine for engine in engines if engine not in self._plan.elsewhere]
        if strange:
            raise ConfigError(
                f"it has replicas {_spell(engines)}, and other nodes are to have {_spell(self._plan.elsewhere)}; check "
                "--data-parallel-start-rank and --data-parallel-size-local"
            )
        for other, taken in self._present():
            if set(taken).intersection(engines):
                raise ConfigError(f"it has replicas {_spell(engines)}, and node {other} has {_spell(taken)} already")

    def _receive(self, node: str, content: bytes) -> None:
        message = unpack(content)
        if isinstance(message, Relayed):
            self._relay.deliver(message.name, message.message)
        else:
            self._post(partial(self._hear, node, message))

    def _forward(self, name: str, message: bytes) -> None:
        engine = int(name.split("-")[1])
        for node, engines in self._present():
            if engine in engines:
                self._listener.send(node, pack_relayed(name, message))


def _spell(engines: Sequence[int]) -> str:
    """``2 to 5``, or what else is there."""
    if len(engines) > 1 and engines[-1] - engines[0] == len(engines) - 1:
        return f"{engines[0]} to {engines[-1]}"
    return ", ".join(map(str, engines)) or "none"
