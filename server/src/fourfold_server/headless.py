"""`fourfold serve --headless` with replicas: this node's engines, for the node that answers requests."""

from __future__ import annotations

import logging
import queue
import signal
from functools import partial

import msgspec

from fourfold.addresses import COORDINATOR, api_socket, engine_socket
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import NodePlan
from fourfold.errors import ConfigError, EngineError
from fourfold.manifest import fingerprint
from fourfold.messages import EngineReady
from fourfold.nodes.addresses import address_towards, node_name, own_address, tcp_url
from fourfold.nodes.connection import NodeConnection
from fourfold.nodes.relay import Relay
from fourfold.nodes.secret import required_secret
from fourfold.plugins import PluginRegistry
from fourfold.process_messages import EngineDead, EngineNotice, EngineStarting, ForgetClient, RestartEngine
from fourfold.supervision.deployment_state import write_state
from fourfold.supervision.parent_watch import ParentLink
from fourfold.supervision.run_directory import RunDirectory, running_processes
from fourfold_server.config import ServerConfig
from fourfold_server.node_protocol import (
    FromHead,
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
from fourfold_server.process_table import ProcessTable
from fourfold_server.roles import EngineRole, Shape
from fourfold_server.supervised_process import Failure
from fourfold_server.supervisor import Supervisor

logger = logging.getLogger(__name__)

ROLE = "node"
_GRACE = 5.0
"""Seconds for engines to end by themselves."""
_ASKED = "it was told to end"


class HeadlessNode:
    """One node with replicas. ``run`` belongs to the main thread, where signals are heard."""

    def __init__(
        self,
        plan: NodePlan,
        config: EngineConfig,
        server_config: ServerConfig,
        registry: PluginRegistry,
        run_directory: RunDirectory,
    ) -> None:
        self._plan = plan
        self._config = config
        self._server_config = server_config
        self._registry = registry
        self._run_directory = run_directory
        nodes = config.nodes
        self._url = tcp_url(nodes.data_parallel_address, nodes.data_parallel_rpc_port)
        self._source = own_address(nodes.node_interface, option="--node-interface") if nodes.node_interface else None
        head = nodes.data_parallel_address
        self.name = node_name(self._source or address_towards(head), joins=head)
        self._ends: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
        self._ending = False
        self._connection: NodeConnection | None = None
        self._supervisor: Supervisor | None = None
        self._engines: EngineRole | None = None
        self._outlets: dict[int, str] = {}
        self._table = ProcessTable(run_directory, self._show_processes)
        self._relay = Relay(run_directory.path, self._forward)

    def run(self, parent: ParentLink | None) -> Failure | None:
        """Join, serve until something ends it, and leave no process; returns what was wrong."""
        if parent is None:
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, lambda *_: self._end(None))
        else:
            parent.on_stop(partial(self._end, None))
        try:
            welcome = self._join()
        except EngineError as error:
            self._relay.close()
            return None if self._ending else Failure(message=str(error), status=1)
        except ConfigError:
            self._relay.close()
            raise
        self._start(welcome)
        failure = self._ends.get()
        self._close(failure)
        return failure

    def _join(self) -> Welcome:
        local = self._plan.local
        mine = fingerprint(self._config, self._registry.manifest, rank=local.start)
        join = ReplicaNode(
            first=local.start, count=len(local), fingerprint=msgspec.structs.replace(mine, node=self.name)
        )
        logger.info("node %s joins %s with replicas %d to %d", self.name, self._url, local.start, local.stop - 1)
        self._connection = NodeConnection(
            self._url,
            secret=required_secret(self._config),
            node=self.name,
            body=msgspec.msgpack.encode(join),
            timeout=self._config.timeouts.startup_timeout,
            on_message=self._receive,
            on_lost=self._lose_head,
            stop=lambda: self._ending,
            source=self._source,
        )
        return msgspec.msgpack.decode(self._connection.welcome, type=Welcome)

    def _start(self, welcome: Welcome) -> None:
        write_state(self._run_directory.path, welcome.state)
        for name in (COORDINATOR, *map(api_socket, range(welcome.num_api_servers))):
            self._relay.open_inlet(name)
        shape = Shape(
            run_directory=self._run_directory.path,
            num_engines=self._plan.num_engines,
            num_api_servers=welcome.num_api_servers,
            log_level=self._server_config.log_level,
            local=self._plan.local,
        )
        self._engines = EngineRole(
            shape, self._table, incarnations=dict(zip(self._plan.local, welcome.incarnations, strict=True))
        )
        self._engines.add_listener(self._tell_head)
        self._supervisor = Supervisor(
            self._engines,
            [],
            self._table,
            gave_up=self._fail,
            timeouts=self._config.timeouts,
            on_failure=self._server_config.on_failure,
        )
        self._supervisor.start()
        self._table.set(ROLE, self.name, "running")

    def _close(self, failure: Failure | None) -> None:
        if self._connection is not None:
            self._connection.close(failure.message if failure else _ASKED)
        if self._supervisor is not None:
            self._supervisor.close(grace=0 if failure else _GRACE)
        self._relay.close()

    # --- what ends it, from any thread -------------------------------------------------------------------------------

    def _end(self, failure: Failure | None) -> None:
        self._ending = True
        self._ends.put(failure)

    def _lose_head(self, reason: str, planned: bool) -> None:
        if planned and not reason:
            logger.info("the deployment has ended")
            self._end(None)
        else:
            self._end(Failure(message=f"node {self.name} has nobody to serve for: {reason}", status=1))

    def _fail(self, failure: Failure) -> None:
        if self._connection is not None:
            word = NodeFailed(message=failure.message, status=failure.status, traceback=failure.traceback)
            self._connection.send(pack(word))
        self._end(failure)

    # --- on the supervisor's thread ----------------------------------------------------------------------------------

    def _tell_head(self, notice: EngineNotice) -> None:
        engine = notice.engine
        if isinstance(notice, EngineStarting | EngineDead):
            self._relay.close_outlet(self._outlets.pop(engine, ""))
        if isinstance(notice, EngineStarting):
            self._outlets[engine] = engine_socket(engine, notice.incarnation)
            self._relay.open_outlet(self._outlets[engine])
        elif isinstance(notice, EngineReady):
            logger.info("engine DP%d is ready", engine)
        self._send(pack(NoticeSent(notice=notice)))

    def _show_processes(self) -> None:
        states = running_processes(self._run_directory.path)
        self._send(pack(ProcessesShown(processes=[msgspec.to_builtins(state) for state in states])))

    def _obey(self, content: bytes) -> None:
        order = msgspec.msgpack.decode(content, type=FromHead)
        if self._engines is None or self._supervisor is None:
            return
        match order:
            case ForgetClient():
                self._engines.forget_client(order)
            case RestartEngine():
                self._supervisor.restart(order)
            case StateTold():
                write_state(self._run_directory.path, order.state)

    # --- on the threads of connection and relay ----------------------------------------------------------------------

    def _receive(self, content: bytes) -> None:
        message = unpack(content)
        if isinstance(message, Relayed):
            self._relay.deliver(message.name, message.message)
        elif self._supervisor is not None:
            self._supervisor.post(partial(self._obey, message))

    def _forward(self, name: str, message: bytes) -> None:
        self._send(pack_relayed(name, message))

    def _send(self, content: bytes) -> None:
        if self._connection is not None:
            self._connection.send(content)
