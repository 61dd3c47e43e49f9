"""What a decoder is, as data: everything that building it needs. Knows no torch, no file and no rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RotaryKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryDescription:
    """One rotary embedding. Fields that a kind does not use keep their defaults."""

    kind: RotaryKind = "default"
    theta: float
    dim: int
    """Leading dimensions of a head that rotate."""
    factor: float = 1.0
    original_max_position: int = 0
    """Positions seen in training, before any scaling (dynamic, yarn, llama3)."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round yarn's correction range to whole dimensions."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureDescription:
    """The layers of experts of one model, all alike."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Of one expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize: bool = False
    """Whether the weights of a token's experts are made to sum to 1."""
    scale: float = 1.0
    """Multiplies the weights in the end."""
    num_groups: int = 1
    top_groups: int = 1
    """Groups of neighbouring experts of which a token's experts come from; the best ones by ``group_score``."""
    group_score: Literal["max", "top2_sum"] = "max"
    score_bias: bool = False
    """Whether a learnt bias is added to scores to choose experts; weights are without it."""
    shared_intermediate_size: int = 0
    """Of the feed-forward that every token goes through besides; 0: there is none."""
    shared_gate: bool = False
    """Whether the output of the shared feed-forward is multiplied by a sigmoid of one more logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionDescription:
    """Attention whose keys and values are made of a narrow latent. Its heads are as wide as ``head_dim`` says, which
    has room for the wider of keys and values.
    """

    kv_rank: int
    """Size of the latent of keys and values."""
    query_rank: int = 0
    """Size of the latent of queries; 0: they have none."""
    fixed_dim: int
    """Dimensions of a query and key head that do not rotate."""
    rotary_dim: int
    """Dimensions of a query and key head that do; all key heads share them."""
    value_dim: int
    interleaved: bool = True
    """Whether neighbours rotate together in the checkpoint, and not dimensions that are half of them apart."""
    norm_epsilon: float = 1e-6
    """Of the norms of the latents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDescription:
    """What differs from layer to layer."""

    sliding_window: int = 0
    """A token sees itself and the ``sliding_window - 1`` before it; 0 is no window."""
    rotary: int | None = 0
    """Index into ``ModelDescription.rotaries``; None: positions are not encoded."""
    mixture: bool = False
    """Whether the feed-forward is ``ModelDescription.mixture``; else it is dense."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """One causal decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerDescription, ...]
    rotaries: tuple[RotaryDescription, ...]
    max_model_len: int
    """Tokens that one request takes unless ``--max-model-len`` says otherwise."""
    max_position: int
    """Tokens past which the positions make no sense; at least ``max_model_len``."""
    norm_epsilon: float
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores weight - 1)."""
    activation: Activation = "silu"
    attention_scale: float
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    """Queries and keys are normed head by head before they rotate."""
    whole_query_key_norm: bool = False
    """Queries are normed over all heads together before they rotate, and so are keys."""
    qkv_clip: float = 0.0
    """Queries, keys and values are then cut to this much either way of 0; 0 is none."""
    sandwich_norms: bool = False
    """Attention and feed-forward are normed after as well as before."""
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    latent: LatentAttentionDescription | None = None
    """How queries, keys and values are made, where that is not one product."""
    mixture: MixtureDescription | None = None
    """Of the layers that have one."""
    unused_layers: int = 0
    """Layers that checkpoints hold past the last one, to draft tokens with."""
    dtype: str = field(default="bfloat16")
    """What the checkpoint was saved in; informs, decides nothing."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.layers)

    @property
    def value_dim(self) -> int:
        """Dimensions of a value head in the checkpoint."""
        return self.head_dim if self.latent is None else self.latent.value_dim
