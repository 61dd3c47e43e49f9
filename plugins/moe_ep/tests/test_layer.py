from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.communicator import Communicator
from fourfold.entries import ComputeContext, ParallelLayerContext
from fourfold.errors import ConfigError
from fourfold.layers.mixture import MixtureParallelLayer
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold.layers.torch_operators import TorchOperators
from fourfold.models.description import MixtureDescription
from fourfold.plugins import load_plugins
from fourfold.selection import select
from fourfold.testing.communicator_cases import connected
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool
from fourfold_moe_ep.layer import ExpertParallelLayer
from fourfold_moe_ep.settings import ExpertParallelSettings

Pool = Callable[[int], RankPool]
HIDDEN = 32
MIXTURE = MixtureDescription(num_experts=7, top_k=3, intermediate_size=24)
WITH_SHARED = replace(MIXTURE, shared_intermediate_size=40, shared_gate=True, normalize=True)
WIRES = ["auto", "allgather_reducescatter", "all_to_all_single", "shm"]
CPU = torch.device("cpu")


def whole_weights(mixture: MixtureDescription) -> dict[str, torch.Tensor]:
    """Every parameter of a layer, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"router.weight": (mixture.num_experts, HIDDEN)}
    blocks = {f"experts.{expert}": mixture.intermediate_size for expert in range(mixture.num_experts)}
    if mixture.shared_intermediate_size:
        blocks["shared"] = mixture.shared_intermediate_size
        shapes["shared_gate.weight"] = (1, HIDDEN)
    for name, inner in blocks.items():
        shapes |= {f"{name}.gate.weight": (inner, HIDDEN), f"{name}.up.weight": (inner, HIDDEN)}
        shapes[f"{name}.down.weight"] = (HIDDEN, inner)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def layer_context(
    mixture: MixtureDescription,
    communicator: Communicator | None = None,
    *,
    all_to_all: str = "auto",
    placement: str = "auto",
    redundant: int = 0,
) -> ParallelLayerContext:
    backends = BackendConfig(all_to_all=all_to_all, expert_placement=placement, experts="loop")
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        backends=backends,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
        plugins={"moe-ep": ExpertParallelSettings(redundant_experts=redundant)},
    )
    compute = ComputeContext(config=config, device=CPU, dtype=torch.float32)
    return ParallelLayerContext(
        config=config,
        device=CPU,
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

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._read.append(self._name)
        return self._tensor[index]


def fill(layer: Any, mixture: MixtureDescription) -> list[str]:
    """Load everything; the names of what was read."""
    read: list[str] = []
    for name, tensor in whole_weights(mixture).items():
        layer.load(name, Recorded(name, tensor, read))
    return read


def whole(mixture: MixtureDescription, x: torch.Tensor) -> torch.Tensor:
    """What one rank with all experts makes of it."""
    layer = MixtureParallelLayer(layer_context(mixture))
    fill(layer, mixture)
    return layer(x)


def agrees(rank: Rank, all_to_all: str, placement: str, shared: bool, redundant: int) -> list[int]:
    """Compares with the whole, for batches down to one token; experts that were read."""
    mixture = WITH_SHARED if shared else MIXTURE
    with connected(rank, "shm", "cpu") as communicator:
        context = layer_context(mixture, communicator, all_to_all=all_to_all, placement=placement, redundant=redundant)
        layers = [ExpertParallelLayer(context) for _ in range(2)]
        read = [fill(layer, mixture) for layer in layers].pop()
        for seed, rows in enumerate((1, 2, 5, 64)):
            x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
            expected = whole(mixture, x)
            for layer in layers:
                torch.testing.assert_close(layer(x.clone()), expected, rtol=1e-5, atol=1e-5)
    return sorted({int(name.split(".")[1]) for name in read if name.startswith("experts.")})


@pytest.mark.parametrize("all_to_all", WIRES)
@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks_agree_with_one(rank_pool: Pool, all_to_all: str, shared: bool) -> None:
    assert rank_pool(2).run(agrees, all_to_all, "linear", shared, 0) == [[0, 1, 2, 3], [4, 5, 6]]


def test_neighbours_are_placed_apart(rank_pool: Pool) -> None:
    assert rank_pool(3).run(agrees, "shm", "round-robin", True, 0) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("all_to_all", ["auto", "shm"])
def test_copies_of_experts_share_their_tokens(rank_pool: Pool, all_to_all: str) -> None:
    # physical experts 7, 8 and 9 are second copies of 0, 1 and 2
    assert rank_pool(2).run(agrees, all_to_all, "linear", False, 3) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]


def test_one_rank_needs_nobody() -> None:
    layer = ExpertParallelLayer(layer_context(WITH_SHARED, redundant=2))
    fill(layer, WITH_SHARED)
    x = torch.randn(9, HIDDEN)
    torch.testing.assert_close(layer(x), whole(WITH_SHARED, x), rtol=1e-5, atol=1e-5)
    assert layer.backends == {"experts": "loop", "expert_placement": "linear", "all_to_all": "none"}


def refused(rank: Rank) -> str:
    with connected(rank, "shm", "cpu") as communicator, pytest.raises(ConfigError) as error:
        ExpertParallelLayer(layer_context(replace(MIXTURE, num_experts=1, top_k=1), communicator))
    return str(error.value)


def test_fewer_experts_than_ranks_are_refused(rank_pool: Pool) -> None:
    assert set(rank_pool(2).run(refused)) == {
        "1 experts cannot be spread over 2 ranks; take fewer ranks, or --moe-ep-redundant-experts to copy experts"
    }


@pytest.mark.parametrize(("asked", "expected"), [(False, "tp"), (True, "ep")])
def test_the_flag_chooses_the_layer(asked: bool, expected: str) -> None:
    entries = {name: entry for (kind, name), entry in load_plugins().parallel_layers().items() if kind == "moe"}
    config = EngineConfig(parallel=ParallelConfig(enable_expert_parallel=asked))
    assert select("moe parallel layer", entries, "auto", config).entry.name == expected
    assert select("moe parallel layer", entries, "ep", config).entry.name == "ep"
