"""The tensors that make queries, keys and values in latent attention. Knows no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.models.layer_tensor import LayerTensor

if TYPE_CHECKING:
    from fourfold.models.description import ModelDescription


def latent_tensors(description: ModelDescription) -> dict[str, LayerTensor]:
    """Checkpoint name, without the layer's prefix -> the tensor; empty for a model without latent attention."""
    d, latent = description, description.latent
    if latent is None:
        return {}
    queries = d.num_heads * (latent.fixed_dim + latent.rotary_dim)
    keys_values = d.num_heads * (latent.fixed_dim + latent.value_dim)
    shared = latent.kv_rank + latent.rotary_dim
    tensors: dict[str, LayerTensor] = {}
    if latent.query_rank:
        tensors["q_a_proj.weight"] = LayerTensor("q_a.weight", (latent.query_rank, d.hidden_size))
        if d.qkv_bias:
            tensors["q_a_proj.bias"] = LayerTensor("q_a.bias", (latent.query_rank,))
        tensors["q_a_layernorm.weight"] = LayerTensor("q_norm.weight", (latent.query_rank,))
        tensors["q_b_proj.weight"] = LayerTensor("q_b.weight", (queries, latent.query_rank))
    else:
        tensors["q_proj.weight"] = LayerTensor("q.weight", (queries, d.hidden_size))
    tensors["kv_a_proj_with_mqa.weight"] = LayerTensor("kv_a.weight", (shared, d.hidden_size))
    if d.qkv_bias:
        tensors["kv_a_proj_with_mqa.bias"] = LayerTensor("kv_a.bias", (shared,))
    tensors["kv_a_layernorm.weight"] = LayerTensor("kv_norm.weight", (latent.kv_rank,))
    tensors["kv_b_proj.weight"] = LayerTensor("kv_b.weight", (keys_values, latent.kv_rank))
    return {f"self_attn.{name}": tensor for name, tensor in tensors.items()}
