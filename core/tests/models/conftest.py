from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fourfold import builtin_plugin
from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.backend_config import BackendConfig
from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.lora_config import LoraConfig
from fourfold.config.model_config import ModelConfig
from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.entries import WorkerContext
from fourfold.layout import ParallelLayout
from fourfold.models.decoder import Decoder
from fourfold.models.loading import load_model
from fourfold.plugins import PluginRegistry, load_plugins

BLOCK_SIZE = 16
BACKENDS = BackendConfig(
    attention="torch", linear_method="torch", operators="torch", parallel_layer="tp", experts="loop"
)


def core_registry() -> PluginRegistry:
    """Core's own offers, without what else is installed."""
    return load_plugins(entry_points=False, extra={"core": builtin_plugin})


def load_decoder(
    model: str | Path,
    *,
    max_model_len: int | None = None,
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    fp8_cache: bool = False,
    lora: bool = False,
) -> Decoder:
    """A decoder of core's own backends on the CPU."""
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=max_model_len, load_format=load_format),
        cache=CacheConfig(kv_cache_dtype="fp8" if fp8_cache else "auto"),
        backends=BACKENDS,
        lora=LoraConfig(enable_lora=lora),
    )
    registry = core_registry()
    checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
    context = WorkerContext(config=config, layout=ParallelLayout(), rank=0)
    return load_model(context, registry, checkpoint, device=torch.device("cpu"), dtype=dtype, progress=NoProgress())


class PagedDecoder:
    """Sequences over a cache that starts as NaN, so that reading what was never written shows."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 64, num_sequences: int = 1) -> None:
        self.decoder = decoder
        num_layers = decoder.description.num_layers
        self._caches = [
            torch.full(decoder.kv_cache_shape(layer, num_blocks), torch.nan).to(decoder.kv_cache_dtype)
            for layer in range(num_layers)
        ]
        # Blocks in a scattered order, none shared; block 0 is never a sequence's.
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        per_sequence = (num_blocks - 1) // num_sequences
        self._tables = order[: per_sequence * num_sequences].view(num_sequences, per_sequence).to(torch.int32)
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def step(self, tokens: dict[int, Sequence[int]]) -> torch.Tensor:
        """Append tokens to sequences; fp32 logits of every token, in the order given."""
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, totals = [0], []
        for sequence, ids in tokens.items():
            first = self.lengths[sequence]
            self.lengths[sequence] = first + len(ids)
            rows += ids
            places = range(first, first + len(ids))
            positions += places
            slots += [int(self._tables[sequence, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
            starts.append(len(rows))
            totals.append(self.lengths[sequence])
        tables = self._tables[list(tokens)].clone()
        for row, total in enumerate(totals):
            tables[row, -(-total // BLOCK_SIZE) :] = 2**30  # entries past the length are undefined
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            sequence_lengths=torch.tensor(totals, dtype=torch.int32),
            block_table=tables,
            slot_mapping=torch.tensor(slots),
            max_query_length=max(map(len, tokens.values())),
            max_sequence_length=max(totals),
            query_start_list=starts,
            sequence_lengths_list=totals,
        )
        hidden = self.decoder.forward(
            torch.tensor(rows), torch.tensor(positions), self._caches, [metadata] * len(self._caches)
        )
        return self.decoder.logits(hidden)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        # Its own imports of other packages warn; nothing of ours runs in here.
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture
def save_random(transformers: ModuleType, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Saves a tiny random model of a family; returns its folder and the reference model."""

    def save(
        family: str, *, architecture: str = "ForCausalLM", shard: str = "1GB", **settings: Any
    ) -> tuple[Path, Any]:
        torch.manual_seed(7)
        config_class = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3' else family}Config")
        config = config_class(**settings)
        model = getattr(transformers, family + architecture)(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights and biases start at 0 or 1, which would hide that one is dropped or misplaced.
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif "embed" not in name:
                    parameter.mul_(3.0)
            for name, buffer in model.named_buffers():
                if name.endswith("score_correction_bias"):
                    buffer.normal_(0.0, 0.2)
        folder = tmp_path / family
        model.save_pretrained(folder, max_shard_size=shard)
        return folder, model

    return save


@pytest.fixture
def reference_logits() -> Callable[[Any, list[int]], torch.Tensor]:
    def run(model: Any, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0].float()

    return run


@pytest.fixture
def registry() -> PluginRegistry:
    return core_registry()


@pytest.fixture(name="load_decoder")
def load_decoder_fixture() -> Callable[..., Decoder]:
    return load_decoder


@pytest.fixture
def paged() -> type[PagedDecoder]:
    return PagedDecoder


@pytest.fixture(scope="module")
def module_load_decoder() -> Callable[..., Decoder]:
    return load_decoder


@pytest.fixture
def torch_backends() -> BackendConfig:
    return BACKENDS


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
