"""Torch attention against a plain loop over positions, for what the families' tests do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionContext
from fourfold.layers import torch_attention
from fourfold.layers.torch_attention import TorchAttention

BLOCK = 4


def attention(**settings: Any) -> TorchAttention:
    spec = AttentionSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.3, **settings})
    context = AttentionContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32, spec=spec)
    return TorchAttention(context)


def one_sequence(length: int, slots: list[int]) -> AttentionMetadata:
    """``slots`` of the last tokens."""
    count = len(slots)
    return AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        sequence_lengths=torch.tensor([length], dtype=torch.int32),
        block_table=torch.tensor([[3, 1, 5, 2]], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_query_length=count,
        max_sequence_length=length,
        query_start_list=[0, count],
        sequence_lengths_list=[length],
    )


def slots_of(length: int) -> list[int]:
    return [[3, 1, 5, 2][place // BLOCK] * BLOCK + place % BLOCK for place in range(length)]


def by_hand(heads: torch.Tensor, window: int, cap: float) -> torch.Tensor:
    """[T, 4 + 2 + 2 heads, 8] -> [T, 4 * 8], position by position in fp64."""
    heads = heads.double()
    out = torch.zeros(heads.shape[0], 4, 8, dtype=torch.float64)
    for token in range(heads.shape[0]):
        low = max(0, token - window + 1) if window else 0
        for head in range(4):
            scores = heads[low : token + 1, 4 + head // 2] @ heads[token, head] * 0.3
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[token, head] = scores.softmax(0) @ heads[low : token + 1, 6 + head // 2]
    return out.flatten(1).float()


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [3, 256])
def test_one_prompt(window: int, cap: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_QUERY_CHUNK", chunk)
    backend = attention(sliding_window=window, soft_cap=cap)
    cache = torch.full(backend.kv_cache_shape(8, BLOCK), torch.nan)
    qkv = torch.randn(13, 8 * 8, generator=torch.Generator().manual_seed(0))
    out = backend.rotate_and_attend(qkv.clone(), torch.arange(13), None, cache, one_sequence(13, slots_of(13)))
    torch.testing.assert_close(out, by_hand(qkv.view(13, 8, 8), window, cap))


def test_slots_of_minus_one_write_nothing() -> None:
    backend = attention()
    cache = torch.zeros(backend.kv_cache_shape(8, BLOCK))
    qkv = torch.ones(3, 8 * 8)
    backend.rotate_and_attend(qkv, torch.arange(3), None, cache, one_sequence(3, [-1, 13, -1]))
    written = cache.flatten(1, 2).abs().sum(dim=(0, 2, 3)).nonzero().flatten()
    assert written.tolist() == [13]


def test_partial_rotation_leaves_the_rest() -> None:
    backend = attention(rotary_dim=4)
    cache = torch.zeros(backend.kv_cache_shape(8, BLOCK))
    cos_sin = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(4, 4)  # a quarter turn everywhere
    qkv = torch.arange(64.0).view(1, 64)
    backend.rotate_and_attend(qkv.clone(), torch.tensor([2]), cos_sin, cache, one_sequence(1, [12]))
    key = cache[0, 3, 0, 0].tolist()
    first = 4 * 8
    assert key == [-(first + 2), -(first + 3), first, first + 1, first + 4, first + 5, first + 6, first + 7]


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (0, 1.5)])
def test_keys_that_are_values_are_attended_as_if_they_were_there_twice(window: int, cap: float) -> None:
    rows = torch.randn(14, 5, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for shared in (False, True):
        backend = attention(num_kv_heads=1, sliding_window=window, soft_cap=cap, shared_values=shared)
        cache = torch.full(backend.kv_cache_shape(8, BLOCK), torch.nan)
        qkv = rows if shared else torch.cat((rows, rows[:, 4:]), dim=1)
        for first, last in ((0, 12), (12, 13), (13, 14)):
            steps = one_sequence(last, slots_of(last)[first:])
            tokens = qkv[first:last].flatten(1).clone()
            found.append(backend.rotate_and_attend(tokens, torch.arange(first, last), None, cache, steps))
    torch.testing.assert_close(torch.cat(found[3:]), torch.cat(found[:3]))
