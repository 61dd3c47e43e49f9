"""What a server refuses before it starts any process, with the plugins that are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.options import build_engine_config
from fourfold.errors import ConfigError
from fourfold.plugins import load_plugins
from fourfold_server.config import ServerConfig
from fourfold_server.start_checks import check_config

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MIXTURE = {
    **DENSE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def checked(folder: Path, values: dict[str, Any], **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    config = build_engine_config(model=str(folder), load_format="dummy", **options)
    return check_config(config, ServerConfig(), load_plugins())


def test_a_layer_that_spreads_experts_is_as_good_as_the_option(tmp_path: Path) -> None:
    spread = {"data_parallel_size": 2, "parallel_layer": "moe=ep", "enable_dbo": True}
    assert checked(tmp_path, MIXTURE, **spread).parallel.enable_expert_parallel
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts to spread over ranks"):
        checked(tmp_path, DENSE, data_parallel_size=2, parallel_layer="moe=ep")


def test_a_way_to_compute_experts_needs_some(tmp_path: Path) -> None:
    assert checked(tmp_path, MIXTURE, experts="loop").backends.experts == "loop"
    with pytest.raises(ConfigError, match="--experts is 'loop', and LlamaForCausalLM has no experts; leave it out"):
        checked(tmp_path, DENSE, experts="loop")
