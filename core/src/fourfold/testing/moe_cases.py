"""What ``MoEConformance`` runs on every rank: a moe layer over real processes, against one dense process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.parallel_layer import ParallelLayer
from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.entries import ComputeContext, ParallelLayerContext
from fourfold.layers.router import Router
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.layers.torch_operators import TorchOperators
from fourfold.models.description import MixtureDescription
from fourfold.plugins import load_plugins
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank

HIDDEN, INNER, NUM_EXPERTS = 32, 24, 5
SMALL: dict[str, Any] = {"num_experts": NUM_EXPERTS, "top_k": 2, "intermediate_size": INNER}
MIXTURES: tuple[dict[str, Any], ...] = (
    SMALL,
    {**SMALL, "top_k": 1, "normalize": True},
    {**SMALL, "top_k": NUM_EXPERTS},
    {**SMALL, "num_experts": 3, "top_k": 1, "shared_intermediate_size": 20, "shared_gate": True},
    {
        **SMALL,
        "num_experts": 6,
        "top_k": 3,
        "scoring": "sigmoid",
        "normalize": True,
        "scale": 2.5,
        "num_groups": 3,
        "top_groups": 2,
        "group_score": "top2_sum",
        "score_bias": True,
        "shared_intermediate_size": 40,
    },
)
TOLERANCE = 1e-4
Tensors = dict[str, torch.Tensor]
Backends = dict[str, str]
"""Fields of BackendConfig; ``parallel_layer`` is ``moe=`` and the layer, ``comm`` one name."""


class CountedSlices:
    """A tensor of a checkpoint that counts the elements that are read of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.num_read = 0

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        return self._tensor.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        taken = self._tensor[index]
        self.num_read += taken.numel()
        return taken


def computes(rank: Rank, backends: Backends) -> list[str]:
    """Every kind of mixture, for several numbers of tokens, none among them; digests of the bits that came out."""
    digests = []
    with grouped(rank, backends) as group:
        for number, settings in enumerate(MIXTURES):
            mixture = MixtureDescription(**settings)
            tensors = random_tensors(mixture, seed=number)
            moe, _ = build(group, backends, mixture, tensors)
            for count in (1, 33, 0, 7):
                x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))
                found = moe(x.clone())
                check(found, dense(mixture, tensors, x))
                digests.append(hashlib.sha256(found.numpy().tobytes()).hexdigest())
    return digests


def takes_other_weights(rank: Rank, backends: Backends) -> None:
    """Every parameter a second time, as an engine does that is given another model, or wakes up."""
    mixture = MixtureDescription(**MIXTURES[-1])
    with grouped(rank, backends) as group:
        moe, _ = build(group, backends, mixture, random_tensors(mixture, seed=5))
        others = random_tensors(mixture, seed=6)
        for name, tensor in others.items():
            moe.load(name, CountedSlices(tensor))
        x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
        check(moe(x.clone()), dense(mixture, others, x))


def takes_all_tokens_to_one_expert(rank: Rank, backends: Backends) -> None:
    """The first and the last expert in turn."""
    mixture = MixtureDescription(**{**SMALL, "top_k": 1})
    with grouped(rank, backends) as group:
        for expert in (0, NUM_EXPERTS - 1):
            tensors = random_tensors(mixture, seed=expert)
            tensors["router.weight"].zero_()[expert, 0] = 50.0
            moe, _ = build(group, backends, mixture, tensors)
            x = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(1))
            x[:, 0] = 1.0
            check(moe(x.clone()), dense(mixture, tensors, x))


def keeps_rows_apart(rank: Rank, backends: Backends) -> None:
    """A row of NaN spoils no other."""
    mixture = MixtureDescription(**SMALL)
    tensors = random_tensors(mixture, seed=3)
    with grouped(rank, backends) as group:
        moe, _ = build(group, backends, mixture, tensors)
        x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
        expected = dense(mixture, tensors, x)
        x[4] = torch.nan
        found = moe(x.clone())
        others = torch.arange(9) != 4
        check(found[others], expected[others])


def reads(rank: Rank, backends: Backends) -> list[int]:
    """Elements of experts that this rank read, and those that there are."""
    mixture = MixtureDescription(**SMALL)
    tensors = random_tensors(mixture, seed=4)
    with grouped(rank, backends) as group:
        _, slices = build(group, backends, mixture, tensors)
    mine = [name for name in tensors if name.startswith("experts.")]
    return [sum(slices[name].num_read for name in mine), sum(tensors[name].numel() for name in mine)]


