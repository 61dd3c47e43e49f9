"""What all model families read alike from a config.json; what nobody honours is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.checkpoints.block_scales import read_block_size
from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import Activation, LayerDescription, ModelDescription, RotaryDescription
from fourfold.models.rotary_settings import longest_context, read_rotary

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
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What a config.json may call the number of experts."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def open_config(values: Mapping[str, Any], *, mixture: bool = False) -> ConfigReader:
    """A reader, once the settings that no family here honours are ruled out; counts of experts, but for a mixture."""
    read_block_size(values)
    architecture = architecture_of(values)
    for key in () if mixture else EXPERT_COUNTS:
        if values.get(key):
            raise ConfigError(f"config.json has {key}: {values[key]}, but {architecture} has no mixture of experts")
    return ConfigReader(values)


def architecture_of(values: Mapping[str, Any]) -> str:
    """The first of ``architectures``, by which the family was found."""
    return str(values["architectures"][0])


def read_window(config: ConfigReader, default: int = 0) -> int:
    """The sliding window: absent is the family's default, null is none."""
    if not config.has("sliding_window"):
        return 0 if "sliding_window" in config.values else default
    return config.integer("sliding_window")


def read_decoder(
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
        architecture=architecture_of(config.values),
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
        activation=activation_of(config.text("hidden_act", "silu")),
        attention_scale=head_dim**-0.5,
        dtype=config.text("dtype", config.text("torch_dtype", "bfloat16")),
    )


def read_sliding(config: ConfigReader, num_layers: int, default: list[bool]) -> list[bool]:
    """Whether each layer attends through the sliding window."""
    types = config.sequence("layer_types", num_layers)
    if types is None:
        return default
    for layer_type in types:
        if layer_type not in _LAYER_TYPES:
            raise ConfigError(f"layer type {layer_type!r} is not supported; supported: {', '.join(_LAYER_TYPES)}")
    return [layer_type == "sliding_attention" for layer_type in types[:num_layers]]


def activation_of(name: str) -> Activation:
    """The activation of a Hugging Face name; raises ConfigError for one that is not there."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
