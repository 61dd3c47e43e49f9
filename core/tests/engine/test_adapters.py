"""LoRA adapters of a core: who may name one, whose blocks are whose, and when a slot is free again."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.config.lora_config import LoraConfig
from fourfold.engine.adapters import Adapters
from fourfold.engine.prefix_cache import prompt_marks, root_digest
from fourfold.errors import CheckpointError, RequestError


class Client:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def load_adapter(self, slot: int, folder: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("load", slot, folder))

    def unload_adapter(self, slot: int) -> None:
        self.calls.append(("unload", slot))


def test_a_slot_is_free_again_when_its_last_request_has_ended() -> None:
    client = Client()
    adapters = Adapters(client, LoraConfig(enable_lora=True, max_loras=2))
    for name in ("a", "b", "a"):
        adapters.load(name, f"/{name}")
    assert client.calls == [("load", 1, "/a"), ("load", 2, "/b")]
    with pytest.raises(RequestError, match="2 LoRA adapters are loaded; unload one first, or raise --max-loras"):
        adapters.load("c", "/c")
    adapters.unload("a")
    adapters.unload("unknown")
    with pytest.raises(RequestError, match="no LoRA adapter 'a' is loaded") as unknown:
        adapters.slot_of("a")
    assert unknown.value.status == 404
    adapters.drop(["a", "b"])
    assert adapters.are_leaving
    adapters.drop(["b"])
    assert not adapters.are_leaving
    adapters.load("c", "/c")
    assert client.calls[2:] == [("unload", 1), ("load", 1, "/c")]
    assert (adapters.slot_of("b"), adapters.slot_of("c")) == (2, 1)


def test_a_request_that_another_engine_began_is_finished_with_an_adapter_that_was_unloaded() -> None:
    client = Client()
    adapters = Adapters(client, LoraConfig(enable_lora=True, max_loras=2))
    adapters.load("a", "/a")
    assert adapters.slot_to_finish("a", "/a") == 1
    adapters.unload("a")
    assert adapters.slot_to_finish("a", "/a") == 1, "a request here names it still"
    adapters.drop([])
    assert adapters.slot_to_finish("a", "/a") == 1
    assert client.calls == [("load", 1, "/a"), ("unload", 1), ("load", 1, "/a")]
    with pytest.raises(RequestError, match="no LoRA adapter 'a' is loaded"):
        adapters.slot_of("a")
    adapters.drop([])
    assert client.calls[3:] == [("unload", 1)]


def test_a_core_goes_on_with_an_adapter_that_was_unloaded(toy_engine: Any) -> None:
    engine = toy_engine(lora=LoraConfig(enable_lora=True))
    _, refusal = engine.try_add([3] * 4, adapter="x")
    assert refusal is not None
    name = engine.add([3] * 4, output=[5, 6], adapter="x")
    engine.run()
    assert engine.finish_reason(name) is not None
    assert not engine.core._adapters.are_leaving


def test_what_cannot_be_loaded_takes_no_slot() -> None:
    client = Client()
    adapters = Adapters(client, LoraConfig(enable_lora=True, max_loras=1))
    client.error = CheckpointError("of another model")
    with pytest.raises(CheckpointError):
        adapters.load("a", "/a")
    client.error = None
    adapters.load("b", "/b")
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        Adapters(client, LoraConfig()).load("a", "/a")


@pytest.mark.parametrize("depth", [1, 3])
def test_equal_prompts_share_no_blocks_across_adapters(toy_engine: Any, depth: int) -> None:
    engine = toy_engine(depth=depth, lora=LoraConfig(enable_lora=True))
    engine.core.load_adapter("x", "/x")
    names = []
    for _ in range(2):
        for adapter in (
            "",
            "x",
        ):  # the toy worker's cells know the salt behind the @, which stands for the adapter here
            names.append(engine.add([3] * 40, request_id=f"{len(names)}@{adapter}", adapter=adapter))
            engine.run()
    slots = {new.request_id: new.adapter for message in engine.client.messages for new in message.new}
    assert slots == {"0@": 0, "1@x": 1, "2@": 0, "3@x": 1}
    assert [engine.outputs[name][0].num_cached_tokens for name in names] == [0, 0, 32, 32]
    _, refusal = engine.try_add([3] * 4, adapter="y")
    assert (refusal.error_status, refusal.error) == (404, "no LoRA adapter 'y' is loaded")


def test_requests_outlive_the_unloading_of_their_adapter(toy_engine: Any) -> None:
    engine = toy_engine(depth=2, lora=LoraConfig(enable_lora=True))
    engine.core.load_adapter("x", "/x")
    name = engine.add([3] * 4, max_tokens=12, adapter="x")
    engine.step()
    engine.core.unload_adapter("x")
    assert engine.try_add([3] * 4, adapter="x")[1].error_status == 404
    assert engine.client.operations == ["load_adapter 1 /x"]
    engine.run()
    engine.check_finished(name)
    engine.core.load_adapter("z", "/z")
    assert engine.client.operations == ["load_adapter 1 /x", "unload_adapter 1", "load_adapter 1 /z"]


def test_no_salt_is_an_adapters() -> None:
    roots = [root_digest(salt, adapter) for salt in ("", "a", "ab") for adapter in ("", "a", "b", "ab" * 99)]
    assert len(set(roots)) == len(roots)
    marks = [prompt_marks([1] * 40, 16, "", adapter).tolist() for adapter in ("", "a")]
    assert not set(marks[0]) & set(marks[1])
