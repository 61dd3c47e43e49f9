"""Shards of every kind reassemble to the whole layer, through the torch linear method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext, ParallelLayerContext
from fourfold.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from fourfold.layers.partition import cut_features, cut_heads
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.layers.torch_operators import TorchOperators
from fourfold.layers.vocabulary import ParallelHead, VocabParallelEmbedding

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, HIDDEN = 9, 3, 4, 12


class Sum:
    """A communicator that returns what it gets; the test adds the ranks' results up."""

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor, *, destination: int = 0, channel: int = 0) -> list[torch.Tensor]:
        return [tensor]


class Counted:
    """Tensor slices that count what is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.read = tensor, 0

    @property
    def shape(self) -> Sequence[int]:
        return self.tensor.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


def context(rank: int, world_size: int, in_features: int, out_sizes: tuple[int, ...], **more: Any) -> Any:
    compute = ComputeContext(config=EngineConfig(), device=CPU, dtype=torch.float32)
    return ParallelLayerContext(
        config=compute.config,
        device=CPU,
        dtype=torch.float32,
        rank=rank,
        world_size=world_size,
        communicator=None if world_size == 1 else Sum(),  # type: ignore[arg-type]
        linear_method=TorchLinearMethod(compute),
        in_features=in_features,
        out_sizes=out_sizes,
        **more,
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])


@worlds
def test_column(world_size: int) -> None:
    weight, bias, x = random(100, HIDDEN), random(100), random(5, HIDDEN)
    parts = []
    for rank in range(world_size):
        layer = ColumnParallelLinear(context(rank, world_size, HIDDEN, (100,), bias=True))
        slices = Counted(weight)
        layer.load("weight", slices)
        layer.load("bias", bias)
        parts.append(layer(x))
        assert slices.read == parts[-1].shape[1] * HIDDEN, "a rank reads its own rows and no others"
    torch.testing.assert_close(torch.cat(parts, dim=1), x @ weight.T + bias)


@worlds
def test_merged_column(world_size: int) -> None:
    gate, up, x = random(64, HIDDEN), random(60, HIDDEN), random(5, HIDDEN)
    gates, ups = [], []
    for rank in range(world_size):
        layer = MergedColumnParallelLinear(context(rank, world_size, HIDDEN, (64, 60)))
        layer.load("1.weight", up)
        layer.load("0.weight", gate)
        out = layer(x)
        width = len(cut_features(64, rank, world_size))
        gates.append(out[:, :width])
        ups.append(out[:, width:])
    torch.testing.assert_close(torch.cat(gates, dim=1), x @ gate.T)
    torch.testing.assert_close(torch.cat(ups, dim=1), x @ up.T)


@worlds
def test_qkv(world_size: int) -> None:
    weights = {part: random(heads * DIM, HIDDEN) for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    biases = {part: random(weight.shape[0]) for part, weight in weights.items()}
    x = random(5, HIDDEN)
    whole = {part: (x @ weights[part].T + biases[part]).view(5, -1, DIM) for part in weights}
    seen: list[int] = []
    for rank in range(world_size):
        layer = QKVParallelLinear(context(rank, world_size, HIDDEN, (HEADS, KV_HEADS, DIM), bias=True))
        for part in "vkq":
            layer.load(f"{part}.weight", weights[part])
            layer.load(f"{part}.bias", biases[part])
        cut = cut_heads(HEADS, KV_HEADS, rank, world_size)
        out = layer(x).view(5, -1, DIM)
        queries, keys, values = out.split([len(cut.heads), len(cut.kv_heads), len(cut.kv_heads)], dim=1)
        torch.testing.assert_close(queries, whole["q"][:, cut.heads.start : cut.heads.stop])
        seen += cut.heads
        torch.testing.assert_close(keys, whole["k"][:, cut.kv_heads.start : cut.kv_heads.stop])
        torch.testing.assert_close(values, whole["v"][:, cut.kv_heads.start : cut.kv_heads.stop])
    assert seen == list(range(HEADS))


@worlds
@pytest.mark.parametrize("by_heads", [False, True])
def test_row(world_size: int, by_heads: bool) -> None:
    features = HEADS * DIM
    weight, bias, x = random(HIDDEN, features), random(HIDDEN), random(5, features)
    total = torch.zeros(5, HIDDEN)
    for rank in range(world_size):
        in_heads = (HEADS, KV_HEADS, DIM) if by_heads else None
        layer = RowParallelLinear(context(rank, world_size, features, (HIDDEN,), bias=True, in_heads=in_heads))
        layer.load("weight", weight)
        layer.load("bias", bias)
        if by_heads:
            heads = cut_heads(HEADS, KV_HEADS, rank, world_size).heads
            columns = range(heads.start * DIM, heads.stop * DIM)
        else:
            columns = cut_features(features, rank, world_size)
        total += layer(x[:, columns.start : columns.stop])
    torch.testing.assert_close(total, x @ weight.T + bias)


@worlds
def test_vocabulary(world_size: int) -> None:
    vocab_size = 131
    table, ids, hidden = random(vocab_size, HIDDEN), torch.tensor([0, 63, 64, 127, 128, 130, 5]), random(4, HIDDEN)
    embedded = torch.zeros(7, HIDDEN)
    logits = []
    for rank in range(world_size):
        base = context(rank, world_size, HIDDEN, (vocab_size,))
        embedding = VocabParallelEmbedding(base)
        embedding.load("weight", table)
        embedded += embedding(ids)
        head = ParallelHead(replace(base, tied_weight=embedding.weight))
        part = head._method.apply(head._weight, hidden, out_dtype=torch.float32)
        logits.append(part)
    torch.testing.assert_close(embedded, table[ids])
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :vocab_size], hidden @ table.T)
    assert not torch.cat(logits, dim=1)[:, vocab_size:].any(), "padding rows are zero"


def test_untied_head() -> None:
    head = ParallelHead(context(0, 1, HIDDEN, (131,)))
    table, hidden = random(131, HIDDEN), random(4, HIDDEN)
    head.load("weight", table)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden @ table.T)


class Gathered:
    """A communicator that notes what the ranks give in a first round, and gives all of it in a second one."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.parts: list[torch.Tensor] = []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.parts) < self.world_size:
            self.parts.append(tensor)
            return tensor.repeat(self.world_size, 1)
        return torch.cat(self.parts)


@worlds
def test_the_best_token_needs_no_whole_logits(world_size: int) -> None:
    table, hidden = random(131, HIDDEN), random(6, HIDDEN)
    table[[7, 64, 130]] = table[[7, 64, 130]].sum(0)  # equal logits on several ranks: the first id is taken
    hidden[0] = table[7] * 9
    expected = (hidden @ table.T).argmax(-1)
    assert expected[0] == 7
    operators = TorchOperators(ComputeContext(config=EngineConfig(), device=CPU, dtype=torch.float32))
    gathered = Gathered(world_size)
    for round_ in range(2):
        for rank in range(world_size):
            head = ParallelHead(
                replace(context(rank, world_size, HIDDEN, (131,)), communicator=gathered if world_size > 1 else None)
            )
            head.load("weight", table)
            part = head.shard(hidden)
            broken = torch.tensor([False] * 5 + [rank == world_size - 1])
            token_ids, over_all = head.best(part, broken, operators)
            if round_ or world_size == 1:
                assert token_ids[:5].tolist() == expected[:5].tolist()
                assert over_all.tolist() == [False] * 5 + [True]
