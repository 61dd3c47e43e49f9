from __future__ import annotations

import json
from pathlib import Path

import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.entries import WorkerContext
from fourfold.layout import ParallelLayout
from fourfold.models.decoder import Decoder
from fourfold.models.loading import load_model
from fourfold.models.stage_partition import Stage, partition
from fourfold.plugins import load_plugins
from fourfold.worker.device import CpuDevice
from fourfold.worker.model_runner import ALONE
from fourfold.worker.stage_timing import time_parts


def test_one_layer_of_each_kind_is_timed(tmp_path: Path) -> None:
    """With a vocabulary so large that the head must cost more than a layer, and windows on every other layer."""
    config = {
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
    (tmp_path / "config.json").write_text(json.dumps(config))
    registry = load_plugins()
    engine_config = EngineConfig(model=ModelConfig(model=str(tmp_path), load_format="dummy"))
    checkpoint = resolve_checkpoint(engine_config.model, registry, NoProgress())
    loaded: list[Stage] = []

    def load(stage: Stage) -> Decoder:
        loaded.append(stage)
        return load_model(
            WorkerContext(config=engine_config, layout=ParallelLayout(), rank=0),
            registry,
            checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            progress=NoProgress(),
            stage=stage,
        )

    device = CpuDevice(dtype=torch.float32)
    costs = time_parts(checkpoint.description, device, load, num_requests=16, group=ALONE.tp)
    assert [(list(stage.layers), stage.is_first, stage.is_last) for stage in loaded] == [
        ([0], True, True),
        ([1], False, False),
    ]
    assert costs.layers == costs.layers[:2] * 3
    assert all(seconds > 0 for seconds in (*costs.layers, costs.first, costs.last))
    assert costs.last > max(costs.layers)
    assert partition(costs, 2)[0] > 3
