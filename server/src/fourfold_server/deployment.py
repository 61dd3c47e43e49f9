"""One running deployment: API server 0 on the event loop, the supervisor of all other processes, how it all ends."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial
from socket import socket

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.load_balancer import EngineState
from fourfold.messages import EngineReady
from fourfold.plugins import PluginRegistry
from fourfold.process_messages import EngineNotice
from fourfold.supervision.parent_watch import ParentLink
from fourfold.supervision.run_directory import RunDirectory
from fourfold_server.acceptor import Acceptor
from fourfold_server.api_server import SHUTTING_DOWN, ApiServer, ApiServerContext
from fourfold_server.config import ServerConfig
from fourfold_server.process_table import ProcessTable
from fourfold_server.roles import Shape
from fourfold_server.supervised_process import Failure
from fourfold_server.supervisor import Supervisor

logger = logging.getLogger(__name__)

ROLE = "api_server"
_FLUSH_TIMEOUT = 5.0
"""Seconds that other API servers may take to end after --drain-timeout."""
_ENGINE_GRACE = 5.0
_FORCED_EXIT = Failure(message="ended by a second signal before all requests were answered", status=1, immediate=True)


class Deployment:
    """Runs in the process that `fourfold serve` started."""

    def __init__(
        self,
        config: EngineConfig,
        server_config: ServerConfig,
        registry: PluginRegistry,
        listener: socket,
        run_directory: RunDirectory,
        *,
        shape: Shape,
        table: ProcessTable,
        acceptor: Acceptor,
        supervisor: Supervisor,
        parent: ParentLink | None,
        started: float,
    ) -> None:
        """``supervisor`` may have started; what it says is heard once ``run`` waits. ``started``: monotonic time."""
        self._config = config
        self._listener = listener
        self._shape = shape
        self._table = table
        self._acceptor = acceptor
        self._supervisor = supervisor
        self._parent = parent
        self._started = started
        self._server = ApiServer(
            ApiServerContext(
                config=config,
                server_config=server_config,
                registry=registry,
                run_directory=run_directory.path,
                index=0,
                num_api_servers=shape.num_api_servers,
                restart_engine=supervisor.restart,
            ),
            on_change=self._announce,
            failed=self.gave_up,
        )
        self._end: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        """What the deployment ends with; None is a clean end."""
        self._announced = False
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> Failure | None:
        """Serve until a signal or a failure; returns the failure. No other process is left."""
        self._table.set(ROLE, self._shape.api_label(0), "starting", detail=self._shape.url)
        if self._shape.num_api_servers > 1:
            await self._server.start(None)
            self._acceptor.start()
        else:
            await self._server.start(self._listener)
        failure = await self._end
        forced = failure is not None and failure.immediate
        if failure is not None:
            self._supervisor.hurry(ROLE)  # their clients hear of it too, while there is somebody to tell them
        await self._server.close(forced=forced)
        await asyncio.to_thread(self._acceptor.close)
        self._supervisor.close(grace=0 if forced else _ENGINE_GRACE)
        return failure

    # --- what happens, on the event loop -------------------------------------------------------------------------

    def take_connection(self, connection: socket) -> None:
        """Serve a connection of the acceptor's."""
        self._server.take_connection(connection)

    def engine_changed(self, notice: EngineNotice) -> None:
        """Hear of an engine."""
        if isinstance(notice, EngineReady):
            backends = ", ".join(f"{kind} {name}" for kind, name in sorted(notice.backends.items()))
            logger.info("engine DP%d: %s", self._shape.first_rank + notice.engine, backends)
        self._server.engine_changed(notice)

    def server_ready(self) -> None:
        """Hear that another API server, or the coordinator, does its work."""
        self._announce()

    def gave_up(self, failure: Failure) -> None:
        """The deployment cannot go on."""
        if not self._end.done():
            self._end.set_result(failure)

    def _announce(self) -> None:
        """Say once that everything that belongs to the deployment does its work."""
        state = self._server.state
        ready = all(one is EngineState.READY for one in state.client.engine_states) and self._supervisor.complete
        if self._announced or not ready or state.unready_reason() is not None:
            return
        self._announced = True
        self._table.set(ROLE, self._shape.api_label(0), "running", detail=self._shape.url)
        self._server.settle()
        shapes = "; ".join(
            f"{ready.dtype} on {ready.device}, {ready.max_model_len} tokens a request, "
            f"{ready.kv_cache_tokens} tokens of KV cache"
            for ready in [link.ready for link in state.client.links]
            if ready is not None
        )
        seconds = time.monotonic() - self._started
        logger.info("ready in %.1f s: %s at %s (%s)", seconds, state.served_names[0], self._shape.url, shapes)
        if self._parent is not None:
            self._parent.report(json.dumps({"url": self._shape.url}).encode())

    # --- the end -------------------------------------------------------------------------------------------------

    def end_requested(self) -> None:
        """The first time drains, the second does not wait."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_requests())
        elif not self._end.done():
            self._end.set_result(_FORCED_EXIT)

    async def _drain_requests(self) -> None:
        timeout = self._config.timeouts.drain_timeout
        self._acceptor.remove_all()
        self._supervisor.stop_all(ROLE)
        self._table.set(ROLE, self._shape.api_label(0), "draining", detail=self._shape.url)
        self._server.state.start_draining()
        if self._server.num_active:
            logger.info(
                "draining: %d requests may take up to %g s (--drain-timeout); a second signal ends them now",
                self._server.num_active,
                timeout,
            )
        else:
            logger.info(SHUTTING_DOWN)
        others = asyncio.to_thread(partial(self._supervisor.wait, ROLE, timeout + _FLUSH_TIMEOUT))
        await asyncio.gather(self._server.drain(timeout), others)
        if not self._end.done():
            self._end.set_result(None)