@contextmanager
def grouped(rank: Rank, backends: Backends) -> Iterator[GroupCoordinator]:
    """All ranks as one group."""
    with ExitStack() as stack:
        communicator = stack.enter_context(connected(rank, backends["comm"], "cpu")) if rank.world_size > 1 else None
        yield GroupCoordinator(
            name="ep", ranks=tuple(range(rank.world_size)), rank=rank.rank, communicator=communicator
        )


def build(
    group: GroupCoordinator, backends: Backends, mixture: MixtureDescription, tensors: Tensors
) -> tuple[ParallelLayer, dict[str, CountedSlices]]:
    """The layer with its weights, cut over ``group``, and what it read of each tensor."""
    return build_from(context_of(group, backends, mixture), backends, tensors)


def context_of(
    group: GroupCoordinator, backends: Backends, mixture: MixtureDescription, *, plugins: dict[str, Any] | None = None
) -> ParallelLayerContext:
    """What the moe layers of one decoder are built from; ``plugins`` are settings by plugin."""
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        parallel=ParallelConfig(tensor_parallel_size=group.world_size),
        backends=BackendConfig(**backends),
        plugins=plugins or {},
    )
    device = torch.device("cpu")
    compute = ComputeContext(config=config, device=device, dtype=torch.float32)
    return ParallelLayerContext(
        config=config,
        device=device,
        dtype=torch.float32,
        rank=group.rank,
        world_size=group.world_size,
        communicator=group.communicator,
        linear_method=TorchLinearMethod(compute),
        in_features=HIDDEN,
        out_sizes=(HIDDEN,),
        operators=TorchOperators(compute),
        mixture=mixture,
        registry=load_plugins(),
        expert_group=group,
    )


def build_from(
    context: ParallelLayerContext, backends: Backends, tensors: Tensors
) -> tuple[ParallelLayer, dict[str, CountedSlices]]:
    """The next moe layer of a decoder, with its weights."""
    layer = backends["parallel_layer"].removeprefix("moe=")
    moe: ParallelLayer = load_plugins().parallel_layers()["moe", layer].build(context)
    slices = {name: CountedSlices(tensor) for name, tensor in tensors.items()}
    for name, tensor in slices.items():
        moe.load(name, tensor)
    return moe, slices


def random_tensors(mixture: MixtureDescription, *, seed: int) -> Tensors:
    """Every parameter of a moe layer, by the layer's name of it; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tensors = {"router.weight": 2 * random(mixture.num_experts, HIDDEN)}
    if mixture.score_bias:
        tensors["router.bias"] = random(mixture.num_experts)
    blocks = {f"experts.{expert}": mixture.intermediate_size for expert in range(mixture.num_experts)}
    if mixture.shared_intermediate_size:
        blocks["shared"] = mixture.shared_intermediate_size
    for block, inner in blocks.items():
        tensors[f"{block}.gate.weight"] = random(inner, HIDDEN)
        tensors[f"{block}.up.weight"] = random(inner, HIDDEN)
        tensors[f"{block}.down.weight"] = random(HIDDEN, inner)
    if mixture.shared_gate:
        tensors["shared_gate.weight"] = random(1, HIDDEN)
    return tensors


def dense(mixture: MixtureDescription, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens in one process, weighted by 0 where a token does not go. fp32 [T, H]."""
    ids, weights = Router(mixture)(functional.linear(x, tensors["router.weight"]), tensors.get("router.bias"))
    factors = torch.zeros(len(x), mixture.num_experts).scatter_(1, ids.long(), weights)
    out = torch.zeros_like(x)
    for expert in range(mixture.num_experts):
        out += factors[:, expert, None] * _feed_forward(tensors, f"experts.{expert}", x)
    if mixture.shared_intermediate_size:
        shared = _feed_forward(tensors, "shared", x)
        out += torch.sigmoid(x @ tensors["shared_gate.weight"].T) * shared if mixture.shared_gate else shared
    return out


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in shape and dtype, and near in value."""
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _feed_forward(tensors: Tensors, block: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{block}.{part}.weight"] for part in ("gate", "up", "down"))
    inner = functional.silu(x @ gate.T) * (x @ up.T)
    return inner @ down.T
