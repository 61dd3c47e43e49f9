"""`fourfold serve`: checks everything that can be checked, binds the port, then runs the deployment."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fourfold.config.click_options import ConfigCommand, config_options
from fourfold.config.engine_config import EngineConfig
from fourfold.config.options import OptionSet
from fourfold.config.resolution import resolve
from fourfold.config.transport import encode_config
from fourfold.errors import ConfigError
from fourfold.plugins import PluginRegistry, load_plugins
from fourfold.supervision.parent_watch import connect_to_parent, started_by_parent
from fourfold.supervision.process_title import name_process
from fourfold_server.config import ServerConfig

if TYPE_CHECKING:
    from socket import socket

    from fourfold.supervision.parent_watch import ParentLink
    from fourfold.supervision.run_directory import RunDirectory
    from fourfold_server.supervisor import Failure

logger = logging.getLogger(__name__)


def build_command() -> click.Command:
    """The command; its options come from the config dataclasses and from plugins."""
    started = time.monotonic()
    registry = load_plugins()
    options = OptionSet((EngineConfig, ServerConfig), registry.settings())

    @click.command("serve", cls=ConfigCommand, help="Serve MODEL (default: smollm2) over the OpenAI API.")
    @click.argument("model", required=False)
    @config_options(options, skip={"model"})
    def command(model: str | None, config_file: str | None, **given: object) -> None:
        settings = options.read({"model": model, **given}, file=Path(config_file) if config_file else None)
        config, server_config = options.build(EngineConfig, settings), options.build(ServerConfig, settings)
        # From here on this process may be the child of another fourfold command, which ends with it.
        parent = connect_to_parent() if started_by_parent() else None
        failure = serve(config, server_config, registry, parent=parent, started=started)
        if failure is not None:
            error = click.ClickException(failure.message)
            error.exit_code = failure.status
            raise error

    return command


def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    registry: PluginRegistry,
    *,
    parent: ParentLink | None = None,
    started: float | None = None,
) -> Failure | None:
    """Serve until a signal; returns what failed after the start, if anything did.

    Raises ConfigError and PluginError before any other process is started.
    """
    # Here, so that `fourfold serve --help` stays quick.
    from fourfold.supervision.run_directory import CONFIG_FILE, RunDirectory
    from fourfold_server.listening_socket import listen

    name_process("api_server", log_level=server_config.log_level)
    for warning in registry.warnings:
        logger.warning("%s", warning)
    config = _check_config(config, registry)
    _check_certificate(server_config)
    with listen(server_config.host, server_config.port) as listener, RunDirectory.create() as run_directory:
        run_directory.write_file(CONFIG_FILE, encode_config(config))
        started = time.monotonic() if started is None else started
        return _run(config, server_config, registry, listener, run_directory, parent, started)


def _run(
    config: EngineConfig,
    server_config: ServerConfig,
    registry: PluginRegistry,
    listener: socket,
    run_directory: RunDirectory,
    parent: ParentLink | None,
    started: float,
) -> Failure | None:
    import uvloop

    from fourfold_server.deployment import Deployment

    async def run() -> Failure | None:
        deployment = Deployment(
            config, server_config, registry, listener, run_directory, parent=parent, started=started
        )
        return await deployment.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _check_config(config: EngineConfig, registry: PluginRegistry) -> EngineConfig:
    """The config with ``auto`` resolved, after a look at the model's description."""
    from fourfold.checkpoints.progress import NoProgress
    from fourfold.checkpoints.resolve import describe_checkpoint

    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size is {config.parallel.data_parallel_size}; this version serves one replica"
        )
    resolved = resolve(config, registry)
    logger.info("%s", "; ".join(resolved.reasons))
    describe_checkpoint(config.model, registry, NoProgress())
    return resolved.config


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile!r} and --ssl-keyfile {config.ssl_keyfile!r} do not go together: "
            f"{error}"
        ) from error
