"""API servers 1 and above: ``python -m fourfold_server.api_process``, started by the supervisor of a deployment."""

from __future__ import annotations

from fourfold.supervision.parent_watch import MAX_REPORT_BYTES, ParentLink, connect_to_parent

# isort: split
import argparse
import asyncio
import logging
import os
import socket
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fourfold.errors import ConfigError, EngineError, PluginError
from fourfold.process_messages import EngineNotice, ProcessFailed, ProcessReady, ProcessReport
from fourfold.supervision.process_title import name_process
from fourfold.supervision.run_directory import CONFIG_FILE

if TYPE_CHECKING:
    from fourfold_server.api_server import ApiServer
    from fourfold_server.supervised_process import Failure

SERVER_CONFIG_FILE = "server.json"
"""The API servers' config in a run directory."""


def main() -> None:
    """Serve until the parent asks it to stop; exits with status 1 on failure, which the parent hears."""
    link = connect_to_parent()
    parser = argparse.ArgumentParser(prog="python -m fourfold_server.api_process")
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--num-api-servers", type=int, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    arguments = parser.parse_args()
    name_process("api_server", arguments.label, log_level=arguments.log_level)
    status = 0
    try:
        failure = _run(link, arguments)
        if failure is not None:
            _report(link, ProcessFailed(message=failure.message, refused=failure.status == 2))
            status = 1
    except Exception as error:
        refused = isinstance(error, ConfigError | PluginError)
        trace = "" if refused else traceback.format_exc()[-MAX_REPORT_BYTES // 2 :]
        message = str(error) if refused else f"{type(error).__name__}: {error}"
        _report(link, ProcessFailed(message=message[: MAX_REPORT_BYTES // 8], traceback=trace, refused=refused))
        status = 1
    logging.shutdown()
    # Threads may still be busy with requests that nobody waits for any more.
    os._exit(status)


def _run(link: ParentLink, arguments: argparse.Namespace) -> Failure | None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(link, arguments))


async def _serve(link: ParentLink, arguments: argparse.Namespace) -> Failure | None:
    from fourfold.config.transport import decode_config
    from fourfold.plugins import load_plugins
    from fourfold_server.api_server import ApiServer, ApiServerContext
    from fourfold_server.config import ServerConfig
    from fourfold_server.loop_listener import call_on_loop

    loop = asyncio.get_running_loop()
    registry = load_plugins()
    config = decode_config((arguments.run_directory / CONFIG_FILE).read_bytes(), registry)
    end: asyncio.Future[Failure | None] = loop.create_future()
    server_config = (arguments.run_directory / SERVER_CONFIG_FILE).read_bytes()
    context = ApiServerContext(
        config=config,
        server_config=msgspec.json.decode(server_config, type=ServerConfig),
        registry=registry,
        run_directory=arguments.run_directory,
        index=arguments.index,
        num_api_servers=arguments.num_api_servers,
        restart_engine=partial(_report, link),
    )
    announcer = _Announcer(link)
    server = ApiServer(context, on_change=lambda: announcer.look(server), failed=lambda failure: _set(end, failure))
    drain = _Drain(server, end, config.timeouts.drain_timeout)
    await server.start(None)
    channel = socket.socket(fileno=arguments.channel)
    channel.setblocking(False)
    loop.add_reader(channel, _take_connections, channel, server, end)
    decoder = msgspec.msgpack.Decoder(EngineNotice)
    link.on_message(lambda message: call_on_loop(loop, partial(server.engine_changed, decoder.decode(message))))
    link.on_stop(lambda: call_on_loop(loop, drain.request))
    failure = await end
    loop.remove_reader(channel)
    await server.close(forced=failure is not None and failure.immediate)
    return failure


class _Announcer:
    """Says once that this server answers requests; without a ready engine it answers them with 503."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._announced = False

    def look(self, server: ApiServer) -> None:
        if self._announced or server.state.model is None:
            return
        self._announced = True
        server.settle()
        _report(self._link, ProcessReady())


class _Drain:
    """The first wish to stop drains, the second does not wait."""

    def __init__(self, server: ApiServer, end: asyncio.Future[Failure | None], timeout: float) -> None:
        self._server = server
        self._end = end
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        else:
            _set(self._end, None)

    async def _run(self) -> None:
        await self._server.drain(self._timeout)
        _set(self._end, None)


def _take_connections(channel: socket.socket, server: ApiServer, end: asyncio.Future[Failure | None]) -> None:
    from fourfold_server.acceptor import receive_connection
    from fourfold_server.supervised_process import Failure

    try:
        while (connection := receive_connection(channel)) is not None:
            server.take_connection(connection)
    except (EngineError, OSError) as error:
        asyncio.get_running_loop().remove_reader(channel)
        _set(end, Failure(message=str(error), status=1))


def _set(end: asyncio.Future[Failure | None], failure: Failure | None) -> None:
    if not end.done():
        end.set_result(failure)


def _report(link: ParentLink, report: ProcessReport) -> None:
    link.report(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
