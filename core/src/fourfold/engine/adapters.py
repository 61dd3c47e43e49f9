"""Which LoRA adapters an engine has, in which slots of its workers. Knows no file and no request's content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fourfold.config.lora_config import LoraConfig
from fourfold.errors import ConfigError, RequestError


class AdapterClient(Protocol):
    """What this needs of ``fourfold.engine.executor_client.ExecutorClient``; each call is for all ranks."""

    def load_adapter(self, slot: int, folder: str) -> None:
        """Read an adapter into a slot, on all ranks or none; raises ConfigError."""

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot."""


class Adapters:
    """Names to slots, 1 and above. An adapter that is unloaded keeps its slot until its last request has ended."""

    def __init__(self, client: AdapterClient, config: LoraConfig) -> None:
        self._client = client
        self._config = config
        self._slots: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._free = list(range(config.max_loras, 0, -1))

    @property
    def are_leaving(self) -> bool:
        """Whether ``drop`` may have something to do."""
        return bool(self._leaving)

    def slot_of(self, name: str) -> int:
        """Raises RequestError with status 404 for a name that is not loaded."""
        slot = self._slots.get(name)
        if slot is None:
            raise RequestError(f"no LoRA adapter {name!r} is loaded", code="model_not_found", status=404)
        return slot

    def slot_to_finish(self, name: str, folder: str) -> int:
        """The slot for a request that began on another engine, unloaded meanwhile or not: where the adapter is not, it
        is loaded until that request has ended. Raises RequestError where it cannot be.
        """
        if name not in self._slots and name not in self._leaving:
            try:
                self.load(name, folder)
            except ConfigError as error:
                raise RequestError(f"the LoRA adapter cannot be loaded again: {error}", status=503) from error
            self.unload(name)
        return self._slots[name] if name in self._slots else self._leaving[name]

    def load(self, name: str, folder: str) -> None:
        """Load an adapter; nothing happens if that name is loaded.

        Raises RequestError where adapters are not enabled or no slot is free, ConfigError for one that does not fit.
        """
        if not self._config.enable_lora:
            raise RequestError("this engine takes no LoRA adapters; start it with --enable-lora")
        if name in self._slots:
            return
        if not self._free:
            raise RequestError(
                f"{self._config.max_loras} LoRA adapters are loaded; unload one first, or raise --max-loras"
            )
        slot = self._free[-1]
        self._client.load_adapter(slot, folder)
        self._slots[name] = self._free.pop()

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; nothing happens if it is not loaded."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._leaving[name] = slot

    def drop(self, in_use: Iterable[str]) -> None:
        """Empty the slots of unloaded adapters, but for those that requests still name."""
        named = set(in_use)
        for name, slot in list(self._leaving.items()):
            if name not in named:
                self._client.unload_adapter(slot)
                del self._leaving[name]
                self._free.append(slot)
