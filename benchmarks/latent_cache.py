"""Bytes of KV cache a token: latents against the heads that are made of them, in bf16, for DeepSeek's public shapes."""

from __future__ import annotations

import math

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionSpec
from fourfold.entries import AttentionContext
from fourfold.layers.torch_attention import TorchAttention

BLOCK_SIZE = 16
MODELS = {
    # layers, heads, R, dimensions of a query head that do not rotate, that do, of a value
    "DeepSeek-V2-Lite": (27, 16, 512, 128, 64, 128),
    "DeepSeek-V2": (60, 128, 512, 128, 64, 128),
    "DeepSeek-V3": (61, 128, 512, 128, 64, 128),
}


def bytes_of(spec: AttentionSpec) -> int:
    """Of one token in one layer, as the backend's own shape of the cache has it."""
    context = AttentionContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.bfloat16, spec=spec)
    return math.prod(TorchAttention(context).kv_cache_shape(1, BLOCK_SIZE)) * 2 // BLOCK_SIZE


def main() -> None:
    """Print a table: each of tp ranks holds its own heads, or the whole latent."""
    print(f"{'model':18} {'tp':>3} {'heads, bytes a token and rank':>30} {'latents':>9} {'ratio':>6}")
    for model, (layers, heads, rank, fixed, turned, value) in MODELS.items():
        latents = bytes_of(
            AttentionSpec(num_heads=heads, num_kv_heads=1, head_dim=turned + rank, scale=1.0, shared_values=True)
        )
        for ranks in (1, 8):
            own = heads // ranks
            width = max(fixed + turned, value)
            whole = bytes_of(AttentionSpec(num_heads=own, num_kv_heads=own, head_dim=width, scale=1.0))
            print(f"{model:18} {ranks:3} {layers * whole:30,} {layers * latents:9,} {whole / latents:5.1f}x")


if __name__ == "__main__":
    main()
