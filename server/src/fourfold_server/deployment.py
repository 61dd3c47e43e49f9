"""One running deployment: the HTTP server on the event loop, the engines behind it, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from socket import socket

import uvicorn

from fourfold.client.engine_client import EngineClient
from fourfold.client.engine_link import EngineState
from fourfold.config.engine_config import EngineConfig
from fourfold.entries import LoadBalancerContext
from fourfold.errors import ConfigError, PluginError
from fourfold.messages import EngineReady
from fourfold.plugins import PluginRegistry
from fourfold.selection import select
from fourfold.supervision.parent_watch import ParentLink
from fourfold.supervision.run_directory import RunDirectory
from fourfold.text.served_model import ServedModel, load_served_model
from fourfold_server.app import create_app
from fourfold_server.config import ServerConfig
from fourfold_server.drain import ActiveRequests
from fourfold_server.http_protocol import HttpProtocol
from fourfold_server.listening_socket import url_of
from fourfold_server.loop_listener import call_on_loop
from fourfold_server.process_table import ProcessTable
from fourfold_server.state import ServerState
from fourfold_server.supervisor import EngineSupervisor, Failure

logger = logging.getLogger(__name__)

ROLE = "api_server"
SHUTTING_DOWN = "the server is shutting down"
_FLUSH_TIMEOUT = 2.0
"""Seconds for answers that were given an error to reach their clients."""
_ENGINE_GRACE = 5.0
_FORCED_EXIT = Failure(message="ended by a second signal before all requests were answered", status=1, immediate=True)


class Deployment:
    """Runs in the process that `fourfold serve` started, which is API server 0."""

    def __init__(
        self,
        config: EngineConfig,
        server_config: ServerConfig,
        registry: PluginRegistry,
        listener: socket,
        run_directory: RunDirectory,
        *,
        table: ProcessTable,
        supervisor: EngineSupervisor,
        parent: ParentLink | None,
        started: float,
    ) -> None:
        """``supervisor`` may have started; what it says is heard once ``run`` waits. ``started``: monotonic time."""
        self._config = config
        self._registry = registry
        self._listener = listener
        self._table = table
        self._supervisor = supervisor
        self._parent = parent
        self._started = started
        self._url = url_of(listener, secure=server_config.ssl_certfile is not None)
        num_engines = config.parallel.data_parallel_size
        balancers = registry.load_balancers()
        balancer = select("load balancer", balancers, config.backends.load_balancer, config)
        self._client = EngineClient(
            run_directory.path, 0, num_engines, balancer.entry.build(LoadBalancerContext(num_engines=num_engines))
        )
        self._state = ServerState(
            config=server_config,
            client=self._client,
            served_names=config.model.served_names,
            topology=table.topology,
            stall_timeout=config.timeouts.stall_timeout,
        )
        self._requests = ActiveRequests(create_app(self._state, registry.routes()))
        self._http = _HttpServer(_http_config(self._requests, server_config))
        self._end: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        """What the deployment ends with; None is a clean end."""
        self._announced = False
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> Failure | None:
        """Serve until a signal or a failure; returns the failure. No engine is left."""
        await self._client.start()
        self._table.set(ROLE, "", "starting", detail=self._url)
        loop = asyncio.get_running_loop()
        # A thread that nothing waits for: a signal during a long conversion must end the process.
        threading.Thread(target=self._load_model, args=(loop,), name="load-model", daemon=True).start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        serving.add_done_callback(self._http_ended)
        failure = await self._end
        await self._close(serving, forced=failure is not None and failure.immediate)
        return failure

    # --- what happens, on the event loop -------------------------------------------------------------------------

    def engine_starting(self, engine: int, incarnation: int) -> None:
        """As ``EngineListener`` says."""
        self._client.set_incarnation(engine, incarnation)

    def engine_ready(self, ready: EngineReady) -> None:
        """As ``EngineListener`` says."""
        self._client.mark_ready(ready)
        backends = ", ".join(f"{kind} {name}" for kind, name in sorted(ready.backends.items()))
        logger.info("engine DP%d: %s", ready.engine, backends)
        self._announce()

    def engine_dead(self, engine: int, reason: str) -> None:
        """As ``EngineListener`` says."""
        self._client.mark_dead(engine, reason)

    def gave_up(self, failure: Failure) -> None:
        """As ``EngineListener`` says; also for a model that cannot be loaded."""
        if not self._end.done():
            self._end.set_result(failure)

    def model_loaded(self, model: ServedModel) -> None:
        """The text side is ready."""
        self._state.model = model
        self._announce()

    def _announce(self) -> None:
        """Say once that requests are taken."""
        if self._announced or self._state.unready_reason() is not None:
            return
        self._announced = True
        self._table.set(ROLE, "", "running", detail=self._url)
        # What lives now lives for good: the collector need not look at it again between two tokens.
        gc.collect()
        gc.freeze()
        links = [link.ready for link in self._client.links if link.state is EngineState.READY]
        shapes = "; ".join(
            f"{ready.dtype} on {ready.device}, {ready.max_model_len} tokens a request, "
            f"{ready.kv_cache_tokens} tokens of KV cache"
            for ready in links
            if ready is not None
        )
        seconds = time.monotonic() - self._started
        logger.info("ready after %.1f s: %s at %s (%s)", seconds, self._state.served_names[0], self._url, shapes)
        if self._parent is not None:
            self._parent.report(json.dumps({"url": self._url}).encode())

    def _load_model(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            model = load_served_model(self._config, self._registry)
        except (ConfigError, PluginError) as error:
            call_on_loop(loop, partial(self.gave_up, Failure(message=str(error), status=2)))
        except Exception as error:
            logger.exception("the model cannot be loaded")
            failure = Failure(message=f"the model cannot be loaded: {type(error).__name__}: {error}", status=1)
            call_on_loop(loop, partial(self.gave_up, failure))
        else:
            call_on_loop(loop, partial(self.model_loaded, model))

    # --- the end -------------------------------------------------------------------------------------------------

    def end_requested(self) -> None:
        """The first time drains, the second does not wait."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_requests())
        elif not self._end.done():
            self._end.set_result(_FORCED_EXIT)

    async def _drain_requests(self) -> None:
        timeout = self._config.timeouts.drain_timeout
        self._state.start_draining()
        self._table.set(ROLE, "", "draining", detail=self._url)
        if len(self._requests):
            logger.info(
                "draining: %d requests may take up to %g s (--drain-timeout); a second signal ends them now",
                len(self._requests),
                timeout,
            )
        else:
            logger.info(SHUTTING_DOWN)
        left = await self._requests.wait(timeout)
        if left:
            logger.warning("%d requests are ended by --drain-timeout (%g s)", left, timeout)
            self._client.fail_all(SHUTTING_DOWN)
        if not self._end.done():
            self._end.set_result(None)

    def _http_ended(self, serving: asyncio.Task[None]) -> None:
        if not self._end.done():
            error = None if serving.cancelled() else serving.exception()
            message = f"the HTTP server ended: {error}" if error else "the HTTP server ended"
            self._end.set_result(Failure(message=message, status=1))

    async def _close(self, serving: asyncio.Task[None], *, forced: bool) -> None:
        """End HTTP, then the engines, each within its deadline."""
        self._state.start_draining()
        if not forced:
            await self._requests.wait(_FLUSH_TIMEOUT)
        self._client.close()
        self._http.should_exit = True
        self._http.force_exit = forced
        if forced:  # it logs the traceback of every task that is cut off, and all of them are
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await asyncio.wait({serving}, timeout=0.5 if forced else 2 * _FLUSH_TIMEOUT)
        self._supervisor.close(grace=0 if forced else _ENGINE_GRACE)
        if not forced:
            self._state.close()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who ends this process is the deployment's to decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _http_config(app: ActiveRequests, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        loop="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
