"""What every attention backend must do: agree with core's torch twin. A test sets ``name`` and maybe ``dtypes``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype, ModelConfig
from fourfold.contracts.attention_backend import AttentionBackend, AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionBackendEntry, AttentionContext
from fourfold.layers.torch_attention import TorchAttention
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance
from fourfold.testing.linear_method import assert_near

BLOCK_SIZE = 16
SPECS = (
    AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, rotary_dim=64),
    AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=32, scale=0.2, sliding_window=20, rotary_dim=16),
    AttentionSpec(num_heads=8, num_kv_heads=1, head_dim=128, scale=0.09, soft_cap=30.0),
    AttentionSpec(num_heads=5, num_kv_heads=2, head_dim=64, scale=0.125, rotary_dim=64, group_sizes=(3, 2)),
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, sliding_window=20, group_sizes=(1, 3)),
)
LATENTS = AttentionSpec(num_heads=5, num_kv_heads=1, head_dim=80, scale=0.1, rotary_dim=16, shared_values=True)
BATCHES = (
    ((0, 1),),
    ((0, 40), (0, 7)),
    ((33, 1), (5, 1), (0, 1)),
    ((16, 17), (0, 5), (63, 1), (15, 1)),
)
"""Sequences as (tokens in the cache, new tokens): prompts, chunks, decodes, and all of them in one batch."""


class AttentionConformance(Conformance):
    """The attention contract, against ``TorchAttention`` in float32."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[Dtype, ...]] = ("float32", "bfloat16")
    """The precisions that it claims."""
    specs: ClassVar[tuple[AttentionSpec, ...]] = SPECS
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def entry(self) -> AttentionBackendEntry:
        """The entry; skips, with its reason, where it cannot run."""
        torch.manual_seed(0)
        entry = load_plugins().attention_backends()[self.name]
        for dtype in self.dtypes:
            suits = entry.suits(EngineConfig(model=ModelConfig(dtype=dtype)))
            if suits.score <= 0:
                pytest.skip(f"{self.name} cannot run here: {suits.reason}")
        return entry

    def test_it_agrees_with_the_twin(self, entry: AttentionBackendEntry) -> None:
        for dtype in self.dtypes:
            for spec in self.specs:
                for batch in BATCHES:
                    self.check(entry, dtype, spec, batch)

    def test_it_keeps_keys_that_are_values_once(self, entry: AttentionBackendEntry) -> None:
        if "latent_cache" not in entry.capabilities:
            pytest.skip(f"{self.name} does not claim latent_cache")
        for dtype in self.dtypes:
            for batch in BATCHES:
                self.check(entry, dtype, LATENTS, batch)
            shapes = [
                entry.build(self.context(dtype, spec)).kv_cache_shape(3, BLOCK_SIZE)
                for spec in (LATENTS, replace(LATENTS, shared_values=False))
            ]
            assert 2 * math.prod(shapes[0]) == math.prod(shapes[1])

    def test_it_keeps_an_fp8_cache_as_the_twin_does(self, entry: AttentionBackendEntry) -> None:
        if "fp8_cache" not in entry.capabilities:
            pytest.skip(f"{self.name} does not claim fp8_cache")
        for dtype in self.dtypes:
            for spec in self.specs:
                for batch in BATCHES[2:]:
                    found, expected = self.outputs(entry, dtype, spec, batch, cache="fp8")
                    # What the twin keeps is not rounded to the dtype before, and now and then falls to the other side.
                    error = (found.float() - expected).norm() / expected.norm()
                    assert error < (1e-3 if dtype == "float32" else 0.03), (dtype, spec, batch)

    def test_tokens_without_a_slot_are_not_written(self, entry: AttentionBackendEntry) -> None:
        for dtype in self.dtypes:
            backend = entry.build(self.context(dtype, self.specs[0]))
            cache = torch.zeros(backend.kv_cache_shape(4, BLOCK_SIZE), dtype=getattr(torch, dtype), device=self.device)
            metadata = self.metadata(((0, 3),), [[1]])
            metadata.slot_mapping.fill_(-1)
            self.run(
                backend,
                torch.randn(3, self.specs[0].row_width),
                dtype,
                ((0, 3),),
                cache=cache,
                metadata=metadata,
                cos_sin=None,
            )
            assert bool((cache == 0).all())

    def check(
        self, entry: AttentionBackendEntry, dtype: Dtype, spec: AttentionSpec, batch: Sequence[tuple[int, int]]
    ) -> None:
        """Fill a cache with each sequence's first tokens, then compare the output of its new ones."""
        found, expected = self.outputs(entry, dtype, spec, batch)
        assert_near(found, expected, dtype, getattr(torch, dtype))

    def outputs(
        self,
        entry: AttentionBackendEntry,
        dtype: Dtype,
        spec: AttentionSpec,
        batch: Sequence[tuple[int, int]],
        *,
        cache: Literal["auto", "fp8"] = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The backend's, and the twin's in float32."""
        per_sequence = [-(-(old + new) // BLOCK_SIZE) for old, new in batch]
        order = (1 + torch.randperm(sum(per_sequence))).tolist()
        tables = [[order.pop() for _ in range(count)] for count in per_sequence]
        tokens = [torch.randn(old + new, spec.row_width).to(getattr(torch, dtype)).float() for old, new in batch]
        turns = torch.randn(128, spec.rotary_dim // 2)
        cos_sin = torch.cat([turns.cos(), turns.sin()], dim=1) if spec.rotary_dim else None
        outputs = []
        kinds: tuple[tuple[Dtype, Any], ...] = ((dtype, entry.build), ("float32", TorchAttention))
        for kept, build in kinds:
            context = self.context(kept, spec, cache=cache)
            backend = build(context)
            shape = backend.kv_cache_shape(sum(per_sequence) + 2, BLOCK_SIZE)
            # memory that nobody wrote may hold anything; a backend must not let it through
            memory = torch.full(shape, float("nan"), device=self.device).to(context.cache_dtype)
            for sequence, (old, _) in enumerate(batch):
                if old:
                    first = self.metadata(((0, old),), [tables[sequence]])
                    self.run(
                        backend,
                        tokens[sequence][:old],
                        kept,
                        ((0, old),),
                        cache=memory,
                        metadata=first,
                        cos_sin=cos_sin,
                    )
            new = torch.cat([rows[old:] for rows, (old, _) in zip(tokens, batch)])
            metadata = self.metadata(batch, tables)
            outputs.append(self.run(backend, new, kept, batch, cache=memory, metadata=metadata, cos_sin=cos_sin))
        return outputs[0], outputs[1]

    def run(
        self,
        backend: AttentionBackend,
        tokens: torch.Tensor,
        dtype: str,
        batch: Sequence[tuple[int, int]],
        *,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        cos_sin: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call of the backend."""
        qkv = tokens.to(getattr(torch, dtype)).to(self.device, copy=True)
        positions = torch.cat([torch.arange(old, old + new) for old, new in batch]).to(self.device)
        turned = None if cos_sin is None else cos_sin.to(self.device)
        return backend.rotate_and_attend(qkv, positions, turned, cache, metadata)

    def metadata(self, batch: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> AttentionMetadata:
        """Metadata of ``batch`` whose sequences live in the blocks of ``tables``; unused table entries are garbage."""
        starts = [0]
        for _, new in batch:
            starts.append(starts[-1] + new)
        lengths = [old + new for old, new in batch]
        table = torch.full((len(batch), max(map(len, tables)) + 2), -7, dtype=torch.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for blocks, (old, new) in zip(tables, batch)
            for position in range(old, old + new)
        ]
        return AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=self.device),
            sequence_lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            max_query_length=max(new for _, new in batch),
            max_sequence_length=max(lengths),
            query_start_list=starts,
            sequence_lengths_list=lengths,
        )

    def twin(self, spec: AttentionSpec) -> TorchAttention:
        """Core's own, in float32."""
        return TorchAttention(self.context("float32", spec))

    def context(self, dtype: Dtype, spec: AttentionSpec, *, cache: Literal["auto", "fp8"] = "auto") -> AttentionContext:
        """What a backend is built from."""
        config = EngineConfig(model=ModelConfig(dtype=dtype), cache=CacheConfig(kv_cache_dtype=cache))
        return AttentionContext(config=config, device=torch.device(self.device), dtype=getattr(torch, dtype), spec=spec)
