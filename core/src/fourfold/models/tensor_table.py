"""The checkpoint tensors of a described model, by their Hugging Face names, with whole shapes. Knows no torch."""

from __future__ import annotations

import re

from fourfold.models.description import ModelDescription
from fourfold.models.latent_tensors import latent_tensors
from fourfold.models.mixture_tensors import mixture_tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)attn\.masked_bias$")
"""Tensors that some checkpoints carry although they are computed from config.json."""


def checkpoint_tensors(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs, and its shape before any cut."""
    d = description
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (d.vocab_size, d.hidden_size)}
    for layer in range(d.num_layers):
        shapes.update(layer_tensors(d, layer))
    shapes[FINAL_NORM] = (d.hidden_size,)
    if not d.tied_embeddings:
        shapes[HEAD] = (d.vocab_size, d.hidden_size)
    return shapes


def layer_tensors(description: ModelDescription, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, in the order in which checkpoints hold them."""
    d = description
    prefix = layer_prefix(layer)
    shapes = _attention_tensors(d) if d.latent is None else {}
    shapes.update((name, tensor.shape) for name, tensor in latent_tensors(d).items())
    shapes["self_attn.o_proj.weight"] = (d.hidden_size, d.num_heads * d.value_dim)
    if d.output_bias:
        shapes["self_attn.o_proj.bias"] = (d.hidden_size,)
    if d.layers[layer].mixture:
        shapes.update((name, tensor.shape) for name, tensor in mixture_tensors(d).items())
    else:
        shapes.update(_feed_forward_tensors(d))
    for norm in norm_names(d):
        shapes[f"{norm}.weight"] = (d.hidden_size,)
    return {prefix + name: shape for name, shape in shapes.items()}


def _attention_tensors(d: ModelDescription) -> dict[str, tuple[int, ...]]:
    query, key = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for part, rows in (("q", query), ("k", key), ("v", key)):
        shapes[f"self_attn.{part}_proj.weight"] = (rows, d.hidden_size)
        if d.qkv_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (rows,)
    if d.query_key_norm:
        shapes["self_attn.q_norm.weight"] = (d.head_dim,)
        shapes["self_attn.k_norm.weight"] = (d.head_dim,)
    if d.whole_query_key_norm:
        shapes["self_attn.q_norm.weight"] = (query,)
        shapes["self_attn.k_norm.weight"] = (key,)
    return shapes


def _feed_forward_tensors(d: ModelDescription) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part, out, into in (
        ("gate", d.intermediate_size, d.hidden_size),
        ("up", d.intermediate_size, d.hidden_size),
        ("down", d.hidden_size, d.intermediate_size),
    ):
        shapes[f"mlp.{part}_proj.weight"] = (out, into)
        if d.mlp_bias:
            shapes[f"mlp.{part}_proj.bias"] = (out,)
    return shapes


def layer_prefix(layer: int) -> str:
    """What the names of one layer's tensors begin with."""
    return f"model.layers.{layer}."


def norm_names(description: ModelDescription) -> tuple[str, ...]:
    """The norms of a layer in the order of the forward pass."""
    if description.sandwich_norms:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    return ("input_layernorm", "post_attention_layernorm")
