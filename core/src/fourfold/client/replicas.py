"""Several engines in processes of their own, used by one thread as if they were one core. Knows no HTTP and no text.

The same client as in an API server talks to them, on an event loop in a thread, so that a request outlives its engine.
Engines that die are not started again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import TypeVar

import msgspec

from fourfold.blame import blame
from fourfold.client.engine_client import EngineClient
from fourfold.config.engine_config import EngineConfig
from fourfold.config.transport import encode_config
from fourfold.engine.operations import Call
from fourfold.entries import LoadBalancerContext
from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RequestError, RpcTimeout
from fourfold.messages import AddRequest, EngineFailed, EngineReady, FinishReason, RequestOutput
from fourfold.plugins import PluginRegistry
from fourfold.process_messages import EngineDead, EngineStarting, ProcessReport
from fourfold.selection import select
from fourfold.shared_memory import SharedMemory
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import CONFIG_FILE, RunDirectory

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_CALL_TIMEOUT = 60.0
"""Seconds for the event loop to run a call, which takes microseconds."""
_GRACE = 5.0
"""Seconds for engines to end by themselves."""
_INCARNATION = 1


class Replicas:
    """``add``, ``step``, ``abort`` and ``shutdown`` are those of an engine core; one thread calls them."""

    def __init__(self, config: EngineConfig, registry: PluginRegistry) -> None:
        """Start all engines and wait until each is ready.

        Raises ConfigError for what an engine refuses, ExecutorFailed for one that ends before it is ready, and
        RpcTimeout past --startup-timeout; no process is left then.
        """
        self._lockstep = config.parallel.lockstep
        self._bound: list[ChildProcess] = []
        """Processes of which none can go on without the others."""
        self._closing = False
        self._num_engines = config.parallel.data_parallel_size
        self._timeout = config.timeouts.rpc_timeout
        self._words: dict[int, EngineFailed] = {}
        self._dead: dict[int, str] = {}
        self._ready: dict[int, Future[EngineReady]] = {engine: Future() for engine in range(self._num_engines)}
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._run_directory = RunDirectory.create()
        self._run_directory.write_file(CONFIG_FILE, encode_config(config))
        self._memory = SharedMemory()
        self._children = ChildSupervisor()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._build_client(config, registry)
            self.ready = self._start(config.timeouts.startup_timeout)
        except BaseException:
            self.shutdown()
            raise

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Send a request to one of the engines. Returns its only output if none takes it."""
        try:
            self._call(partial(self._client.open, request, self._outputs.put))
        except RequestError as error:
            return RequestOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=str(error),
                error_status=error.status,
            )
        return None

    def step(self) -> dict[int, list[RequestOutput]]:
        """Wait for outputs and return what there is, as an engine core would. Raises RpcTimeout."""
        try:
            outputs = [self._outputs.get(timeout=self._timeout)]
        except queue.Empty as error:
            raise RpcTimeout("an output", self._timeout, range(self._num_engines)) from error
        while not self._outputs.empty():
            outputs.append(self._outputs.get())
        return {0: outputs}

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without another output; what was on its way is dropped."""
        ended = set(request_ids)
        self._call(partial(self._client.abort, ended))
        kept = []
        while not self._outputs.empty():
            kept.append(self._outputs.get())
        for output in kept:
            if output.request_id not in ended:
                self._outputs.put(output)

    def operate(self, calls: Sequence[Call], *, timeout: float) -> None:
        """See ``EngineClient.call_all``; engines that have died are passed over."""
        calling = asyncio.run_coroutine_threadsafe(self._client.call_all(calls, timeout=timeout), self._loop)
        calling.result(len(calls) * (timeout + _GRACE))  # the client's own deadline comes first

    def shutdown(self) -> None:
        """End all engines; idempotent, from any half-built state."""
        self._closing = True
        self._children.close(grace=_GRACE, terminate=0)
        if self._thread.is_alive():
            if hasattr(self, "_client"):
                self._call(self._client.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_TIMEOUT)
            self._loop.close()
        self._memory.close()
        self._run_directory.close()

    def _build_client(self, config: EngineConfig, registry: PluginRegistry) -> EngineClient:
        balancer = select("load balancer", registry.load_balancers(), config.backends.load_balancer, config)
        block_size = config.cache.block_size
        context = LoadBalancerContext(num_engines=self._num_engines, block_size=block_size)
        with blame(f"load balancer {balancer.entry.name!r}"):
            built = balancer.entry.build(context)
        client = EngineClient(self._run_directory.path, 0, self._num_engines, built, block_size=block_size)
        asyncio.run_coroutine_threadsafe(client.start(), self._loop).result(_CALL_TIMEOUT)
        return client

    def _start(self, timeout: float) -> EngineReady:
        """Start every engine; returns what the one with the shortest context says of itself."""
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        common = ["--num-api-servers", "1", "--log-level", level]
        together: list[str] = []
        if self._lockstep:
            together = ["--coordinated", "--meeting", f"file://{self._run_directory.path}/meeting"]
            arguments = [str(self._run_directory.path), "--num-engines", str(self._num_engines), *common]
            command = ChildCommand(module="fourfold.coordinator.process", label="coordinator", arguments=arguments)
            self._bound.append(self._children.start(command, on_exit=self._end_bound))
        for engine in range(self._num_engines):
            self._call(partial(self._client.hear, EngineStarting(engine=engine, incarnation=_INCARNATION)))
            arguments = [str(self._run_directory.path), "--engine", str(engine), "--dp-rank", str(engine)]
            arguments += ["--incarnation", str(_INCARNATION), *common, *together]
            child = self._children.start(
                ChildCommand(
                    module="fourfold.engine.process",
                    label=f"engine_core DP{engine}",
                    arguments=arguments,
                    environment=self._memory.environment,
                ),
                on_report=partial(self._hear, engine),
                on_exit=partial(self._mourn, engine),
            )
            if self._lockstep:
                self._bound.append(child)
        done, waited_for = wait(self._ready.values(), timeout, return_when=FIRST_EXCEPTION)
        for future in sorted(done, key=lambda one: not isinstance(one.exception(), ConfigError)):
            future.result()  # raises what failed, and best what the user can change
        if waited_for:
            missing = [engine for engine, future in self._ready.items() if future in waited_for]
            raise RpcTimeout("start", timeout, missing)
        return min((future.result() for future in done), key=lambda ready: ready.max_model_len)

    # --- on the thread of the child supervisor -----------------------------------------------------------------------

    def _hear(self, engine: int, child: ChildProcess, report: bytes) -> None:
        message = msgspec.msgpack.decode(report, type=ProcessReport)
        if isinstance(message, EngineReady):
            self._loop.call_soon_threadsafe(self._note_ready, message)
        elif isinstance(message, EngineFailed):
            self._words[engine] = message
            self._loop.call_soon_threadsafe(self._note_dead, engine, message.message)

    def _mourn(self, engine: int, child: ChildProcess, how: ChildExit) -> None:
        self._loop.call_soon_threadsafe(self._note_dead, engine, f"{child.label} {how}")
        self._end_bound(child, how)

    def _end_bound(self, child: ChildProcess, how: ChildExit) -> None:
        """What shares experts with an engine that is no more would wait for it."""
        others, self._bound = self._bound, []
        for other in others:
            if other.exit is None and not self._closing:
                other.kill(f"cannot go on without {child.label}, which {how}")

    # --- on the event loop --------------------------------------------------------------------------------------------

    def _note_ready(self, ready: EngineReady) -> None:
        self._client.hear(ready)
        self._ready[ready.engine].set_result(ready)

    def _note_dead(self, engine: int, reason: str) -> None:
        if engine in self._dead:
            return
        self._dead[engine] = reason
        future = self._ready[engine]
        if not future.done():
            word = self._words.get(engine)
            future.set_exception(ConfigError(reason) if word is not None and word.refused else ExecutorFailed(reason))
            return
        self._client.hear(EngineDead(engine=engine, incarnation=_INCARNATION, reason=reason))
        if len(self._dead) == self._num_engines:
            self._client.fail_all(f"all engines have failed; the last one, engine {engine}: {reason}")

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` on the event loop and return what it returns or raises."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(_CALL_TIMEOUT)
        except RuntimeError as error:
            raise EngineError("the replicas are closed") from error
