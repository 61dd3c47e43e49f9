"""Layers of experts on real ranks, and what they are compared with: each token through its experts, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.nn import functional

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.communicator import Communicator
from fourfold.contracts.parallel_layer import ParallelLayer
from fourfold.entries import ComputeContext, ParallelLayerContext
from fourfold.layers.router import Router
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.layers.torch_operators import TorchOperators
from fourfold.models.description import MixtureDescription
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank

HIDDEN: Final = 32
MAX_TOKENS: Final = 64
ROWS: Final = (1, 2, 5, MAX_TOKENS)
PLAIN: Final = MixtureDescription(num_experts=7, top_k=3, intermediate_size=24)
MIXTURES: Final[Mapping[str, MixtureDescription]] = {
    "plain": PLAIN,
    "shared": replace(PLAIN, shared_intermediate_size=40, shared_gate=True, normalize=True),
    "grouped": MixtureDescription(
        num_experts=8,
        top_k=3,
        intermediate_size=16,
        scoring="sigmoid",
        normalize=True,
        scale=2.5,
        num_groups=4,
        top_groups=2,
        group_score="top2_sum",
        score_bias=True,
        shared_intermediate_size=24,
    ),
}
_CPU: Final = torch.device("cpu")


def whole_weights(mixture: MixtureDescription) -> dict[str, torch.Tensor]:
    """Every parameter of a layer, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (mixture.num_experts, HIDDEN)}
    if mixture.score_bias:
        shapes["router.bias"] = (mixture.num_experts,)
    blocks = {f"experts.{expert}": mixture.intermediate_size for expert in range(mixture.num_experts)}
    if mixture.shared_intermediate_size:
        blocks["shared"] = mixture.shared_intermediate_size
    if mixture.shared_gate:
        shapes["shared_gate.weight"] = (1, HIDDEN)
    for name, inner in blocks.items():
        shapes |= {f"{name}.gate.weight": (inner, HIDDEN), f"{name}.up.weight": (inner, HIDDEN)}
        shapes[f"{name}.down.weight"] = (HIDDEN, inner)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def tokens(rows: int, seed: int = 0) -> torch.Tensor:
    """[rows, H] of noise."""
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def expected(mixture: MixtureDescription, x: torch.Tensor) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    weights = whole_weights(mixture)
    logits = functional.linear(x, weights["router.weight"])
    ids, shares = Router(mixture)(logits, weights.get("router.bias"))
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(ids[token].tolist(), shares[token]):
            out[token] += share * _feed_forward(weights, f"experts.{expert}", x[token])
    if mixture.shared_intermediate_size:
        shared = _feed_forward(weights, "shared", x)
        if mixture.shared_gate:
            shared = shared * torch.sigmoid(functional.linear(x, weights["shared_gate.weight"]))
        out = out + shared
    return out


def _feed_forward(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    gate = functional.silu(functional.linear(x, weights[f"{name}.gate.weight"]))
    return functional.linear(gate * functional.linear(x, weights[f"{name}.up.weight"]), weights[f"{name}.down.weight"])


def layer_context(
    mixture: MixtureDescription,
    communicator: Communicator | None = None,
    *,
    plugins: Mapping[str, Any] | None = None,
    **backends: str,
) -> ParallelLayerContext:
    """Of one layer in float32; ``plugins`` are settings by plugin, ``backends`` names by option."""
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        backends=BackendConfig(experts="loop", **backends),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=MAX_TOKENS),
        plugins=plugins or {},
    )
    compute = ComputeContext(config=config, device=_CPU, dtype=torch.float32)
    return ParallelLayerContext(
        config=config,
        device=_CPU,
        dtype=torch.float32,
        rank=0 if communicator is None else communicator.rank,
        world_size=1 if communicator is None else communicator.world_size,
        communicator=communicator,
        linear_method=TorchLinearMethod(compute),
        in_features=HIDDEN,
        out_sizes=(HIDDEN,),
        mixture=mixture,
        operators=TorchOperators(compute),
        registry=load_plugins(),
    )


class Recorded:
    """A checkpoint tensor that tells when it is read."""

    def __init__(self, name: str, tensor: torch.Tensor, read: list[str]) -> None:
        self._name, self._tensor, self._read = name, tensor, read
        self.shape: Sequence[int] = tensor.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        self._read.append(self._name)
        return self._tensor[index]


def fill(layer: ParallelLayer, mixture: MixtureDescription) -> list[int]:
    """Load everything; the experts of which something was read."""
    read: list[str] = []
    for name, tensor in whole_weights(mixture).items():
        layer.load(name, Recorded(name, tensor, read))
    return sorted({int(name.split(".")[1]) for name in read if name.startswith("experts.")})


def check(layer: ParallelLayer, mixture: MixtureDescription) -> None:
    """Batches down to one token give what they should."""
    for seed, rows in enumerate(ROWS):
        x = tokens(rows, seed)
        torch.testing.assert_close(layer(x.clone()), expected(mixture, x), rtol=1e-5, atol=1e-5)


def agrees(rank: Rank, name: str, communicator: str, mixture: str, backends: dict[str, str]) -> list[int]:
    """Two layers in a row, as in a model; the experts that this rank has read."""
    description, entry = MIXTURES[mixture], load_plugins().parallel_layers()["moe", name]
    with connected(rank, communicator, "cpu") as connection:
        context = layer_context(description, connection, **backends)
        layers = [entry.build(context) for _ in range(2)]
        read = [fill(layer, description) for layer in layers]
        for layer in layers:
            check(layer, description)
        return read[0]
