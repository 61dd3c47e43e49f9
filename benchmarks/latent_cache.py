"""The KV cache of latent attention: latents against the heads that are made of them.

Bytes a token for DeepSeek's public shapes in bf16, and milliseconds of attention in one layer of a decode step of
DeepSeek-V2-Lite on this CPU.
"""

from __future__ import annotations

import math
import timeit

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.contracts.attention_backend import AttentionBackend, AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionContext
from fourfold.plugins import load_plugins

BLOCK_SIZE = 16
MODELS = {
    # layers, heads, the latent's size, dimensions of a query head that do not rotate, that do, of a value
    "DeepSeek-V2-Lite": (27, 16, 512, 128, 64, 128),
    "DeepSeek-V2": (60, 128, 512, 128, 64, 128),
    "DeepSeek-V3": (61, 128, 512, 128, 64, 128),
}
BATCHES = ((1, 1024), (1, 4096), (8, 1024), (16, 512))
"""Sequences, and tokens that each has in the cache."""
ROUNDS = 20


def specs(model: str, ranks: int) -> tuple[AttentionSpec, AttentionSpec]:
    """Over heads, and over latents, of one rank of a layer."""
    _, heads, rank, fixed, turned, value = MODELS[model]
    own, width = heads // ranks, max(fixed + turned, value)
    return (
        AttentionSpec(num_heads=own, num_kv_heads=own, head_dim=width, scale=0.1, rotary_dim=turned),
        AttentionSpec(
            num_heads=own, num_kv_heads=1, head_dim=turned + rank, scale=0.1, rotary_dim=turned, shared_values=True
        ),
    )


def build(name: str, spec: AttentionSpec) -> AttentionBackend:
    """A backend by its name, in bf16 on the CPU."""
    config = EngineConfig(model=ModelConfig(dtype="bfloat16"))
    context = AttentionContext(config=config, device=torch.device("cpu"), dtype=torch.bfloat16, spec=spec)
    backend: AttentionBackend = load_plugins().attention_backends()[name].build(context)
    return backend


def bytes_of(backend: AttentionBackend) -> int:
    """Of one token in one layer, as the backend's own shape of the cache has it."""
    return math.prod(backend.kv_cache_shape(1, BLOCK_SIZE)) * 2 // BLOCK_SIZE


@torch.inference_mode()
def milliseconds(name: str, spec: AttentionSpec, sequences: int, length: int) -> float:
    """Of one call with one token for each sequence: the best of some, as other load on the machine comes and goes."""
    backend, blocks = build(name, spec), length // BLOCK_SIZE
    cache = torch.randn(backend.kv_cache_shape(sequences * blocks + 1, BLOCK_SIZE)).bfloat16()
    table = torch.arange(1, sequences * blocks + 1, dtype=torch.int32).view(sequences, blocks)
    metadata = AttentionMetadata(
        query_start=torch.arange(sequences + 1, dtype=torch.int32),
        sequence_lengths=torch.full((sequences,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1,
        max_query_length=1,
        max_sequence_length=length,
        query_start_list=list(range(sequences + 1)),
        sequence_lengths_list=[length] * sequences,
    )
    positions, turns = torch.full((sequences,), length - 1), torch.randn(length, spec.rotary_dim)
    rows = torch.randn(sequences, spec.row_width).bfloat16()
    step = lambda: backend.rotate_and_attend(rows.clone(), positions, turns, cache, metadata)  # noqa: E731
    return 1000 * min(timeit.repeat(step, number=1, repeat=ROUNDS))


def main() -> None:
    """Print two tables; each of tp ranks holds its own heads, or the whole latent."""
    print(f"{'model':18} {'tp':>3} {'heads, bytes a token and rank':>30} {'latents':>9} {'ratio':>6}")
    for model, (layers, *_) in MODELS.items():
        for ranks in (1, 8):
            whole, latents = (bytes_of(build("torch", spec)) for spec in specs(model, ranks))
            print(f"{model:18} {ranks:3} {layers * whole:30,} {layers * latents:9,} {whole / latents:5.1f}x")
    print(f"\n{'sequences':>9} {'tokens':>7} {'avx512, heads, ms':>18} {'torch, latents, ms':>19}")
    for sequences, length in BATCHES:
        over_heads, over_latents = specs("DeepSeek-V2-Lite", 1)
        heads = milliseconds("avx512", over_heads, sequences, length)
        print(f"{sequences:9} {length:7} {heads:18.2f} {milliseconds('torch', over_latents, sequences, length):19.2f}")


if __name__ == "__main__":
    main()
