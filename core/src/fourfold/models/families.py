"""Model families: each function turns a config.json into a ModelDescription, and refuses what it cannot honour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import Activation, LayerDescription, ModelDescription, RotaryDescription
from fourfold.models.rotary_settings import describe_rotary, longest_context, read_rotary

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
MAX_LAYERS = 4096
"""Far beyond any model; a description holds an object for each."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def describe_llama(values: Mapping[str, Any]) -> ModelDescription:
    """Llama 1 to 3, Mistral, SmolLM 1 to 3."""
    config = _open(values)
    architecture = _architecture(values)
    smollm3 = architecture == "SmolLM3ForCausalLM"
    mistral = architecture == "MistralForCausalLM"
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    layers = (LayerDescription(),) * num_layers
    if smollm3:
        layers = _smollm3_layers(config, num_layers)
    elif mistral:
        layers = (LayerDescription(sliding_window=_window(config, 4096)),) * num_layers
    bias = not mistral and config.flag("attention_bias", False)
    base = _describe(config, layers=layers, theta=2e6 if smollm3 else 1e4)
    return replace(
        base,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=not mistral and config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", smollm3),
    )


def describe_qwen(values: Mapping[str, Any]) -> ModelDescription:
    """Qwen 2, 2.5 and 3, dense."""
    config = _open(values)
    third = _architecture(values) == "Qwen3ForCausalLM"
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    window = _window(config, 4096) if config.flag("use_sliding_window", False) else 0
    first_windowed = int(config.number("max_window_layers", 28))
    sliding = _layer_types(config, num_layers, [bool(window) and i >= first_windowed for i in range(num_layers)])
    bias = third and config.flag("attention_bias", False)
    base = _describe(
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
    config = _open(values)
    architecture = _architecture(values)
    first, third = architecture == "GemmaForCausalLM", architecture == "Gemma3ForCausalLM"
    if config.flag("use_bidirectional_attention", False):
        raise ConfigError("config.json has use_bidirectional_attention: true; only causal attention is supported")
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    head_dim = config.integer("head_dim", 256)
    window = 0 if first else _window(config, 4096)
    pattern = config.integer("sliding_window_pattern", 6) if third else 2
    sliding = _layer_types(config, num_layers, [not first and (i + 1) % pattern != 0 for i in range(num_layers)])
    layers = tuple(LayerDescription(sliding_window=window if s else 0, rotary=1 if third and s else 0) for s in sliding)
    bias = config.flag("attention_bias", False)
    base = _describe(
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


def _describe(
    config: ConfigReader,
    *,
    layers: tuple[LayerDescription, ...],
    theta: float = 1e4,
    rotaries: tuple[RotaryDescription, ...] | None = None,
    head_dim: int | None = None,
    max_position: int | None = None,
) -> ModelDescription:
    """What all families read alike; arguments are what a family knows of its defaults."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json has num_attention_heads {num_heads} and num_key_value_heads {num_kv_heads}; "
            "the first must be a multiple of the second"
        )
    head_dim = head_dim or config.integer("head_dim", hidden_size // num_heads)
    positions = config.integer("max_position_embeddings", max_position)
    if rotaries is None:
        rotaries = (read_rotary(config, head_dim=head_dim, max_position=positions, theta=theta),)
    default_length, longest = longest_context(rotaries[0], positions)
    return ModelDescription(
        architecture=_architecture(config.values),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers,
        rotaries=rotaries,
        max_model_len=default_length,
        max_position=longest,
        norm_epsilon=config.positive("rms_norm_eps", 1e-6),
        activation=_activation(config.text("hidden_act", "silu")),
        attention_scale=head_dim**-0.5,
        dtype=config.text("dtype", config.text("torch_dtype", "bfloat16")),
    )


def _smollm3_layers(config: ConfigReader, num_layers: int) -> tuple[LayerDescription, ...]:
    """Layers that do not rotate are the ones that may slide."""
    rotates = _smollm3_rotates(config, num_layers)
    window = _window(config) if config.flag("use_sliding_window", False) else 0
    sliding = _layer_types(config, num_layers, [bool(window) and not rotating for rotating in rotates])
    return tuple(
        LayerDescription(sliding_window=window if slides else 0, rotary=0 if rotating else None)
        for rotating, slides in zip(rotates, sliding, strict=True)
    )


def _open(values: Mapping[str, Any]) -> ConfigReader:
    """A reader, once the settings that no family here honours are ruled out."""
    if values.get("quantization_config"):
        quantization = values["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ConfigError(
            f"config.json has quantization_config ({method}); quantised safetensors are not supported, "
            "use the unquantised model or a .gguf file"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(key):
            raise ConfigError(f"config.json has {key}: {values[key]}; mixtures of experts are not supported yet")
    return ConfigReader(values)


def _architecture(values: Mapping[str, Any]) -> str:
    return str(values["architectures"][0])


def _window(config: ConfigReader, default: int = 0) -> int:
    """The sliding window: absent is the family's default, null is none."""
    if not config.has("sliding_window"):
        return 0 if "sliding_window" in config.values else default
    return config.integer("sliding_window")


def _cap(config: ConfigReader, key: str, default: float) -> float:
    """A soft cap: absent is the family's default, null is none."""
    if key in config.values and not config.has(key):
        return 0.0
    return config.number(key, default)


def _layer_types(config: ConfigReader, num_layers: int, default: list[bool]) -> list[bool]:
    """Whether each layer attends through the sliding window."""
    types = config.sequence("layer_types", num_layers)
    if types is None:
        return default
    for layer_type in types:
        if layer_type not in _LAYER_TYPES:
            raise ConfigError(f"layer type {layer_type!r} is not supported; supported: {', '.join(_LAYER_TYPES)}")
    return [layer_type == "sliding_attention" for layer_type in types[:num_layers]]


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
    return "gelu_tanh" if first and name == "gelu" else _activation(name)


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
