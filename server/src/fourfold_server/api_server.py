"""One API server: HTTP on an event loop, and the way to all engines. Does not know who starts engines or ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

import uvicorn

from fourfold.blame import blame
from fourfold.client.engine_client import EngineClient
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import plan_nodes
from fourfold.entries import LoadBalancerContext
from fourfold.errors import ConfigError, PluginError
from fourfold.plugins import PluginRegistry
from fourfold.process_messages import EngineNotice, RestartEngine
from fourfold.selection import select
from fourfold.text.served_model import ServedModel, load_served_model
from fourfold_server.app import create_app
from fourfold_server.config import ServerConfig
from fourfold_server.drain import ActiveRequests
from fourfold_server.http_protocol import HttpProtocol
from fourfold_server.loop_listener import call_on_loop
from fourfold_server.metrics import shared_metrics_folder
from fourfold_server.state import ServerState
from fourfold_server.supervised_process import Failure
from fourfold_server.topology import read_topology

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
_FLUSH_TIMEOUT = 2.0
"""Seconds for answers that were given an error to reach their clients."""
_LOOK_EVERY = 0.5
"""Seconds of a drain between looks at whether the replicas have come to rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiServerContext:
    """What one API server is built from."""

    config: EngineConfig
    server_config: ServerConfig
    registry: PluginRegistry
    run_directory: Path
    index: int
    num_api_servers: int
    restart_engine: Callable[[RestartEngine], None]
    """Asks the supervisor to restart a replica."""


class ApiServer:
    """Belongs to the event loop that it is built on."""

    def __init__(self, context: ApiServerContext, *, on_change: Callable[[], None], failed: Callable[[Failure], None]):
        """``on_change`` hears, on the loop, that ``state`` may have become ready; ``failed`` why it cannot go on."""
        config = context.config
        self._context = context
        self._on_change = on_change
        self._failed = failed
        plan = plan_nodes(config)
        num_engines = plan.num_engines
        block_size = config.cache.block_size
        balancer = select("load balancer", context.registry.load_balancers(), config.backends.load_balancer, config)
        balancer_context = LoadBalancerContext(
            num_engines=num_engines,
            num_servers=context.num_api_servers,
            seed=context.index,
            block_size=block_size,
        )
        with blame(f"load balancer {balancer.entry.name!r}"):
            built = balancer.entry.build(balancer_context)
        self.client = EngineClient(
            context.run_directory,
            context.index,
            num_engines,
            built,
            block_size=block_size,
            coordinated=num_engines > 1,
            first_rank=plan.first_rank,
        )
        self.state = ServerState(
            config=context.server_config,
            client=self.client,
            served_names=config.model.served_names,
            topology=partial(read_topology, context.run_directory, config.parallel, self.client),
            restart_engine=context.restart_engine,
            shared_metrics=shared_metrics_folder(),
            bound=config.parallel.lockstep,
            operation_timeout=config.timeouts.startup_timeout,
            stall_timeout=config.timeouts.stall_timeout,
        )
        self._requests = ActiveRequests(create_app(self.state, context.registry.routes()))
        self._http = _HttpServer(_http_config(self._requests, context.server_config))
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_active(self) -> int:
        """HTTP requests that are being answered."""
        return len(self._requests)

    async def start(self, listener: socket | None) -> None:
        """Listen to engines, load the text side, serve HTTP; ``listener`` None: on connections that are handed over."""
        await self.client.start()
        loop = asyncio.get_running_loop()
        # A thread that nothing waits for: a signal during a long conversion must end the process.
        threading.Thread(target=self._load_model, args=(loop,), name="load-model", daemon=True).start()
        self._serving = asyncio.create_task(self._http.serve(sockets=[] if listener is None else [listener]))
        self._serving.add_done_callback(self._http_ended)
        while not (self._http.started or self._serving.done()):
            await asyncio.sleep(0)  # a connection that came before would be hung up on

    def take_connection(self, connection: socket) -> None:
        """Serve a connection that somebody else accepted."""
        self._http.take_connection(connection)

    def engine_changed(self, notice: EngineNotice) -> None:
        """Hear of an engine."""
        self.client.hear(notice)
        self._on_change()

    def settle(self) -> None:
        """What lives now lives for good: the collector need not look at it again between two tokens."""
        gc.collect()
        gc.freeze()

    async def drain(self, timeout: float) -> None:
        """Take no new requests, and end those that have not ended after ``timeout`` seconds with an error; all of them
        at once while the replicas sleep or pause, as none can end by itself then.
        """
        self.state.start_draining()
        deadline = time.monotonic() + timeout
        left, remaining = len(self._requests), timeout
        while left and remaining and not self.state.at_rest:
            remaining = max(0.0, deadline - time.monotonic())
            left = await self._requests.wait(min(remaining, _LOOK_EVERY))
        if left:
            why = "as the replicas are at rest" if self.state.at_rest else f"by --drain-timeout ({timeout:g} s)"
            logger.warning("%d requests are ended %s", left, why)
            self.client.fail_all(SHUTTING_DOWN)

    async def close(self, *, forced: bool = False) -> None:
        """End HTTP, each part within its deadline, and what is left of requests with an error; ``forced`` waits for no
        answer.
        """
        self.state.start_draining()
        if not forced:
            self.client.fail_all(SHUTTING_DOWN)
            await self._requests.wait(_FLUSH_TIMEOUT)
        self.client.close()
        self._http.should_exit = True
        self._http.force_exit = forced
        if forced:  # it logs the traceback of every task that is cut off, and all of them are
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=0.5 if forced else 2 * _FLUSH_TIMEOUT)
        if not forced:
            self.state.close()

    def _load_model(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            model = load_served_model(self._context.config, self._context.registry)
        except (ConfigError, PluginError) as error:
            call_on_loop(loop, partial(self._failed, Failure(message=str(error), status=2)))
        except Exception as error:
            logger.exception("the model cannot be loaded")
            failure = Failure(message=f"the model cannot be loaded: {type(error).__name__}: {error}", status=1)
            call_on_loop(loop, partial(self._failed, failure))
        else:
            call_on_loop(loop, partial(self._model_loaded, model))

    def _model_loaded(self, model: ServedModel) -> None:
        self.state.model = model
        self._on_change()

    def _http_ended(self, serving: asyncio.Task[None]) -> None:
        error = None if serving.cancelled() else serving.exception()
        message = f"the HTTP server ended: {error}" if error else "the HTTP server ended"
        self._failed(Failure(message=message, status=1))


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: who ends this process is not its to decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def take_connection(self, connection: socket) -> None:
        """Serve a connection as if it had been accepted here."""
        if not self.started or self.should_exit:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    async def _connect(self, connection: socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self.config.ssl
            )
        except OSError as error:  # hung up already, or no TLS
            logger.debug("a connection ended before it began: %s", error)
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        return HttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


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
