"""The stages of a cut model, one after another, compute what the whole one does, from their own tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import Checkpoint, resolve_checkpoint
from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.model_config import ModelConfig
from fourfold.config.options import build_engine_config
from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.contracts.step_part import StepVote
from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.distributed.model_parallel import GroupLinks, ModelParallel, initialize_model_parallel
from fourfold.entries import WorkerContext
from fourfold.errors import CheckpointError, ConfigError, EngineError
from fourfold.layout import ParallelLayout
from fourfold.models.decoder import Decoder
from fourfold.models.layer_costs import stage_costs, stage_memory
from fourfold.models.loading import load_model
from fourfold.models.parallel_limits import check_layout
from fourfold.models.stage_partition import Stage, partition, stages
from fourfold.plugins import PluginRegistry

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "scaled, sandwiched, windowed": ("Gemma2", {"sliding_window": 8}),
    "mixtures": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
}


class Chain:
    """Decoders of all stages as one."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self._decoders = decoders
        self.description, self.dtype = decoders[0].description, decoders[0].dtype
        self.kv_cache_dtype = decoders[0].kv_cache_dtype

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        (holder,) = [one for one in self._decoders if layer in one.stage.layers]
        return holder.kv_cache_shape(layer, num_blocks)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        hidden, residual = None, self._decoders[0].embed(token_ids)
        for one in self._decoders:
            mine = slice(one.stage.layers.start, one.stage.layers.stop)
            hidden, residual = one.run_layers(hidden, residual, positions, kv_caches[mine], metadata[mine])
        assert hidden is not None
        return self._decoders[-1].finish(hidden, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoders[-1].logits(hidden)


class CountingFormat:
    """Notes which tensors are asked for; ``without`` are not there."""

    def __init__(self, inner: Any, without: Iterable[str] = ()) -> None:
        self._inner, self._without = inner, set(without)
        self.read: list[str] = []

    def open(self, folder: Path) -> Any:
        self._context = self._inner.open(folder)
        return self

    def __enter__(self) -> Any:
        self._reader = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def names(self) -> list[str]:
        return [name for name in self._reader.names() if name not in self._without]

    def tensor(self, name: str) -> Any:
        self.read.append(name)
        return self._reader.tensor(name)


class Loader:
    def __init__(self, folder: Path, registry: PluginRegistry, backends: BackendConfig) -> None:
        self._config = EngineConfig(model=ModelConfig(model=str(folder)), backends=backends)
        self._registry = registry
        self._checkpoint = resolve_checkpoint(self._config.model, registry, NoProgress())
        self.description = self._checkpoint.description

    def load(
        self, stage: Stage, *, without: Iterable[str] = (), parallel: ModelParallel | None = None
    ) -> tuple[Decoder, list[str]]:
        counting: Any = CountingFormat(self._checkpoint.format, without)
        checkpoint = Checkpoint(
            folder=self._checkpoint.folder, format=counting, description=self._checkpoint.description
        )
        decoder = load_model(
            WorkerContext(config=self._config, layout=ParallelLayout(), rank=0),
            self._registry,
            checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            progress=NoProgress(),
            parallel=parallel,
            stage=stage,
        )
        return decoder, counting.read


@pytest.fixture
def loader(
    save_random: Callable[..., tuple[Path, Any]], registry: PluginRegistry, torch_backends: BackendConfig
) -> Callable[..., Loader]:
    def build(family: str = "Llama", **settings: Any) -> Loader:
        return Loader(save_random(family, **{**SHAPE, **settings})[0], registry, torch_backends)

    return build


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sizes", [(5,), (2, 3), (1, 3, 1), (1, 1, 1, 1, 1)], ids=str)
def test_stages_together_are_the_whole(loader: Any, paged: Any, name: str, sizes: tuple[int, ...]) -> None:
    family, settings = FAMILIES[name]
    parts = loader(family, **settings)
    whole = paged(parts.load(Stage(layers=range(5)))[0])
    chain = paged(Chain([parts.load(stage)[0] for stage in stages(sizes)]))
    for ids in (list(range(3, 23)), [5], [9, 11]):
        assert torch.equal(chain.step({0: ids}), whole.step({0: ids}))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_stage_reads_its_own_tensors_alone(loader: Any, name: str) -> None:
    parts = loader(**FAMILIES[name][1])
    read = [set(parts.load(stage)[1]) for stage in stages((2, 2, 1))]
    ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    head = "model.embed_tokens.weight" if name == "tied" else "lm_head.weight"
    assert [one & ends for one in read] == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", head}]
    layers = [{int(name.split(".")[2]) for name in one - ends} for one in read]
    assert layers == [{0, 1}, {2, 3}, {4}]


class OtherEngine:
    """A communicator over which one more rank, of an engine with 3 tokens, always votes."""

    rank, world_size = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + torch.tensor([[0, 0, 0, 0], [3, 1, 1, 0]], dtype=tensor.dtype)


def test_a_stage_without_experts_votes_for_the_engines_that_share_them(loader: Any) -> None:
    family, settings = FAMILIES["mixtures"]
    link: Any = OtherEngine()
    alone = initialize_model_parallel(
        ParallelLayout(), 0, lambda *group: GroupLinks(name="", communicator=link, host=link)
    )
    shared = replace(alone, ep=GroupCoordinator(name="ep", ranks=(0, 1), rank=0, communicator=link))
    parts = loader(family, **settings)
    dense, idle = stages((1, 1, 3))[1], StepVote(has_work=False, may_pause=True)
    assert parts.load(dense, parallel=alone)[0].step_parts == ()
    (part,) = parts.load(dense, parallel=shared)[0].step_parts
    assert part.begin_step(0, idle, is_decode=True) == StepVote(has_work=True, may_pause=True)
    assert part.take_turns(0) is None


def test_the_last_stage_needs_the_tied_embedding(loader: Any) -> None:
    parts = loader(tie_word_embeddings=True)
    _, middle, last = stages((2, 2, 1))
    parts.load(middle, without=["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks model\.embed_tokens\.weight"):
        parts.load(last, without=["model.embed_tokens.weight"])


def test_a_stage_has_what_it_has(loader: Any) -> None:
    decoder, _ = loader().load(stages((2, 2, 1))[1])
    assert sorted(decoder.kv_cache_specs()) == [2, 3]
    rows = torch.zeros(1, 64)
    for use in (lambda: decoder.embed(torch.zeros(1, dtype=torch.int64)), lambda: decoder.logits(rows)):
        with pytest.raises(EngineError, match=r"the stage of layers range\(2, 4\) has no"):
            use()
    with pytest.raises(EngineError, match="is not the last"):
        decoder.finish(rows, rows)


def test_costs_and_memory_follow_the_description(loader: Any) -> None:
    description = loader("Gemma2", sliding_window=8).description
    costs = stage_costs(description)
    assert costs.layers[1] > costs.layers[0] > 0, "the first layer attends to a window"
    assert (costs.first, costs.last) == (64, 64 * 131)
    whole = stage_memory(description, available=(1, 2), max_model_len=64, item_bytes=2, tp=1)
    half = stage_memory(description, available=(1, 2), max_model_len=64, item_bytes=2, tp=2)
    assert whole.first == 2 * 64 * 131
    assert half.first * 2 == whole.first
    assert half.layers[0] * 2 == whole.layers[0] < whole.layers[1]
    assert sum(partition(costs, 2)) == 5


def test_cuts_that_cannot_be_are_refused_from_the_description(loader: Any) -> None:
    description = loader().description
    check_layout(description, build_engine_config(pipeline_parallel_size=5, tensor_parallel_size=4))
    for message, cut in (
        ("--pipeline-parallel-size is 6, but the model has 5 layers; from 1 to 5", {"pipeline_parallel_size": 6}),
        (
            "--pipeline-partition is '2,2', which sums to 4, and the model has 5 layers; [23],[23] would do",
            {"pipeline_parallel_size": 2, "pipeline_partition": "2,2"},
        ),
        (
            "--tensor-parallel-size is 5, but the model has 4 query heads; from 1 to 4",
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 5},
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_layout(description, build_engine_config(**cut))
