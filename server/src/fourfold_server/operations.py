"""What operators wish of all replicas at once: carried out where engines are up, noted for those that start later."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from fourfold.client.engine_client import EngineClient
from fourfold.contracts.load_balancer import EngineState
from fourfold.engine.operations import Call, check_mode, sleep_calls, update_calls, wake_calls
from fourfold.engine.sleep import check_level, check_tags
from fourfold.errors import EngineError, RequestError
from fourfold.models.adapter_file import adapter_folder
from fourfold.process_messages import RestartEngine
from fourfold.sleep_tags import TAGS, WEIGHTS
from fourfold.supervision.deployment_state import StateChange, WishedAdapter, changing_state

CallAll = Callable[[Sequence[Call]], Awaitable[None]]


class Operations:
    """One at a time in a deployment, whichever API server is asked.

    All raise RequestError: status 400 for what cannot be, 409 while another operation runs or an engine starts or
    drains, 503 when no engine is up; and EngineError for what fails on an engine.
    """

    def __init__(
        self, client: EngineClient, restart: Callable[[RestartEngine], None], *, timeout: float, bound: bool
    ) -> None:
        """``restart`` asks the supervisor to restart an engine; ``timeout``: seconds for each step of an operation on
        all engines; ``bound``: no engine steps without the others.
        """
        self._client = client
        self._restart = restart
        self._timeout = timeout
        self._bound = bound

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._client.call_all([("reset_prefix_cache", {})], timeout=self._timeout)

    async def pause(self, mode: str) -> None:
        """Bring all engines to a stop; ``mode`` is a ``PauseMode``: what becomes of requests that have begun."""
        check_mode(mode)
        with self._change() as (change, call_all):
            await _stop(("pause", {"mode": mode}), change, call_all)
            change.write(replace(change.state, paused=True))

    async def resume(self) -> None:
        """Let all engines go on; those that sleep do when they wake up."""
        with self._change() as (change, call_all):
            if awaited := self._awaited():
                raise RequestError(
                    f"engine {awaited[0]} sleeps, and the others cannot go on without it; "
                    "call wake_up or update_weights first",
                    status=409,
                )
            change.write(replace(change.state, paused=False))
            await call_all([("resume", {})])

    async def sleep(self, level: int) -> None:
        """Give memory back; running requests wait until all of it is there again."""
        check_level(level)
        with self._change() as (change, call_all):
            pause, *sleep = sleep_calls(level)
            await _stop(pause, change, call_all)
            change.write(replace(change.state, sleep_level=level, asleep=TAGS))
            await call_all(sleep)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take the memory named by ``tags`` again, all by default."""
        check_tags(tags)
        with self._change() as (change, call_all):
            pause, wake_up, resume = wake_calls(tags)
            await _stop(pause, change, call_all)
            await call_all([wake_up])
            asleep = tuple(tag for tag in change.state.asleep if tags and tag not in tags)
            change.write(replace(change.state, asleep=asleep))
            if not (change.state.paused or self._awaited()):
                await call_all([resume])

    async def update_weights(self, model: str) -> None:
        """Go on with the weights of another checkpoint of the model; nothing changes unless it fits on every rank."""
        with self._change() as (change, call_all):
            pause, *load, resume = update_calls(model)
            await call_all([("check_weights", {"model": model})])
            await _stop(pause, change, call_all)
            change.write(replace(change.state, weights=model))
            await call_all(load)
            change.write(replace(change.state, asleep=tuple(tag for tag in change.state.asleep if tag != WEIGHTS)))
            if not change.state.paused:
                await call_all([resume])

    async def load_adapter(self, name: str, folder: str, taken: Sequence[str]) -> None:
        """Let requests name a LoRA adapter, on all engines or none; ``taken`` are names that are not free for it."""
        with self._change() as (change, call_all):
            before = change.state
            if name in taken or any(adapter.name == name for adapter in before.adapters):
                raise RequestError(f"a model {name!r} is served already; choose another name", parameter="lora_name")
            adapter = wished_adapter(name, folder)
            try:
                # Engines first: a name that can be read is a name that requests may use.
                await call_all([("load_adapter", {"name": adapter.unique, "folder": adapter.folder})])
            except BaseException:
                await call_all([("unload_adapter", {"name": adapter.unique})])
                raise
            change.write(replace(before, adapters=(*before.adapters, adapter)))

    async def unload_adapter(self, name: str) -> None:
        """Let no more requests name a LoRA adapter; those that do are finished."""
        with self._change() as (change, call_all):
            adapters = change.state.adapters
            found = next((adapter for adapter in adapters if adapter.name == name), None)
            if found is None:
                raise RequestError(f"no LoRA adapter {name!r} is loaded", parameter="lora_name", status=404)
            change.write(replace(change.state, adapters=tuple(one for one in adapters if one is not found)))
            await call_all([("unload_adapter", {"name": found.unique})])

    def _awaited(self) -> list[int]:
        """Engines that sleep alone, since they could not read weights, while others would wait for them in a step."""
        states = self._client.engine_states if self._bound else []
        asleep = [engine for engine, state in enumerate(states) if state is EngineState.ASLEEP]
        return asleep if len(asleep) < len(states) else []

    @contextlib.contextmanager
    def _change(self) -> Iterator[tuple[StateChange, CallAll]]:
        """The right to change the state, and calls of all engines that are up now.

        Others may have read the state before it changed: they are started anew, at once.
        """
        with changing_state(self._client.run_directory) as change:
            before, engines = change.state, self._client.engines_up()
            try:
                yield change, partial(self._client.call_all, timeout=self._timeout, engines=engines)
            finally:
                if change.state != before:
                    for engine in self._client.engines_missed(engines):
                        self._restart(RestartEngine(engine=engine, now=True))


async def _stop(pause: Call, change: StateChange, call_all: CallAll) -> None:
    """All engines, or none: those that have stopped go on where others cannot."""
    try:
        await call_all([pause])
    except BaseException:
        if not change.state.paused:
            with contextlib.suppress(EngineError, RequestError):  # the first failure is what counts
                await call_all([("resume", {})])
        raise


def wished_adapter(name: str, folder: str) -> WishedAdapter:
    """An adapter that is to be loaded."""
    unique = f"{name}#{secrets.token_hex(8)}"
    return WishedAdapter(name=name, folder=str(adapter_folder(folder)), unique=unique)
