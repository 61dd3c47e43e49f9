"""Every cut gives the tokens of the whole: ranks as threads, with collectives over a shared list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.distributed.model_parallel import GroupLinks, initialize_model_parallel
from fourfold.entries import WorkerContext
from fourfold.errors import ConfigError, Unsupported
from fourfold.layout import ParallelLayout
from fourfold.models.loading import load_model
from fourfold.plugins import PluginRegistry


class ThreadCommunicator:
    """Two collectives among threads; the sum is taken in rank order on every rank. ``fuses``: and with a norm after."""

    channels, graph_safe, deterministic = 1, False, True
    fuses = False

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(slots)
        self.num_fused = 0
        self._slots, self._barrier = slots, barrier

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = tensor
        self._barrier.wait(timeout=30)
        everyone = list(self._slots)
        self._barrier.wait(timeout=30)
        return everyone

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(
        self, tensor: torch.Tensor, *, destination: int = 0, out: Sequence[torch.Tensor] = (), channel: int = 0
    ) -> list[torch.Tensor] | None:
        everyone = self._exchange(tensor)
        if self.rank != destination:
            return None
        for target, one in zip(out, everyone, strict=True):
            target.copy_(one)
        return list(out)

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.fuses:
            raise Unsupported("threads have nothing fused")
        self.num_fused += 1
        residual = residual + self.all_reduce(tensor)
        return torch.nn.functional.rms_norm(residual, weight.shape, weight, epsilon), residual

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"layers use {name}, which this communicator does not have")

    def capture(self) -> AbstractContextManager[None]:
        raise NotImplementedError


def linked(communicator: Any) -> GroupLinks:
    return GroupLinks(name="threads", communicator=communicator, host=communicator)


def on_ranks(world_size: int, run: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    slots: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def one(rank: int) -> Any:
        try:
            return run(ThreadCommunicator(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(timeout=120) for future in [pool.submit(one, rank) for rank in range(world_size)]]


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    # 9 query heads over 3 kv heads: at tp 2 the ranks hold 5 and 4, and share kv head 1.
    "uneven": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 100}),
    "biased": (
        "Llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "normed": ("Qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}),
    # 20 features of an expert over 3 ranks are 8, 8 and 4.
    "mixture": (
        "Qwen2Moe",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "whole-norm": (
        "Olmoe",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "latents": (
        "DeepseekV3",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "hidden_size": 80,
            "attention_bias": True,
        },
    ),
    "one-kv-head": ("Gemma", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}),
}
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


FUSED = {"uneven": 3, "biased": 3, "normed": 3, "mixture": 2, "whole-norm": 2, "latents": 0, "one-kv-head": 0}
"""Sums over ranks in two layers that the norm after takes; those of heads that are cut or of Gemma it does not."""


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("world_size", "fuses"), [(2, False), (2, True), (3, False), (4, False)])
def test_logits_of_every_cut_equal_the_whole(
    name: str,
    world_size: int,
    fuses: bool,
    save_random: Callable[..., tuple[Path, Any]],
    reference_logits: Callable[[Any, list[int]], torch.Tensor],
    registry: PluginRegistry,
    paged: Any,
    torch_backends: Any,
) -> None:
    family, settings = SETTINGS[name]
    folder, model = save_random(family, **{**SHAPE, **settings})
    config = EngineConfig(
        model=ModelConfig(model=str(folder)),
        parallel=ParallelConfig(tensor_parallel_size=world_size),
        backends=torch_backends,
    )
    checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
    layout = ParallelLayout(tp=world_size)
    ids = list(range(3, 28))

    def run(communicator: ThreadCommunicator) -> torch.Tensor:
        rank, communicator.fuses = communicator.rank, fuses
        decoder = load_model(
            WorkerContext(config=config, layout=layout, rank=rank),
            registry,
            checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            progress=NoProgress(),
            parallel=initialize_model_parallel(layout, rank, lambda group, ranks, place: linked(communicator)),
        )
        steps, communicator.num_fused = paged(decoder), 0
        logits = torch.cat([steps.step({0: ids[:20]}).clone(), steps.step({0: ids[20:]}).clone()])
        assert communicator.num_fused == (2 * FUSED[name] if fuses else 0)
        return logits

    logits = on_ranks(world_size, run)
    assert (logits[0] - reference_logits(model, ids)).abs().max() < 1e-3
    assert all(other.shape == (0, 131) for other in logits[1:])


def test_more_ranks_than_heads_are_refused(
    save_random: Callable[..., tuple[Path, Any]], registry: PluginRegistry, torch_backends: Any
) -> None:
    folder, _ = save_random("Llama", **SHAPE, num_attention_heads=9, num_key_value_heads=3, head_dim=8)
    config = EngineConfig(model=ModelConfig(model=str(folder)), backends=torch_backends)
    checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
    layout = ParallelLayout(tp=16)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 16, but the model has 9 query heads; from 1 to 9"):
        load_model(
            WorkerContext(config=config, layout=layout, rank=0),
            registry,
            checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            progress=NoProgress(),
            parallel=initialize_model_parallel(
                layout,
                0,
                lambda group, ranks, place: linked(ThreadCommunicator(0, [None] * 16, threading.Barrier(16))),
            ),
        )


def test_ranks_without_a_communicator_are_refused(
    save_random: Callable[..., tuple[Path, Any]], registry: PluginRegistry, torch_backends: Any
) -> None:
    folder, _ = save_random("Llama", **SHAPE, num_attention_heads=4)
    config = EngineConfig(model=ModelConfig(model=str(folder)), backends=torch_backends)
    with pytest.raises(ConfigError, match="the tp group has 2 ranks"):
        load_model(
            WorkerContext(config=config, layout=ParallelLayout(tp=2), rank=0),
            registry,
            resolve_checkpoint(config.model, registry, NoProgress()),
            device=torch.device("cpu"),
            dtype=torch.float32,
            progress=NoProgress(),
        )
