"""A model small enough to compute by hand, and a driver that plays the engine with hand-made step messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.distributed.model_parallel import ModelParallel
from fourfold.entries import ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.torch_operators import TorchOperators
from fourfold.messages import NewRequest, ScheduledRequest, StepMessage, StepOutput
from fourfold.models.adapters import AdapterSlots
from fourfold.sampling_params import SamplingParams
from fourfold.worker.cpu_device import CpuDevice
from fourfold.worker.model_runner import ALONE, ModelRunner

VOCABULARY = 97
BLOCK = 8


class HistoryModel:
    """Logits are a function of the whole history, read back through the paged cache of each of its layers."""

    dtype = kv_cache_dtype = torch.float32

    def __init__(self, layers: Sequence[int] = (0, 1), operators: TorchOperators | None = None) -> None:
        self.layers = layers
        context = ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32)
        self.operators = operators or TorchOperators(context)
        self.forwards: list[int] = []
        self.logit_rows: list[int] = []
        self.poison: int | None = None
        """A token id whose logits are NaN when it is the last."""

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return {layer: KVCacheSpec(block_size=BLOCK, bytes_per_block=4 * BLOCK) for layer in self.layers}

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, BLOCK)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        self.forwards.append(len(token_ids))
        hidden = torch.zeros(len(token_ids), 2)
        hidden[:, 1] = token_ids
        for cache, layer in zip(kv_caches, metadata, strict=True):
            flat = cache.view(-1)
            kept = layer.slot_mapping >= 0
            flat[layer.slot_mapping[kept]] = token_ids[kept].float() + 1
            for row in range(len(layer.sequence_lengths)):
                first, last = layer.query_start[row : row + 2].tolist()
                length = int(layer.sequence_lengths[row])
                places = torch.arange(length)
                blocks = layer.block_table[row].long()[places // BLOCK]
                history = flat[blocks * BLOCK + places % BLOCK]
                for token in range(first, last):
                    seen = history[: int(positions[token]) + 1]
                    hidden[token, 0] += _digest(seen.tolist())
        hidden[:, 0] /= len(kv_caches)
        return hidden

    def collect_logits(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def best_tokens(self, local: torch.Tensor, broken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return local.argmax(-1), broken

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logit_rows.append(len(hidden))
        ids = torch.arange(VOCABULARY, dtype=torch.float64)
        rows = 4 * torch.cos(hidden[:, :1].double() * (ids + 1) * 0.37 + ids)
        if self.poison is not None:
            rows[hidden[:, 1] == self.poison] = torch.nan
        return rows.float()


def _digest(history: list[float]) -> float:
    return math.fmod(sum(value * (index + 1) * 1.7 for index, value in enumerate(history)), 31.0)


def reference_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """[V] after these ids, without cache or batch."""
    digest = torch.tensor([_digest([token_id + 1.0 for token_id in token_ids])]).double()
    ids = torch.arange(VOCABULARY, dtype=torch.float64)
    return (4 * torch.cos(digest * (ids + 1) * 0.37 + ids)).float()


def reference_greedy(prompt: Sequence[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(int(reference_logits(known).argmax()))
    return known[len(prompt) :]


class Steps(Protocol):
    def execute(self, message: StepMessage) -> StepOutput: ...


class Driver:
    """Plays the engine: hands out blocks and slots, and sends steps."""

    def __init__(self, runner: Steps, *, num_groups: int, num_blocks: int, block_size: int = BLOCK) -> None:
        self.runner = runner
        self._block_size = block_size
        # Backwards, so that a table that is read in the wrong order shows.
        self._free = [list(range(num_blocks - 1, 0, -1)) for _ in range(num_groups)]
        self._step = 0
        self._new: list[NewRequest] = []
        self._ended: list[int] = []
        self._fresh: set[int] = set()
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}

    def add(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        output: Sequence[int] = (),
        eos: tuple[int, ...] = (),
        adapter: int = 0,
    ) -> None:
        sampling = sampling or SamplingParams(temperature=0.0)
        self._new.append(NewRequest(f"r{slot}", slot, list(prompt), sampling, eos, list(output), adapter))
        self._fresh.add(slot)
        self.computed[slot] = 0
        self.known[slot] = len(prompt) + len(output)
        self.tables[slot] = [[] for _ in self._free]

    def end(self, slot: int) -> None:
        self._ended.append(slot)
        for free, table in zip(self._free, self.tables.pop(slot)):
            free.extend(table)

    def restart(self, slot: int) -> None:
        """Compute everything anew in other blocks."""
        for free, table in zip(self._free, self.tables[slot]):
            free[:0] = table  # the far end, so that others are handed out
            table.clear()
        self.computed[slot] = 0
        self._fresh.add(slot)

    def message(self, work: dict[int, int | None]) -> StepMessage:
        """Slot -> number of tokens, None for all that are known; in this order."""
        scheduled = []
        for slot, wanted in work.items():
            start = self.computed[slot]
            count = self.known[slot] - start if wanted is None else wanted
            blocks = [self._extend(slot, group, start + count) for group in range(len(self._free))]
            samples = start + count == self.known[slot]
            self.computed[slot] = start + count
            self.known[slot] += samples
            scheduled.append(
                ScheduledRequest(slot, count, start, blocks, reset_blocks=slot in self._fresh, samples=samples)
            )
            self._fresh.discard(slot)
        message = StepMessage(step=self._step, new=self._new, scheduled=scheduled, ended=self._ended)
        self._step, self._new, self._ended = self._step + 1, [], []
        return message

    def step(self, work: dict[int, int | None]) -> StepOutput:
        return self.runner.execute(self.message(work))

    def generate(self, slots: Sequence[int], count: int) -> dict[int, list[int]]:
        """``count`` ids of each slot, all in one batch, whole prompts first."""
        outputs: dict[int, list[int]] = {slot: [] for slot in slots}
        for _ in range(count):
            output = self.step(dict.fromkeys(slots))
            for slot, token_id in zip(slots, output.token_ids, strict=True):
                outputs[slot].append(token_id)
        return outputs

    def _extend(self, slot: int, group: int, length: int) -> list[int]:
        table = self.tables[slot][group]
        added = [self._free[group].pop() for _ in range(-(-length // self._block_size) - len(table))]
        table.extend(added)
        return added


class Graph:
    """Runs the step again and writes to the first output, as a recorded one would."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step = step
        self._output = step().clone()
        self.replays = 0
        self.closed = False

    def replay(self) -> torch.Tensor:
        self.replays += 1
        self._output.copy_(self._step())
        return self._output

    def close(self) -> None:
        self.closed = True


