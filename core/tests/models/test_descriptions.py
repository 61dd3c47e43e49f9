from __future__ import annotations

import math
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.models.description import RotaryDescription
from fourfold.models.families import describe_gemma, describe_llama, describe_qwen
from fourfold.models.parallel_layers import names_by_kind
from fourfold.models.tensor_table import checkpoint_tensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def gemma(version: str, **settings: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [f"Gemma{version}ForCausalLM"], **settings}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq, .*the unquantised model"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"\(fp8, weight_block_size None\).*only fp8 with a scale a block",
        ),
        ({"num_local_experts": 8}, "num_local_experts: 8, but LlamaForCausalLM has no mixture of experts"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported; supported: silu, swish, gelu"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "the rope settings have factor 0.0; above 0"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "config.json's rope settings has factor: 'two'"),
        ({"rope_scaling": [1]}, r"config\.json has rope_scaling: \[1\]; an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters for each type of layer"),
        ({"partial_rotary_factor": 0.1}, "rotates 1 of 16 dimensions; an even number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 and num_key_value_heads 3; the first must be a multiple"),
        ({"hidden_size": "64"}, "config.json has hidden_size: '64'; a whole number above 0"),
        ({"hidden_size": 0}, "config.json has hidden_size: 0; a whole number above 0"),
        ({"vocab_size": None}, "config.json has no vocab_size; add it"),
        ({"attention_bias": "yes"}, "config.json has attention_bias: 'yes'; true or false"),
        ({"rms_norm_eps": float("nan")}, "config.json has rms_norm_eps: nan; a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_llama({**LLAMA, **change})


def test_layer_types_are_checked() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(ConfigError, match="layer type 'chunked_attention' is not supported; supported: full_attention"):
        describe_qwen({**qwen, "layer_types": ["full_attention", "chunked_attention"]})
    with pytest.raises(ConfigError, match="an item for each of 2 layers"):
        describe_qwen({**qwen, "layer_types": ["full_attention"]})


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention: true; only causal attention is supported"):
        describe_gemma(gemma("3", use_bidirectional_attention=True))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 2.0},
    ],
)
def test_both_spellings_of_rope_settings(scaling: dict[str, Any]) -> None:
    older = describe_llama({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    newer = describe_llama({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    oldest = describe_llama(
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": scaling["rope_type"], "rope_type": None}}
    )
    assert older == newer == oldest
    assert older.rotaries[0].theta == 5e5
    assert older.rotaries[0].kind == scaling["rope_type"]


def test_both_spellings_of_local_and_global_rope() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = describe_gemma(gemma("3", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=scaling))
    newer = describe_gemma(
        gemma(
            "3",
            rope_parameters={
                "full_attention": {**scaling, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        )
    )
    assert older.rotaries == newer.rotaries
    assert [rotary.theta for rotary in older.rotaries] == [5e5, 2e4]
    assert [rotary.factor for rotary in older.rotaries] == [8.0, 1.0]


@pytest.mark.parametrize(
    ("scaling", "lengths"),
    [
        (None, (128, 128)),
        ({"type": "linear", "factor": 4.0}, (128, 128)),
        ({"type": "dynamic", "factor": 4.0}, (128, 512)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, (512, 512)),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, (128, 128)),
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, (128, 128)),
    ],
)
def test_lengths(scaling: dict[str, Any] | None, lengths: tuple[int, int]) -> None:
    description = describe_llama({**LLAMA, "rope_scaling": scaling})
    assert (description.max_model_len, description.max_position) == lengths


def test_partial_rotation() -> None:
    assert describe_llama({**LLAMA, "partial_rotary_factor": 0.5}).rotaries[0].dim == 8


def test_defaults_of_each_family() -> None:
    mistral = describe_llama({**LLAMA, "architectures": ["MistralForCausalLM"]})
    assert {layer.sliding_window for layer in mistral.layers} == {4096}
    none = describe_llama({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert {layer.sliding_window for layer in none.layers} == {0}
    assert describe_llama({**LLAMA, "sliding_window": 9}).layers[0].sliding_window == 0, "Llama has no window"
    smollm3 = describe_llama({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4})
    assert [layer.rotary for layer in smollm3.layers] == [0, 0, 0, None]
    assert smollm3.tied_embeddings
    qwen = describe_qwen({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen.qkv_bias, qwen.output_bias, qwen.query_key_norm) == (True, False, False)
    first = describe_gemma(gemma(""))
    assert (first.norm_offset, first.embedding_scale, first.head_dim) == (1.0, 8.0, 256)
    assert first.tied_embeddings
    assert not first.sandwich_norms
    second = describe_gemma(gemma("2", query_pre_attn_scalar=144))
    assert (second.attention_soft_cap, second.logit_soft_cap) == (50.0, 30.0)
    assert second.attention_scale == pytest.approx(1 / 12)
    assert [layer.sliding_window for layer in second.layers] == [4096, 0]
    third = describe_gemma(gemma("3", num_hidden_layers=7, sliding_window=512, sliding_window_pattern=3))
    assert [layer.rotary for layer in third.layers] == [1, 1, 0, 1, 1, 0, 1]
    assert [layer.sliding_window for layer in third.layers] == [512, 512, 0, 512, 512, 0, 512]


def test_tensor_table() -> None:
    shapes = checkpoint_tensors(describe_gemma(gemma("3", head_dim=8, num_key_value_heads=2, attention_bias=True)))
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 64)
    assert shapes["model.layers.1.self_attn.o_proj.bias"] == (64,)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (8,)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 24)
    assert "lm_head.weight" not in shapes
    assert len(shapes) == 2 + 2 * (4 * 2 + 2 + 3 + 4)


def test_yarn_temperature() -> None:
    def factor(**more: float) -> float:
        scaling = {"rope_type": "yarn", "factor": 4.0, **more}
        rotary: RotaryDescription = describe_llama({**LLAMA, "rope_scaling": scaling}).rotaries[0]
        return rotary.attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(attention_factor=1.5) == 1.5
    assert factor(factor=0.5) == 1.0


def test_names_of_parallel_layers() -> None:
    assert names_by_kind("auto") == {"": "auto"}
    assert names_by_kind("tp,moe=ep") == {"": "tp", "moe": "ep"}
    with pytest.raises(ConfigError, match="names kind 'mo'; there are column, row"):
        names_by_kind("mo=ep")
    for wrong in ("", "moe=", "moe=ep,moe=tp"):
        with pytest.raises(ConfigError, match=f"--parallel-layer is {wrong!r}"):
            names_by_kind(wrong)
