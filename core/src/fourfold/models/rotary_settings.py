"""Reads rotary embeddings from a config.json: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

from fourfold.errors import ConfigError
from fourfold.models.config_reader import ConfigReader
from fourfold.models.description import RotaryDescription, RotaryKind


def read_rotary(config: ConfigReader, *, head_dim: int, max_position: int, theta: float) -> RotaryDescription:
    """The model's one rotary embedding; ``theta`` is the family's default base."""
    merged = _merged_settings(config)
    if any(isinstance(value, Mapping) for value in merged.values()):
        raise ConfigError("config.json has rope_parameters for each type of layer, which only Gemma 3 supports")
    merged.setdefault("rope_theta", config.number("rope_theta", theta))
    merged.setdefault("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    return describe_rotary(merged, head_dim=head_dim, max_position=max_position)


def score_temperature(config: ConfigReader, rotary: RotaryDescription) -> float:
    """What DeepSeek multiplies queries and keys by, each: yarn's temperature at ``mscale_all_dim``; 1 without one."""
    scale = ConfigReader(_merged_settings(config)).number("mscale_all_dim", 0.0)
    return _temperature(rotary.factor, scale) if scale and rotary.kind != "default" else 1.0


def describe_rotary(values: Mapping[str, Any], *, head_dim: int, max_position: int) -> RotaryDescription:
    """One rotary embedding from its settings, which include ``rope_theta``."""
    reader = ConfigReader(values, where="config.json's rope settings")
    kind = reader.text("rope_type", reader.text("type", "default"))
    if kind not in get_args(RotaryKind):
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(get_args(RotaryKind))}")
    dim = int(head_dim * reader.number("partial_rotary_factor", 1.0))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(f"partial_rotary_factor rotates {dim} of {head_dim} dimensions; an even number, 2 or more")
    original = reader.integer("original_max_position_embeddings", max_position)
    factor = reader.number("factor", 1.0)
    if kind == "yarn" and not reader.has("factor"):
        factor = max_position / original
    if factor <= 0:
        raise ConfigError(f"the rope settings have factor {factor}; above 0")
    return RotaryDescription(
        kind=cast("RotaryKind", kind),
        theta=reader.positive("rope_theta"),
        dim=dim,
        factor=factor,
        original_max_position=max_position if kind == "dynamic" else original,
        attention_factor=_attention_factor(reader, factor) if kind == "yarn" else 1.0,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=reader.flag("truncate", True),
        low_freq_factor=reader.number("low_freq_factor", 1.0),
        high_freq_factor=reader.number("high_freq_factor", 4.0),
    )


def longest_context(rotary: RotaryDescription, max_position: int) -> tuple[int, int]:
    """(the default length of a request, the length past which positions make no sense).

    ``dynamic`` stretches only when a longer request is asked for, so its default stays the length of training.
    """
    if rotary.kind == "dynamic":
        return max_position, max(max_position, int(max_position * rotary.factor))
    if rotary.kind == "yarn":
        longest = max(max_position, int(rotary.original_max_position * rotary.factor))
        return longest, longest
    return max_position, max_position


def _merged_settings(config: ConfigReader) -> dict[str, Any]:
    return {**(config.mapping("rope_scaling") or {}), **(config.mapping("rope_parameters") or {})}


def _attention_factor(reader: ConfigReader, factor: float) -> float:
    """Yarn's temperature, from "YaRN: efficient context window extension" (Peng et al., 2023), section 3.4."""
    if reader.has("attention_factor"):
        return reader.number("attention_factor")
    if reader.number("mscale", 0.0) and reader.number("mscale_all_dim", 0.0):
        return _temperature(factor, reader.number("mscale")) / _temperature(factor, reader.number("mscale_all_dim"))
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
