from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.contracts.step_part import StepVote
from fourfold.entries import WorkerContext
from fourfold.layout import ParallelLayout
from fourfold.models.decoder import Decoder
from fourfold.models.description import ModelDescription
from fourfold.models.loading import load_model
from fourfold.models.stage_partition import Stage, partition
from fourfold.plugins import load_plugins
from fourfold.worker.device import CpuDevice
from fourfold.worker.model_runner import ALONE
from fourfold.worker.stage_timing import REPETITIONS, time_parts

GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 60000,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 32,
    "max_position_embeddings": 512,
}
"""With a vocabulary so large that the head must cost more than a layer, and windows on every other layer."""
CPU = CpuDevice(dtype=torch.float32)


class Part:
    """A step part that says in which order it is called."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        self._calls.append(f"begin {num_tokens}")
        return vote

    def take_turns(self, num_tokens: int) -> None:
        self._calls.append(f"layers of {num_tokens}")

    def close(self) -> None:
        self._calls.append("close")


def loader(folder: Path) -> tuple[ModelDescription, Callable[[Stage], Decoder]]:
    (folder / "config.json").write_text(json.dumps(GEMMA))
    registry = load_plugins()
    engine_config = EngineConfig(model=ModelConfig(model=str(folder), load_format="dummy"))
    checkpoint = resolve_checkpoint(engine_config.model, registry, NoProgress())

    def load(stage: Stage) -> Decoder:
        return load_model(
            WorkerContext(config=engine_config, layout=ParallelLayout(), rank=0),
            registry,
            checkpoint,
            device=CPU.torch_device,
            dtype=CPU.dtype,
            progress=NoProgress(),
            stage=stage,
        )

    return checkpoint.description, load


def test_one_layer_of_each_kind_is_timed(tmp_path: Path) -> None:
    description, load = loader(tmp_path)
    loaded: list[Stage] = []

    def noted(stage: Stage) -> Decoder:
        loaded.append(stage)
        return load(stage)

    costs = time_parts(description, CPU, noted, num_requests=16, group=ALONE.tp)
    assert [(list(stage.layers), stage.is_first, stage.is_last) for stage in loaded] == [
        ([0], True, True),
        ([1], False, False),
    ]
    assert costs.layers == costs.layers[:2] * 3
    assert all(seconds > 0 for seconds in (*costs.layers, costs.first, costs.last))
    assert partition(costs, 2)[0] > 3


def test_what_layers_have_in_common_is_told_of_every_step(tmp_path: Path) -> None:
    description, load = loader(tmp_path)
    calls: list[str] = []

    def with_part(stage: Stage) -> Decoder:
        decoder = load(stage)
        part: Any = Part(calls)
        decoder.step_parts = (part,)
        return decoder

    time_parts(description, CPU, with_part, num_requests=4, group=ALONE.tp)
    layer, ends = ["begin 4", "layers of 4"] * REPETITIONS, ["begin 4"] * 2 * REPETITIONS
    assert calls == [*layer, *ends, "close", *layer, "close"]
