"""What all experts must do: agree with a plain loop over rows. A test sets ``name`` and, if need be, ``dtypes``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import Dtype, ModelConfig
from fourfold.contracts.mixture import ExpertPart, Experts
from fourfold.entries import ExpertsContext
from fourfold.layers.torch_operators import TorchOperators
from fourfold.layers.weight_memory import WeightMemory
from fourfold.models.description import Activation
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance
from fourfold.testing.linear_method import assert_near, compute_context

HIDDEN, INNER, NUM_EXPERTS = 64, 48, 5
_PARTS: Final[tuple[ExpertPart, ...]] = ("gate", "up", "down")


class ExpertWeights(NamedTuple):
    """Of every slot, in float32."""

    gate: torch.Tensor
    """[slots, I, H]."""
    up: torch.Tensor
    """[slots, I, H]."""
    down: torch.Tensor
    """[slots, H, I]."""


class ExpertsConformance(Conformance):
    """The experts contract, row by row in float32."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[Dtype, ...]] = ("float32", "bfloat16")
    """The precisions that they claim."""
    device: ClassVar[str] = "cpu"
    activations: ClassVar[tuple[Activation, ...]] = ("silu", "gelu_tanh")

    @pytest.fixture
    def built(self) -> list[tuple[Dtype, Activation, Experts, ExpertWeights]]:
        """Loaded experts of each dtype and activation; skips, with their reason, where they cannot run."""
        torch.manual_seed(0)
        entry = load_plugins().experts()[self.name]
        found = []
        for dtype in self.dtypes:
            config = EngineConfig(model=ModelConfig(dtype=dtype))
            suits = entry.suits(config)
            if suits.score <= 0:
                pytest.skip(f"{self.name} cannot run here: {suits.reason}")
            for activation in self.activations:
                experts = entry.build(self.context(config, activation))
                found.append((dtype, activation, experts, self.fill(experts, dtype)))
        return found

    @pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 33])
    @pytest.mark.parametrize("top_k", [1, 3])
    def test_random_routing(
        self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]], num_rows: int, top_k: int
    ) -> None:
        ids = torch.rand(num_rows, NUM_EXPERTS).argsort(dim=1)[:, :top_k]
        self.check(built, ids)

    def test_one_expert_takes_all_rows(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]) -> None:
        self.check(built, torch.full((33, 1), 3))

    def test_every_expert_takes_every_row(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]) -> None:
        self.check(built, torch.arange(NUM_EXPERTS).repeat(4, 1))

    def test_experts_elsewhere_give_nothing(
        self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]
    ) -> None:
        ids = torch.rand(33, NUM_EXPERTS).argsort(dim=1)[:, :3]
        ids[torch.rand(ids.shape) < 0.5] = -1
        ids[::4] = -1
        self.check(built, ids)
        self.check(built, torch.full((5, 3), -1))

    def test_a_slot_may_be_loaded_again(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]) -> None:
        ids = torch.rand(9, NUM_EXPERTS).argsort(dim=1)[:, :2]
        self.check([(dtype, act, experts, self.fill(experts, dtype)) for dtype, act, experts, _ in built], ids)

    def test_a_matrix_is_what_was_loaded(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]) -> None:
        """A rank that takes an expert over reads it so: each part as it was given last, of each slot."""
        again = [(dtype, act, experts, self.fill(experts, dtype)) for dtype, act, experts, _ in built]
        for dtype, _, experts, held in again:
            for part, weights in zip(_PARTS, held):
                for expert in range(NUM_EXPERTS):
                    loaded = weights[expert].to(getattr(torch, dtype))
                    torch.testing.assert_close(experts.matrix(expert, part).cpu(), loaded, rtol=0, atol=0)

    def test_an_expert_may_move_to_another_slot(
        self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]
    ) -> None:
        for dtype, activation, experts, held in built:
            for part in _PARTS:
                experts.load(0, part, experts.matrix(NUM_EXPERTS - 1, part).clone())
            moved = ExpertWeights(*(torch.cat((weights[-1:], weights[1:])) for weights in held))
            self.check([(dtype, activation, experts, moved)], torch.arange(NUM_EXPERTS).repeat(4, 1))

    def test_a_row_of_nan_spoils_no_other(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]]) -> None:
        ids = torch.rand(9, NUM_EXPERTS).argsort(dim=1)[:, :2]
        weights = torch.rand(ids.shape)
        others = torch.arange(len(ids)) != 4
        for dtype, activation, experts, held in built:
            x = torch.randn(len(ids), HIDDEN).to(getattr(torch, dtype))
            expected = _row_by_row(x.float(), ids, weights, held, activation)
            x[4] = torch.nan
            found = experts(x.to(self.device), ids.to(self.device, torch.int32), weights.to(self.device)).cpu()
            assert_near(found[others], expected[others], dtype, x.dtype)

    def test_their_memory_is_what_the_context_gives(self) -> None:
        """An engine that sleeps takes it back, and loads it again when it wakes."""
        entry = load_plugins().experts()[self.name]
        config = EngineConfig(model=ModelConfig(dtype=self.dtypes[0]))
        suits = entry.suits(config)
        if suits.score <= 0:
            pytest.skip(f"{self.name} cannot run here: {suits.reason}")
        context = self.context(config, self.activations[0])
        memory = WeightMemory(context.device)
        experts = entry.build(replace(context, memory=memory))
        held = memory.nbytes
        assert held >= 3 * NUM_EXPERTS * HIDDEN * INNER * context.dtype.itemsize
        memory.release_weights(keep=False)
        assert memory.nbytes == 0
        memory.restore_weights()
        assert memory.nbytes == held
        ids = torch.rand(9, NUM_EXPERTS).argsort(dim=1)[:, :2]
        self.check([(self.dtypes[0], self.activations[0], experts, self.fill(experts, self.dtypes[0]))], ids)

    def check(self, built: list[tuple[Dtype, Activation, Experts, ExpertWeights]], ids: torch.Tensor) -> None:
        """Rows without an expert here are poisoned, and give 0."""
        weights = torch.rand(ids.shape)
        empty = (ids < 0).all(dim=1)
        for dtype, activation, experts, held in built:
            x = torch.randn(ids.shape[0], HIDDEN).to(getattr(torch, dtype))
            expected = _row_by_row(x.float(), ids, weights, held, activation)
            x[empty] = torch.nan
            given = (x.to(self.device), ids.to(self.device, torch.int32), weights.to(self.device, torch.float32))
            before = [tensor.clone() for tensor in given]
            found = experts(*given)
            assert_near(found.cpu(), expected, dtype, x.dtype)
            for tensor, was in zip(given, before):
                torch.testing.assert_close(tensor, was, rtol=0, atol=0, equal_nan=True, msg="what they are given stays")
            assert not found.cpu()[empty].any(), "rows without an expert here must give 0"

    def fill(self, experts: Experts, dtype: Dtype) -> ExpertWeights:
        """Random weights in every slot, exact in ``dtype``, each matrix about as large as its input."""
        held = ExpertWeights(
            gate=self.random(dtype, NUM_EXPERTS, INNER, HIDDEN) * HIDDEN**-0.5,
            up=self.random(dtype, NUM_EXPERTS, INNER, HIDDEN) * HIDDEN**-0.5,
            down=self.random(dtype, NUM_EXPERTS, HIDDEN, INNER) * 0.125,
        )
        for expert in range(NUM_EXPERTS):
            experts.load(expert, "down", held.down[expert])
            experts.load(expert, "up", held.up[expert])
            experts.load(expert, "gate", held.gate[expert])
        return held

    def random(self, dtype: Dtype, *shape: int) -> torch.Tensor:
        """Normal noise in float32, with the precision of ``dtype``."""
        return torch.randn(*shape).to(getattr(torch, dtype)).float()

    def context(self, config: EngineConfig, activation: Activation) -> ExpertsContext:
        """What experts of this kit's sizes are built from."""
        compute = compute_context(config, self.device)
        return ExpertsContext(
            config=config,
            device=compute.device,
            dtype=compute.dtype,
            num_experts=NUM_EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            activation=activation,
            operators=TorchOperators(compute),
        )


def _row_by_row(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, held: ExpertWeights, activation: Activation
) -> torch.Tensor:
    """fp32 [R, H]."""
    operators = TorchOperators(compute_context(EngineConfig(model=ModelConfig(dtype="float32")), "cpu"))
    out = torch.zeros_like(x)
    for row, (places, factors) in enumerate(zip(ids.tolist(), weights.tolist())):
        for expert, factor in zip(places, factors):
            if expert >= 0:
                gate_up = torch.cat((held.gate[expert] @ x[row], held.up[expert] @ x[row]))
                out[row] += factor * (held.down[expert] @ operators.gated(gate_up[None], activation)[0])
    return out
