"""DeepSeek V2 and V3: latent attention, shared experts, groups of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import (
    LatentAttentionDescription,
    LayerDescription,
    MixtureDescription,
    ModelDescription,
)
from fourfold.models.family_settings import MAX_LAYERS, architecture_of, open_config, read_decoder
from fourfold.models.mixture_families import MAX_EXPERTS, read_mixture
from fourfold.models.rotary_settings import read_rotary, score_temperature

_V2_METHOD = re.compile(r"((group_limited_)?greedy)?")


def describe_deepseek(values: Mapping[str, Any]) -> ModelDescription:
    """DeepSeek V2 and V3."""
    config = open_config(values, mixture=True)
    third = architecture_of(values) == "DeepseekV3ForCausalLM"
    if config.flag("mlp_bias", False):
        raise ConfigError("config.json has mlp_bias: true; DeepSeek's feed-forward has no biases here")
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    num_dense = config.count("first_k_dense_replace", 3 if third else 0, most=MAX_LAYERS)
    layers = tuple(LayerDescription(mixture=layer >= num_dense) for layer in range(num_layers))
    if config.integer("moe_layer_freq", 1) != 1:
        raise ConfigError(f"config.json has moe_layer_freq: {config.integer('moe_layer_freq')}; 1 is supported")
    latent = _latent(config, third)
    rotary = read_rotary(
        config, head_dim=latent.rotary_dim, max_position=config.integer("max_position_embeddings"), theta=1e4
    )
    query_dim = latent.fixed_dim + latent.rotary_dim
    base = read_decoder(config, layers=layers, rotaries=(rotary,), head_dim=max(query_dim, latent.value_dim))
    bias = config.flag("attention_bias", False)
    return replace(
        base,
        num_kv_heads=base.num_heads,  # every head has its own key and value once they are decompressed
        attention_scale=query_dim**-0.5 * score_temperature(config, rotary) ** 2,
        latent=latent,
        mixture=_mixture(config, third),
        unused_layers=config.count("num_nextn_predict_layers", 0, most=MAX_LAYERS) if third else 0,
        qkv_bias=bias,
        output_bias=bias,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _latent(config: ConfigReader, third: bool) -> LatentAttentionDescription:
    return LatentAttentionDescription(
        kv_rank=config.integer("kv_lora_rank"),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else 0,
        fixed_dim=config.integer("qk_nope_head_dim"),
        rotary_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        interleaved=not third or config.flag("rope_interleave", True),
    )


def _mixture(config: ConfigReader, third: bool) -> MixtureDescription:
    base = read_mixture(config, intermediate_size=config.integer("moe_intermediate_size"), top_k=8 if third else 6)
    scoring = config.text("scoring_func", "sigmoid" if third else "softmax")
    if scoring != ("sigmoid" if third else "softmax"):
        raise ConfigError(f"config.json has scoring_func: {scoring!r}, which {architecture_of(config.values)} has not")
    shared = config.count("n_shared_experts", 0, most=MAX_EXPERTS)
    mixture = replace(
        base,
        scale=config.number("routed_scaling_factor", 2.5 if third else 1.0),
        shared_intermediate_size=shared * base.intermediate_size,
    )
    if third:
        normalize = config.flag("norm_topk_prob", True)
        mixture = replace(mixture, scoring="sigmoid", normalize=normalize, group_score="top2_sum", score_bias=True)
    elif not _is_grouped(config):
        return mixture
    num_groups = config.integer("n_group", 8 if third else 1)
    return _with_groups(mixture, num_groups, config.integer("topk_group", min(4, num_groups)))


def _is_grouped(config: ConfigReader) -> bool:
    """Whether V2 chooses groups first."""
    text = config.text("topk_method", "")
    method = _V2_METHOD.fullmatch(text)
    if method is None:
        raise ConfigError(f"config.json has topk_method: {text!r}, which DeepSeek V2 has not")
    if config.flag("norm_topk_prob", False):
        raise ConfigError("config.json has norm_topk_prob: true; no DeepSeek V2 was trained so")
    return method[2] is not None


def _with_groups(mixture: MixtureDescription, num_groups: int, top_groups: int) -> MixtureDescription:
    size, left = divmod(mixture.num_experts, num_groups)
    if left or top_groups > num_groups or top_groups * size < mixture.top_k or size < 2 * (num_groups > 1):
        raise ConfigError(
            f"config.json has {mixture.num_experts} experts, n_group {num_groups}, topk_group {top_groups} and "
            f"num_experts_per_tok {mixture.top_k}; equal groups of 2 or more, and enough of them for a token's experts"
        )
    return replace(mixture, num_groups=num_groups, top_groups=top_groups)
