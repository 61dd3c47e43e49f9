"""Adapters on layers that are cut: the ranks together add what the whole matrices would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext, ParallelLayerContext
from fourfold.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from fourfold.layers.lora_linear import LoraLinearMethod
from fourfold.layers.torch_linear import TorchLinearMethod

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, HIDDEN, RANK = 9, 3, 8, 40, 4
worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def lora() -> LoraLinearMethod:
    plain = TorchLinearMethod(ComputeContext(config=EngineConfig(), device=CPU, dtype=torch.float32))
    return LoraLinearMethod(plain, device=CPU, dtype=torch.float32)


def context(method: LoraLinearMethod, rank: int, world_size: int, into: int, outs: Any, **more: Any) -> Any:
    return ParallelLayerContext(
        config=EngineConfig(),
        device=CPU,
        dtype=torch.float32,
        rank=rank,
        world_size=world_size,
        communicator=None,
        linear_method=method,
        in_features=into,
        out_sizes=outs,
        **more,
    )


@worlds
def test_layers_that_cut_outputs(world_size: int) -> None:
    kinds = [
        (QKVParallelLinear, (HEADS, KV_HEADS, DIM), {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}),
        (MergedColumnParallelLinear, (64, 64), {"0": 64, "1": 64}),
    ]
    for kind, outs, parts in kinds:
        weights = {part: random(size, HIDDEN) for part, size in parts.items()}
        adapters = {part: (random(RANK, HIDDEN), random(size, RANK)) for part, size in parts.items()}
        x = random(5, HIDDEN)
        for rank in range(world_size):
            outputs = []
            for merged in (False, True):
                method = lora()
                layer = kind(context(method, rank, world_size, HIDDEN, outs))
                for part, weight in weights.items():
                    a, b = adapters[part]
                    layer.load(f"{part}.weight", weight + b @ a if merged else weight)
                    if not merged:
                        with method.storing(1, whole_a=a):
                            layer.load(f"{part}.weight", b)
                method.rows = () if merged else ((1, None),)
                outputs.append(layer(x))
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@worlds
def test_layers_that_cut_inputs(world_size: int) -> None:
    weight, a, b, x = random(HIDDEN, 64), random(RANK, 64), random(HIDDEN, RANK), random(5, 64)
    total = torch.zeros(5, HIDDEN)
    first = 0
    for rank in range(world_size):
        method = lora()
        layer = RowParallelLinear(context(method, rank, world_size, 64, (HIDDEN,)))
        layer.load("weight", weight)
        with method.storing(1, whole_b=b):
            layer.load("weight", a)
        method.rows = ((1, None),)
        width = layer._weight.in_features
        total += layer(x[:, first : first + width])
        first += width
    torch.testing.assert_close(total, x @ (weight + b @ a).T, rtol=1e-4, atol=1e-4)


def test_each_token_has_its_own_adapter_or_none() -> None:
    method = lora()
    layer = RowParallelLinear(context(method, 0, 1, 64, (HIDDEN,)))
    weight, x = random(HIDDEN, 64), random(6, 64)
    layer.load("weight", weight)
    plain = layer(x)
    pairs = {slot: (random(RANK, 64), random(HIDDEN, RANK)) for slot in (1, 2)}
    for slot, (a, b) in pairs.items():
        with method.storing(slot, whole_b=b):
            layer.load("weight", a)
    method.rows = ((1, torch.tensor([0, 4])), (2, torch.tensor([5, 2, 3])))
    expected = plain.clone()
    for slot, rows in ((1, [0, 4]), (2, [5, 2, 3])):
        a, b = pairs[slot]
        expected[rows] += x[rows] @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    method.drop(2)
    out = layer(x)
    assert torch.equal(out[[1, 2, 3, 5]], plain[[1, 2, 3, 5]])
    method.rows = ()
    assert torch.equal(layer(x), plain)
