"""Families with mixtures of experts: each function turns a config.json into a ModelDescription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import LayerDescription, MixtureDescription, ModelDescription
from fourfold.models.family_settings import (
    EXPERT_COUNTS,
    MAX_LAYERS,
    architecture_of,
    open_config,
    read_decoder,
    read_sliding,
    read_window,
)

MAX_EXPERTS: Final = 1 << 16
"""Far beyond any model; each has tensors of its own."""


def describe_mixtral(values: Mapping[str, Any]) -> ModelDescription:
    """Mixtral."""
    config = open_config(values, mixture=True)
    layer = LayerDescription(sliding_window=read_window(config), mixture=True)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    base = read_decoder(config, layers=(layer,) * num_layers, theta=1e6)
    mixture = read_mixture(config, intermediate_size=base.intermediate_size, top_k=2)
    return replace(
        base,
        mixture=replace(mixture, normalize=True),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def describe_qwen_moe(values: Mapping[str, Any]) -> ModelDescription:
    """Qwen 1.5, 2 and 3."""
    config = open_config(values, mixture=True)
    third = architecture_of(values) == "Qwen3MoeForCausalLM"
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    window = read_window(config, 4096) if config.flag("use_sliding_window", False) else 0
    first_full = num_layers if third else int(config.number("max_window_layers", 28))
    windowed = [bool(window) and (third or i % 2 == 0) and i < first_full for i in range(num_layers)]
    sliding = windowed if third else read_sliding(config, num_layers, windowed)
    layers = tuple(
        LayerDescription(sliding_window=window if slides else 0, mixture=mixes)
        for slides, mixes in zip(sliding, _qwen_mixes(config, num_layers), strict=True)
    )
    base = read_decoder(config, layers=layers)
    mixture = read_mixture(config, intermediate_size=config.integer("moe_intermediate_size"), top_k=8 if third else 4)
    bias = third and config.flag("attention_bias", False)
    if not third:
        mixture = replace(
            mixture,
            shared_intermediate_size=config.integer("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )
    return replace(
        base,
        mixture=mixture,
        qkv_bias=bias if third else config.flag("qkv_bias", True),
        output_bias=bias,
        query_key_norm=third,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def describe_olmoe(values: Mapping[str, Any]) -> ModelDescription:
    """OLMoE."""
    config = open_config(values, mixture=True)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    base = read_decoder(config, layers=(LayerDescription(mixture=True),) * num_layers)
    bias = config.flag("attention_bias", False)
    return replace(
        base,
        mixture=read_mixture(config, intermediate_size=base.intermediate_size, top_k=8),
        norm_epsilon=config.positive("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        whole_query_key_norm=True,
        qkv_clip=config.positive("clip_qkv") if config.has("clip_qkv") else 0.0,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def read_mixture(config: ConfigReader, *, intermediate_size: int, top_k: int) -> MixtureDescription:
    """What all families read alike; ``top_k`` is the family's default."""
    counts = [key for key in EXPERT_COUNTS if config.has(key)]
    if not counts:
        raise ConfigError(f"config.json has no {EXPERT_COUNTS[0]}; add it")
    num_experts = config.integer(counts[0], most=MAX_EXPERTS)
    mixture = MixtureDescription(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", top_k),
        intermediate_size=intermediate_size,
        normalize=config.flag("norm_topk_prob", False),
    )
    if mixture.top_k > num_experts:
        raise ConfigError(
            f"config.json has num_experts_per_tok: {mixture.top_k} and {counts[0]}: {num_experts}; "
            "a token cannot go to more experts than there are"
        )
    return mixture


def _qwen_mixes(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has a mixture, and not a dense feed-forward."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.sequence("mlp_only_layers", 0) or []
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        raise ConfigError(f"config.json has mlp_only_layers: {dense}; the numbers of layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
