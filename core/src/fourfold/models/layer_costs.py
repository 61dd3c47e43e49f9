"""What the parts of a described model cost and take, from its description alone. Knows no torch and no device."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from fourfold.models.stage_partition import StageCosts, StageMemory
from fourfold.models.tensor_table import layer_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fourfold.models.description import ModelDescription

TYPICAL_CONTEXT: Final = 256
"""Tokens that a token attends to, where costs are estimated."""
ATTENTION_FACTOR: Final = 4.0
"""An attention product costs as much as so many of a linear layer: its rows are short, and the cache is read once a
request (measured with 64 requests on a CPU: 4 to 5).
"""


def stage_costs(description: ModelDescription) -> StageCosts:
    """Products a token in a decode step, which every layer and the head take part in; of experts, a token's own."""
    d = description
    layers = []
    for number, layer in enumerate(d.layers):
        linear = sum(prod(shape) for shape in layer_tensors(d, number).values())
        if layer.mixture and d.mixture is not None:
            idle = d.mixture.num_experts - d.mixture.top_k
            linear -= idle * 3 * d.mixture.intermediate_size * d.hidden_size
        context = min(TYPICAL_CONTEXT, layer.sliding_window or TYPICAL_CONTEXT)
        layers.append(linear + ATTENTION_FACTOR * 2 * context * d.num_heads * d.head_dim)
    return StageCosts(layers=tuple(layers), first=d.hidden_size, last=d.hidden_size * d.vocab_size)


def stage_memory(
    description: ModelDescription, *, available: Sequence[int], max_model_len: int, item_bytes: int, tp: int
) -> StageMemory:
    """Bytes of the weights, cut over ``tp`` ranks, and of the cache of one request of ``max_model_len`` tokens."""
    d = description
    layers = []
    for number, layer in enumerate(d.layers):
        weights = sum(prod(shape) for shape in layer_tensors(d, number).values()) // tp
        context = min(max_model_len, layer.sliding_window or max_model_len)
        cache = 2 * context * -(-d.num_kv_heads // tp) * d.head_dim
        layers.append((weights + cache) * item_bytes)
    vocabulary = d.hidden_size * d.vocab_size // tp * item_bytes
    return StageMemory(layers=tuple(layers), first=vocabulary, last=vocabulary, available=tuple(available))
