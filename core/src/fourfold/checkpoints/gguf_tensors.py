"""Which GGUF tensor becomes which Hugging Face tensor, and what is done to its values on the way. Reads no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.checkpoints.gguf_dequantize import Floats

IGNORED = frozenset({"rope_freqs.weight"})
"""Tensors that config.json expresses as settings."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PERMUTED = ("llama", "smollm3")
_SHIFTED_NORMS = ("gemma", "gemma2", "gemma3")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorRule:
    """What one tensor becomes."""

    name: str
    restore: Callable[[Floats], Floats] | None = None
    """Applied to fp32 rows, as many as a multiple of ``rows``."""
    rows: int = 1


def tensor_rule(name: str, architecture: str, config: Mapping[str, Any]) -> TensorRule | None:
    """The rule for GGUF tensor ``name``, or None if the architecture has no such tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return _with_values(f"{_TOP[stem]}.{kind}", stem, architecture, config)
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    modules = {**_LAYER, **_SANDWICH} if architecture in ("gemma2", "gemma3") else _LAYER
    if part not in modules:
        return None
    return _with_values(f"model.layers.{layer}.{modules[part]}.{kind}", part, architecture, config)


def _with_values(name: str, part: str, architecture: str, config: Mapping[str, Any]) -> TensorRule:
    if part.endswith("norm") and architecture in _SHIFTED_NORMS:
        # The converter stored weight + 1, the models add the 1 themselves.
        return TensorRule(name, lambda values: values - 1)
    if part in ("attn_q", "attn_k") and architecture in _PERMUTED:
        head_dim = int(config["head_dim"])
        return TensorRule(name, lambda values: rotate_half_order(values, head_dim), head_dim)
    return TensorRule(name)


def rotate_half_order(values: Floats, head_dim: int) -> Floats:
    """Rows of whole heads from interleaved rotary pairs (0, 1), (2, 3).. to halves (0, D/2), (1, D/2 + 1).."""
    rest = values.shape[1:]
    paired = values.reshape(-1, head_dim // 2, 2, *rest)
    return paired.swapaxes(1, 2).reshape(-1, *rest)
