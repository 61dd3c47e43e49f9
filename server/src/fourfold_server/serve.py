"""`fourfold serve`: checks everything that can be checked, binds the port, then runs the deployment."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from fourfold.config.click_options import ConfigCommand, config_options
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import NodePlan, plan_nodes, spread_replicas
from fourfold.config.options import OptionSet
from fourfold.config.transport import encode_config
from fourfold.errors import ConfigError, EngineError
from fourfold.plugins import PluginRegistry, load_plugins
from fourfold.supervision.parent_watch import connect_to_parent, started_by_parent
from fourfold.supervision.process_title import name_process
from fourfold_server.config import ServerConfig
from fourfold_server.open_files import raise_open_file_limit
from fourfold_server.start_checks import check_certificate, check_config, check_lockstep

if TYPE_CHECKING:
    from socket import socket

    from fourfold.supervision.parent_watch import ParentLink
    from fourfold.supervision.run_directory import RunDirectory
    from fourfold_server.acceptor import Acceptor
    from fourfold_server.deployment import Deployment
    from fourfold_server.end_signals import EndSignals
    from fourfold_server.loop_listener import LoopListener
    from fourfold_server.node_hub import NodeHub
    from fourfold_server.node_table import NodeTable
    from fourfold_server.process_table import ProcessTable
    from fourfold_server.roles import Shape
    from fourfold_server.supervised_process import Failure
    from fourfold_server.supervisor import Supervisor

logger = logging.getLogger(__name__)
_SUMMARY: Final = "Serve MODEL over the OpenAI API: a folder, a .gguf file, a hub id as org/name; default: smollm2."


def build_command() -> click.Command:
    """The command; its options come from the config dataclasses and from plugins."""
    started = time.monotonic()
    registry = load_plugins()
    options = OptionSet((EngineConfig, ServerConfig), registry.settings())

    @click.command("serve", cls=ConfigCommand, help=_SUMMARY)
    @click.argument("model", required=False)
    @config_options(options, skip={"model"})
    def command(model: str | None, config_file: str | None, **given: object) -> None:
        settings = options.read({"model": model, **given}, file=Path(config_file) if config_file else None)
        config, server_config = options.build(EngineConfig, settings), options.build(ServerConfig, settings)
        # From here on this process may be the child of another fourfold command, which ends with it.
        parent = connect_to_parent() if started_by_parent() else None
        serve(config, server_config, registry, parent=parent, started=started)

    return command


def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    registry: PluginRegistry,
    *,
    parent: ParentLink | None,
    started: float,
) -> None:
    """Serve until a signal. ``started`` is the ``time.monotonic`` of the command.

    Raises ConfigError and PluginError before any other process is started, and for what an engine finds wrong in its
    config or checkpoint; EngineError for what else ends the deployment.
    """
    # Here, so that `fourfold serve --help` stays quick.
    from fourfold.supervision.run_directory import RunDirectory
    from fourfold_server.end_signals import EndSignals
    from fourfold_server.listening_socket import listen, url_of
    from fourfold_server.roles import Shape

    config = spread_replicas(config)
    plan = plan_nodes(config)
    num_api_servers = server_config.api_server_count or plan.num_engines
    role = ("node", "") if config.nodes.headless else ("api_server", "0" if num_api_servers > 1 else "")
    name_process(*role, log_level=server_config.log_level)
    raise_open_file_limit()
    for warning in registry.warnings:
        logger.warning("%s", warning)
    config = check_config(config, server_config, registry)
    check_lockstep(plan, config)
    if config.nodes.headless:
        _serve_headless(plan, config, server_config, registry, parent)
        return
    check_certificate(server_config)
    signals = EndSignals() if parent is None else None  # from now on there is something to clean up
    with listen(server_config.host, server_config.port) as listener, RunDirectory.create() as run_directory:
        _fill(run_directory, config, server_config, num_api_servers)
        launch = _Launch(
            shape=Shape(
                run_directory=run_directory.path,
                num_engines=plan.num_engines,
                num_api_servers=num_api_servers,
                log_level=server_config.log_level,
                url=url_of(listener, secure=server_config.ssl_certfile is not None),
                lockstep=config.parallel.lockstep,
                local=plan.local,
                first_rank=plan.first_rank,
            ),
            plan=plan,
            config=config,
            server_config=server_config,
            registry=registry,
            listener=listener,
            run_directory=run_directory,
            parent=parent,
            signals=signals,
            started=started,
        )
        failure = launch.run()
    if failure is not None:
        _end(failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """What a deployment starts with."""

    shape: Shape
    plan: NodePlan
    config: EngineConfig
    server_config: ServerConfig
    registry: PluginRegistry
    listener: socket
    run_directory: RunDirectory
    parent: ParentLink | None
    signals: EndSignals | None
    """None where the parent says when to end."""
    started: float

    def run(self) -> Failure | None:
        """Run the deployment on an event loop of its own."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run())

    async def _run(self) -> Failure | None:
        from fourfold_server.acceptor import Acceptor
        from fourfold_server.loop_listener import LoopListener
        from fourfold_server.node_table import open_node_table
        from fourfold_server.process_table import ProcessTable
        from fourfold_server.supervised_process import Failure

        loop = asyncio.get_running_loop()
        table = ProcessTable(self.run_directory)
        listener = LoopListener(loop)
        if self.signals is not None:
            self.signals.listen(loop, listener.end_requested)
        if self.parent is not None:
            self.parent.on_stop(listener.end_requested)
        acceptor = Acceptor(self.listener, listener.take_connection)
        nodes = open_node_table(self.run_directory, self.config, self.plan)
        hub = self._hub(table, nodes)
        supervisor = self._supervisor(acceptor, table, nodes, listener, hub)
        supervisor.start()
        reason = "its head has failed"
        try:
            # Only now, so that the engine imports torch while this process imports its web framework.
            web = _import_deployment()
            first: set[asyncio.Future[Any]] = {web, listener.end_wish}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if listener.end_wish.done():
                return Failure(message="", status=0, immediate=True)
            deployment = web.result()(
                self.config,
                self.server_config,
                self.registry,
                self.listener,
                self.run_directory,
                shape=self.shape,
                table=table,
                acceptor=acceptor,
                supervisor=supervisor,
                parent=self.parent,
                started=self.started,
            )
            listener.set_target(deployment)
            failure = await deployment.run()
            reason = failure.message if failure is not None else ""
            return failure
        finally:
            supervisor.close(grace=0)
            if hub is not None:
                hub.close(reason)

    def _hub(self, table: ProcessTable, nodes: NodeTable) -> NodeHub | None:
        """Where other nodes join with their replicas; None where there are none."""
        from fourfold.manifest import fingerprint
        from fourfold_server.node_hub import NodeHub

        if not self.plan.elsewhere:
            return None
        mine = fingerprint(self.config, self.registry.manifest, rank=self.plan.local.start)
        return NodeHub(
            self.config,
            self.plan,
            self.run_directory.path,
            self.shape.num_api_servers,
            mine,
            table=table,
            nodes=nodes,
            on_failure=self.server_config.on_failure,
        )

    def _supervisor(
        self, acceptor: Acceptor, table: ProcessTable, nodes: NodeTable, listener: LoopListener, hub: NodeHub | None
    ) -> Supervisor:
        from fourfold_server.roles import ApiServerRole, CoordinatorRole, EngineRole
        from fourfold_server.supervisor import Role, Supervisor

        engines = EngineRole(self.shape, table, elsewhere=hub)
        engines.add_listener(nodes.hear)
        engines.add_listener(listener.engine_changed)
        others: list[Role] = [
            ApiServerRole(self.shape, engines, acceptor, listener.server_ready),
            CoordinatorRole(self.shape, listener.server_ready),
        ]
        supervisor = Supervisor(
            engines,
            others,
            table,
            gave_up=listener.gave_up,
            timeouts=self.config.timeouts,
            on_failure=self.server_config.on_failure,
        )
        if hub is not None:
            hub.start(supervisor, engines.tell)
        return supervisor