class RecordingOperators(TorchOperators):
    def __init__(self, sizes: Sequence[int] = (4, 2), *, refuses: bool = False) -> None:
        super().__init__(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))
        self.graphs: list[Graph] = []
        self._sizes = sizes
        self._refuses = refuses
        self.asked = 0

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        return [size for size in self._sizes if size <= max_batch_size]

    def capture(self, step: Callable[[], torch.Tensor]) -> Graph:
        self.asked += 1
        if self._refuses:
            raise Unsupported("aten::add ran")
        self.graphs.append(Graph(step))
        return self.graphs[-1]


MakeDriver = Callable[..., Driver]


def drive(
    model: HistoryModel | None = None,
    *,
    groups: Sequence[Sequence[int]] = ((0, 1),),
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 64,
    parallel: ModelParallel = ALONE,
    adapters: AdapterSlots | None = None,
) -> Driver:
    model = model or HistoryModel()
    specs = model.kv_cache_specs()
    cache = KVCacheConfig(
        groups=tuple(KVCacheGroup(spec=specs[layers[0]], layers=tuple(layers)) for layers in groups), num_blocks=65
    )
    runner = ModelRunner(
        model,
        CpuDevice(dtype=torch.float32),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        max_model_len=max_model_len,
        vocabulary_size=VOCABULARY,
        parallel=parallel,
        adapters=adapters,
    )
    return Driver(runner, num_groups=len(groups), num_blocks=65)


@pytest.fixture(name="drive")
def drive_fixture() -> MakeDriver:
    return drive


@pytest.fixture
def history_model() -> Callable[..., HistoryModel]:
    return HistoryModel


@pytest.fixture
def greedy_reference() -> Callable[[Sequence[int], int], list[int]]:
    return reference_greedy


@pytest.fixture
def logits_reference() -> Callable[[Sequence[int]], torch.Tensor]:
    return reference_logits


@pytest.fixture
def make_driver() -> MakeDriver:
    return Driver


@pytest.fixture
def recording_operators() -> Callable[..., RecordingOperators]:
    return RecordingOperators
