"""What operators wish of all replicas at once: carried out where engines are up, noted for those that start later."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from fourfold.checkpoints.adapter_file import adapter_folder
from fourfold.client.engine_client import EngineClient
from fourfold.engine.operations import Call, check_mode, sleep_calls, update_calls, wake_calls
from fourfold.engine.sleep import check_level, check_tags
from fourfold.errors import EngineError, RequestError
from fourfold.sleep_tags import TAGS, WEIGHTS
from fourfold.supervision.deployment_state import StateChange, WishedAdapter, changing_state


class Operations:
    """One at a time in a deployment, whichever API server is asked.

    All raise RequestError: status 400 for what cannot be, 409 while another operation runs or an engine starts, 503
    when no engine is up; and EngineError for what fails on an engine.
    """

    def __init__(self, client: EngineClient, *, timeout: float) -> None:
        """``timeout``: seconds for each step of an operation on all engines."""
        self._client = client
        self._timeout = timeout

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._client.call_all([("reset_prefix_cache", {})], timeout=self._timeout)

    async def pause(self, mode: str) -> None:
        """Bring all engines to a stop; ``mode`` is a ``PauseMode``: what becomes of requests that have begun."""
        check_mode(mode)
        with changing_state(self._client.run_directory) as change:
            await self._stop(("pause", {"mode": mode}), change)
            change.write(replace(change.state, paused=True))

    async def resume(self) -> None:
        """Let all engines go on; those that sleep do when they wake up."""
        with changing_state(self._client.run_directory) as change:
            change.write(replace(change.state, paused=False))
            await self._client.call_all([("resume", {})], timeout=self._timeout)

    async def sleep(self, level: int) -> None:
        """Give memory back; running requests wait until all of it is there again."""
        check_level(level)
        with changing_state(self._client.run_directory) as change:
            pause, *sleep = sleep_calls(level)
            await self._stop(pause, change)
            change.write(replace(change.state, sleep_level=level, asleep=TAGS))
            await self._client.call_all(sleep, timeout=self._timeout)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take the memory named by ``tags`` again, all by default."""
        check_tags(tags)
        with changing_state(self._client.run_directory) as change:
            wake_up, resume = wake_calls(tags)
            await self._client.call_all([wake_up], timeout=self._timeout)
            asleep = tuple(tag for tag in change.state.asleep if tags and tag not in tags)
            change.write(replace(change.state, asleep=asleep))
            if not change.state.paused:
                await self._client.call_all([resume], timeout=self._timeout)

    async def update_weights(self, model: str) -> None:
        """Go on with the weights of another checkpoint of the model; nothing changes unless it fits on every rank."""
        with changing_state(self._client.run_directory) as change:
            pause, *load, resume = update_calls(model)
            await self._client.call_all([("check_weights", {"model": model})], timeout=self._timeout)
            await self._stop(pause, change)
            change.write(replace(change.state, weights=model))
            await self._client.call_all(load, timeout=self._timeout)
            change.write(replace(change.state, asleep=tuple(tag for tag in change.state.asleep if tag != WEIGHTS)))
            if not change.state.paused:
                await self._client.call_all([resume], timeout=self._timeout)

    async def _stop(self, pause: Call, change: StateChange) -> None:
        """All engines, or none: those that have stopped go on where others cannot."""
        try:
            await self._client.call_all([pause], timeout=self._timeout)
        except BaseException:
            if not change.state.paused:
                with contextlib.suppress(EngineError, RequestError):  # the first failure is what counts
                    await self._client.call_all([("resume", {})], timeout=self._timeout)
            raise

    async def load_adapter(self, name: str, folder: str, taken: Sequence[str]) -> None:
        """Let requests name a LoRA adapter, on all engines or none; ``taken`` are names that are not free for it."""
        with changing_state(self._client.run_directory) as change:
            before = change.state
            if name in taken or any(adapter.name == name for adapter in before.adapters):
                raise RequestError(f"a model {name!r} is served already; choose another name", parameter="lora_name")
            adapter = wished_adapter(name, folder)
            self._client.check_all_up()
            try:
                # Engines first: a name that can be read is a name that requests may use.
                load = ("load_adapter", {"name": adapter.unique, "folder": adapter.folder})
                await self._client.call_all([load], timeout=self._timeout)
            except BaseException:
                await self._client.call_all([("unload_adapter", {"name": adapter.unique})], timeout=self._timeout)
                raise
            change.write(replace(before, adapters=(*before.adapters, adapter)))

    async def unload_adapter(self, name: str) -> None:
        """Let no more requests name a LoRA adapter; those that do are finished."""
        with changing_state(self._client.run_directory) as change:
            adapters = change.state.adapters
            found = next((adapter for adapter in adapters if adapter.name == name), None)
            if found is None:
                raise RequestError(f"no LoRA adapter {name!r} is loaded", parameter="lora_name", status=404)
            change.write(replace(change.state, adapters=tuple(one for one in adapters if one is not found)))
            await self._client.call_all([("unload_adapter", {"name": found.unique})], timeout=self._timeout)


def wished_adapter(name: str, folder: str) -> WishedAdapter:
    """An adapter that is to be loaded."""
    unique = f"{name}#{secrets.token_hex(8)}"
    return WishedAdapter(name=name, folder=str(adapter_folder(folder)), unique=unique)
