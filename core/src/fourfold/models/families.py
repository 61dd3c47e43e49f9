"""Model families: each function turns a config.json into a ModelDescription, and refuses what it cannot honour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import Activation, LayerDescription, ModelDescription, RotaryDescription
from fourfold.models.family_settings import (
    MAX_LAYERS,
    activation_of,
    architecture_of,
    open_config,
    read_decoder,
    read_sliding,
    read_window,
)
from fourfold.models.rotary_settings import describe_rotary


def describe_llama(values: Mapping[str, Any]) -> ModelDescription:
    """Llama 1 to 3, Mistral, SmolLM 1 to 3."""
    config = open_config(values)
    architecture = architecture_of(values)
    smollm3 = architecture == "SmolLM3ForCausalLM"
    mistral = architecture == "MistralForCausalLM"
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    layers = (LayerDescription(),) * num_layers
    if smollm3:
        layers = _smollm3_layers(config, num_layers)
    elif mistral:
        layers = (LayerDescription(sliding_window=read_window(config, 4096)),) * num_layers
    bias = not mistral and config.flag("attention_bias", False)
    base = read_decoder(config, layers=layers, theta=2e6 if smollm3 else 1e4)
    return replace(
        base,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=not mistral and config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", smollm3),
    )


def describe_qwen(values: Mapping[str, Any]) -> ModelDescription:
    """Qwen 2, 2.5 and 3, dense."""
    config = open_config(values)
    third = architecture_of(values) == "Qwen3ForCausalLM"
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    window = read_window(config, 4096) if config.flag("use_sliding_window", False) else 0
    first_windowed = int(config.number("max_window_layers", 28))
    sliding = read_sliding(config, num_layers, [bool(window) and i >= first_windowed for i in range(num_layers)])
    bias = third and config.flag("attention_bias", False)
    base = read_decoder(
        config,
        layers=tuple(LayerDescription(sliding_window=window if s else 0) for s in sliding),
        head_dim=config.integer("head_dim", 128) if third else None,
    )
    return replace(
        base,
        qkv_bias=bias or not third,
        output_bias=bias,
        query_key_norm=third,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def describe_gemma(values: Mapping[str, Any]) -> ModelDescription:
    """Gemma 1, 2 and 3, text."""
    config = open_config(values)
    architecture = architecture_of(values)
    first, third = architecture == "GemmaForCausalLM", architecture == "Gemma3ForCausalLM"
    if config.flag("use_bidirectional_attention", False):
        raise ConfigError("config.json has use_bidirectional_attention: true; only causal attention is supported")
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    head_dim = config.integer("head_dim", 256)
    window = 0 if first else read_window(config, 4096)
    pattern = config.integer("sliding_window_pattern", 6) if third else 2
    sliding = read_sliding(config, num_layers, [not first and (i + 1) % pattern != 0 for i in range(num_layers)])
    layers = tuple(LayerDescription(sliding_window=window if s else 0, rotary=1 if third and s else 0) for s in sliding)
    bias = config.flag("attention_bias", False)
    base = read_decoder(
        config,
        layers=layers,
        rotaries=_gemma3_rotaries(config, head_dim) if third else None,
        head_dim=head_dim,
        max_position=131072 if third else 8192,
    )
    return replace(
        base,
        activation=_gemma_activation(config, first),
        attention_scale=(head_dim if first else config.positive("query_pre_attn_scalar", 256)) ** -0.5,
        attention_soft_cap=0.0 if first else _cap(config, "attn_logit_softcapping", 0.0 if third else 50.0),
        logit_soft_cap=0.0 if first else _cap(config, "final_logit_softcapping", 0.0 if third else 30.0),
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=third,
        sandwich_norms=not first,
        norm_offset=1.0,
        embedding_scale=math.sqrt(base.hidden_size),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _smollm3_layers(config: ConfigReader, num_layers: int) -> tuple[LayerDescription, ...]:
    """Layers that do not rotate are the ones that may slide."""
    rotates = _smollm3_rotates(config, num_layers)
    window = read_window(config) if config.flag("use_sliding_window", False) else 0
    sliding = read_sliding(config, num_layers, [bool(window) and not rotating for rotating in rotates])
    return tuple(
        LayerDescription(sliding_window=window if slides else 0, rotary=0 if rotating else None)
        for rotating, slides in zip(rotates, sliding, strict=True)
    )


def _cap(config: ConfigReader, key: str, default: float) -> float:
    """A soft cap: absent is the family's default, null is none."""
    if key in config.values and not config.has(key):
        return 0.0
    return config.number(key, default)


def _smollm3_rotates(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer encodes positions; the config's ``no_rope_layers`` says 1 where it does."""
    flags = config.sequence("no_rope_layers", num_layers)
    if flags is not None:
        return [bool(flag) for flag in flags[:num_layers]]
    interval = config.integer("no_rope_layer_interval", 4)
    return [(i + 1) % interval != 0 for i in range(num_layers)]


def _gemma3_rotaries(config: ConfigReader, head_dim: int) -> tuple[RotaryDescription, RotaryDescription]:
    """(global, local); only the global one is ever scaled in the older form."""
    positions = config.integer("max_position_embeddings", 131072)
    both = config.mapping("rope_parameters") or {}
    whole: dict[str, Any] = dict(both.get("full_attention") or config.mapping("rope_scaling") or {})
    local: dict[str, Any] = dict(both.get("sliding_attention") or {})
    whole.setdefault("rope_theta", config.number("rope_theta", 1e6))
    local.setdefault("rope_theta", config.number("rope_local_base_freq", 1e4))
    return (
        describe_rotary(whole, head_dim=head_dim, max_position=positions),
        describe_rotary(local, head_dim=head_dim, max_position=positions),
    )


def _gemma_activation(config: ConfigReader, first: bool) -> Activation:
    name = config.text("hidden_activation", config.text("hidden_act", "gelu_pytorch_tanh"))
    # Early Gemma configs say gelu and were trained with its tanh approximation.
    return "gelu_tanh" if first and name == "gelu" else activation_of(name)
