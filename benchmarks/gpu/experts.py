"""Times a layer of experts against its floor: the weights of those that are used at the copy rate, or the products.

    python benchmarks/gpu/experts.py [--tune]

With torch's grouped products beside ours; weights rotate, so that nothing stays in the cache between calls.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from kernels import BF16, COMPUTE, DEVICE, Table
from models import BANDWIDTH, PRODUCT

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ExpertsContext
from fourfold.layers.grouped_experts import GroupedExperts
from fourfold_kernels_triton.experts import TILES, ProductTile, TritonExperts
from fourfold_kernels_triton.graph_operators import GraphOperators

SHAPES = {
    "qwen3-30b-a3b": {"count": 128, "hidden": 2048, "inner": 768, "each": 8},
    "mixtral-8x7b": {"count": 8, "hidden": 4096, "inner": 14336, "each": 2},
}
LAYERS = 4
TUNED = (
    ProductTile(rows=16, outs=32, columns=64, warps=4, stages=4),
    ProductTile(rows=16, outs=32, columns=128, warps=4, stages=3),
    ProductTile(rows=16, outs=64, columns=64, warps=4, stages=4),
    ProductTile(rows=16, outs=64, columns=128, warps=4, stages=3),
    ProductTile(rows=16, outs=64, columns=128, warps=8, stages=3),
    ProductTile(rows=16, outs=128, columns=64, warps=4, stages=4),
    ProductTile(rows=32, outs=64, columns=64, warps=4, stages=4),
    ProductTile(rows=32, outs=64, columns=128, warps=4, stages=3),
    ProductTile(rows=64, outs=64, columns=64, warps=4, stages=4),
    ProductTile(rows=64, outs=128, columns=64, warps=8, stages=3),
)


def build(kind: type[Any], shape: dict[str, int]) -> Any:
    context = ExpertsContext(
        config=EngineConfig(),
        device=DEVICE,
        dtype=BF16,
        num_experts=shape["count"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        activation="silu",
        operators=GraphOperators(COMPUTE),
    )
    experts = kind(context)
    experts._gate_up.normal_(std=0.02)
    experts._down.normal_(std=0.02)
    return experts


def stacks(shape: dict[str, int]) -> tuple[list[Any], list[Any]]:
    """Layers with weights of their own: as grouped products, and the same as ours."""
    ours = [build(TritonExperts, shape) for _ in range(LAYERS)]
    grouped = [build(GroupedExperts, shape | {"count": 1}) for _ in range(LAYERS)]
    for one, other in zip(grouped, ours):
        one._gate_up, one._down, one._slots = other._gate_up, other._down, other._slots
    return grouped, ours


def add(
    table: Table, name: str, shape: dict[str, int], layers: tuple[list[Any], list[Any]], rows: int, tune: bool
) -> None:
    """One size: grouped products, ours, and ours with each tile."""
    x = torch.randn(rows, shape["hidden"], device=DEVICE).to(BF16)
    ids = torch.rand(rows, shape["count"], device=DEVICE).argsort(dim=1)[:, : shape["each"]].int().contiguous()
    weights = torch.rand(rows, shape["each"], device=DEVICE)
    matrix = shape["hidden"] * shape["inner"]
    floor = max(6 * matrix * len(ids.unique()) / BANDWIDTH, 6 * matrix * ids.numel() / PRODUCT)
    title = f"{name} {rows} rows"
    for label, stack in zip(("grouped", "ours"), layers):
        table.add(f"{title}: {label}", [lambda e=one: e(x, ids, weights) for one in stack], floor)
    if tune:
        for tile in TUNED:
            calls = [lambda e=one, t=tile: e._multiply_few(x, ids, weights, t) for one in layers[1]]
            table.add(f"{title}: {tuple(tile)}", calls, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    tune = parser.parse_args().tune
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            table, layers = Table(), stacks(shape)
            sizes = (1, 8, 32, 128, 512, 1024, 4096, 16384) if name.startswith("qwen") else (1, 8, 32, 128, 8192)
            for rows in sizes:
                add(table, name, shape, layers, rows, tune and rows in (1, 32, 128, 512, 1024))
            table.run()
    print("tiles", TILES)


if __name__ == "__main__":
    main()