def _import_deployment() -> asyncio.Future[type[Deployment]]:
    """The class, imported on a thread that nothing waits for: it takes a second, and signals are heard meanwhile."""
    found: Future[type[Deployment]] = Future()

    def run() -> None:
        try:
            from fourfold_server.deployment import Deployment
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(Deployment)

    threading.Thread(target=run, name="imports", daemon=True).start()
    return asyncio.wrap_future(found)


def _serve_headless(
    plan: NodePlan,
    config: EngineConfig,
    server_config: ServerConfig,
    registry: PluginRegistry,
    parent: ParentLink | None,
) -> None:
    from fourfold.supervision.run_directory import CONFIG_FILE, RunDirectory
    from fourfold_server.following import follow
    from fourfold_server.headless import HeadlessNode

    if config.nodes.nnodes > 1:
        follow(config, registry, parent)
        return
    with RunDirectory.create() as run_directory:
        run_directory.write_file(CONFIG_FILE, encode_config(config))
        failure = HeadlessNode(plan, config, server_config, registry, run_directory).run(parent)
    if failure is not None:
        _end(failure)


def _fill(run_directory: RunDirectory, config: EngineConfig, server_config: ServerConfig, num_api_servers: int) -> None:
    """Write what all processes of the deployment read."""
    from fourfold.supervision.run_directory import CONFIG_FILE

    try:
        run_directory.write_file(CONFIG_FILE, encode_config(config))
        _wish_adapters(run_directory, server_config)
        if num_api_servers > 1:
            _prepare_sharing(run_directory, server_config)
    except OSError as error:
        raise ConfigError(
            f"cannot write into the run directory {run_directory.path}: {error.strerror}; set XDG_RUNTIME_DIR"
        ) from error


def _prepare_sharing(run_directory: RunDirectory, server_config: ServerConfig) -> None:
    """Lay out what several API servers have in common."""
    import msgspec

    from fourfold_server.api_process import SERVER_CONFIG_FILE

    run_directory.write_file(SERVER_CONFIG_FILE, msgspec.json.encode(server_config))
    metrics = run_directory.path / "metrics"
    metrics.mkdir()
    # Before anything imports prometheus_client, here and in children.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)


def _end(failure: Failure) -> NoReturn:
    if failure.traceback:
        click.echo(failure.traceback.rstrip(), err=True)
    if failure.immediate:
        # Threads may still be busy with what nobody waits for any more.
        if failure.message:
            click.echo(f"Error: {failure.message}", err=True)
        os._exit(failure.status)
    raise ConfigError(failure.message) if failure.status == 2 else EngineError(failure.message)


def _wish_adapters(run_directory: RunDirectory, server_config: ServerConfig) -> None:
    """Have every engine load the adapters of --lora-modules when it starts."""
    from fourfold.supervision.deployment_state import DeploymentState, write_state
    from fourfold_server.operations import wished_adapter

    adapters = tuple(wished_adapter(name, folder) for name, folder in server_config.adapters)
    write_state(run_directory.path, DeploymentState(adapters=adapters))
