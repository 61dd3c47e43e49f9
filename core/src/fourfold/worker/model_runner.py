"""Runs steps on one rank: keeps the requests' state, builds inputs, calls the model, samples.

Steps run in the order of their messages; each leaves its sampled ids in the state, which the next one reads. Decides
nothing of what runs, and knows no process or transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.distributed.model_parallel import ModelParallel
from fourfold.errors import CheckpointError, EngineError, RequestError
from fourfold.layout import ParallelLayout
from fourfold.messages import NewRequest, ScheduledRequest, StepMessage, StepOutput, TokenLogprobs
from fourfold.sampling_params import SamplingParams
from fourfold.worker.decode_graphs import DecodeGraphs
from fourfold.worker.device import Device
from fourfold.worker.logprobs import token_logprobs
from fourfold.worker.request_state import Int64, RequestState
from fourfold.worker.sampler import Sampled, Sampler
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import InputBuffers, StepInputs, StepPlan

if TYPE_CHECKING:
    from fourfold.config.scheduler_config import SchedulerConfig
    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheSpec
    from fourfold.contracts.operators import Operators
    from fourfold.worker.pipeline_stage import PipelineStage

PROMPT_LOGPROB_ENTRIES = 1 << 22
"""Logits of prompt positions computed at a time: 16 MiB of fp32."""
WARM_UP_PROMPT = 7
"""Tokens; with one of output they fit the smallest block."""
ALONE = ModelParallel(
    layout=ParallelLayout(),
    rank=0,
    tp=GroupCoordinator(name="tp", ranks=(0,), rank=0),
    pp=GroupCoordinator(name="pp", ranks=(0,), rank=0),
    dp=GroupCoordinator(name="dp", ranks=(0,), rank=0),
    ep=GroupCoordinator(name="ep", ranks=(0,), rank=0),
)
"""The groups of an engine of one rank."""
NOT_FINITE = "the model gave logits that are not finite; this request cannot go on"


class Model(Protocol):
    """What the runner needs of a decoder; T tokens, R rows, H hidden size, V vocabulary size."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache."""

    @property
    def operators(self) -> Operators:
        """Those of its own norms; they sample too."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> torch.Tensor:
        """int64 [T], int64 [T], a cache and metadata a layer -> [T, H]."""

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> this rank's part of the logits, fp32; the ranks do not talk meanwhile."""

    def collect_logits(self, local: torch.Tensor) -> torch.Tensor:
        """What all ranks' ``local_logits`` gave -> fp32 [R, V] on the first rank that shares the layers."""

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        """Of this rank's layers, in order."""

    def kv_cache_shape(self, layer: int, num_blocks: int) -> tuple[int, ...]:
        """Of one layer's cache tensor."""


class ModelRunner:
    """One model on one device, with its KV cache and the state of its requests."""

    def __init__(
        self,
        model: Model,
        device: Device,
        *,
        cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int,
        vocabulary_size: int,
        parallel: ModelParallel = ALONE,
        join: Callable[[RequestState], PipelineStage] | None = None,
    ) -> None:
        """``join`` makes this rank a stage of a pipeline; None: it has all layers."""
        self._model = model
        self._parallel = parallel
        self._device = device
        self._vocabulary_size = vocabulary_size
        self._num_groups = len(cache.groups)
        self._max_tokens = scheduler.max_num_batched_tokens
        slots = scheduler.num_slots
        self._state = RequestState(cache, slots=slots, max_model_len=max_model_len, vocabulary_size=vocabulary_size)
        self._pipeline = None if join is None else join(self._state)
        self._sampling = SamplingState(slots=slots, vocabulary_size=vocabulary_size)
        self._sampler = Sampler(self._sampling, operators=model.operators, device=device)
        self._buffers = InputBuffers(
            device, self._state, max_tokens=self._max_tokens, max_requests=scheduler.max_num_seqs
        )
        self._graphs = DecodeGraphs(model.operators, max_batch_size=scheduler.max_num_seqs, group=parallel.tp)
        self._group_of_layer = _group_of_layer(model, cache)
        self._kv_caches = [
            device.zeros(model.kv_cache_shape(layer, cache.num_blocks), model.dtype) for layer in model.kv_cache_specs()
        ]

    @torch.inference_mode()
    def execute(self, message: StepMessage) -> StepOutput:
        """Run one step; all ranks run the same ones. The first that shares the last layers has what is sampled.

        What fails for one request alone is in the reply's ``errors``.
        """
        self._parallel.begin_step(message.step)
        if self._pipeline is not None:
            self._pipeline.take_ids(message)
        errors = self._update_state(message)
        if not message.scheduled:
            return StepOutput(step=message.step, token_ids=[], errors=errors)
        plan = StepPlan.of(message.scheduled)
        size = self._graphs.size_for(plan.num_requests) if plan.is_decode else None
        self._buffers.fill(plan, padded_to=size or 0)
        started = time.perf_counter()  # what lies before is overhead in the engine's books
        if self._pipeline is not None:
            self._pipeline.receive(message.step, plan)
            if not self._pipeline.is_last:
                self._pass_on(self._pipeline, message.step, plan, size)
                return StepOutput(step=message.step, token_ids=[])
        logits, prompt_logprobs = self._forward(plan, size)
        if logits is None:
            self._device.synchronize()
            return StepOutput(
                step=message.step,
                token_ids=[],
                prompt_logprobs=prompt_logprobs,
                errors=errors,
                forward_seconds=time.perf_counter() - started,
            )
        slots = plan.slots[plan.sampling]
        sampled = self._sample(logits, slots)
        if self._pipeline is not None:
            self._pipeline.send_ids(message.step, sampled.token_ids)
        self._state.append(slots, sampled.token_ids)
        self._sampling.append(slots, sampled.token_ids)
        for slot in slots[sampled.broken].tolist():
            errors.setdefault(slot, NOT_FINITE)
        return StepOutput(
            step=message.step,
            token_ids=sampled.token_ids.tolist(),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            forward_seconds=time.perf_counter() - started,
        )

    def warm_up(self) -> None:
        """Run a small prefill and a decode through everything that a real step uses; they write to block 0 alone.

        Raises CheckpointError for a model whose logits are not finite: no request could ever be answered.
        """
        blocks = [[0] for _ in range(self._num_groups)]
        length = min(WARM_UP_PROMPT, self._max_tokens, self._state.max_model_len - 1)
        request = NewRequest("warm-up", 0, [0] * length, SamplingParams(temperature=0.0), ())
        prefill = ScheduledRequest(0, length, 0, blocks, reset_blocks=True)
        decode = ScheduledRequest(0, 1, length, [[] for _ in blocks])
        steps = [StepMessage(step=0, new=[request], scheduled=[prefill]), StepMessage(step=1, scheduled=[decode])]
        outputs = [self.execute(step) for step in steps]
        self.execute(StepMessage(step=2, ended=[0]))
        if any(NOT_FINITE in output.errors.values() for output in outputs):
            hint = "" if self._model.dtype == torch.float32 else ", or it needs --dtype float32"
            raise CheckpointError(
                f"the model's first logits are not finite; its weights are damaged, or its config.json is wrong{hint}"
            )

    @property
    def waited_seconds(self) -> float:
        """Spent on other stages of the pipeline so far."""
        return 0.0 if self._pipeline is None else self._pipeline.waited_seconds

    def close(self) -> None:
        """Release recorded steps, the KV cache and the other stages; idempotent."""
        self._graphs.close()
        if self._pipeline is not None:
            self._pipeline.close()
        self._kv_caches.clear()

    def _sample(self, logits: torch.Tensor, slots: Int64) -> Sampled:
        """Ids of the first rank's sampling on all of them, so that they stay alike."""
        tp = self._parallel.tp
        if not tp.is_first:
            sampled = Sampled(np.zeros(len(slots), np.int64), [], np.zeros(0, np.int64))
        else:
            sampled = self._sampler.sample(logits, slots, self._state.output_positions(slots))
        if tp.world_size == 1:
            return sampled
        token_ids = tp.broadcast(self._device.upload(sampled.token_ids))
        return sampled._replace(token_ids=token_ids.cpu().numpy())

    def _update_state(self, message: StepMessage) -> dict[int, str]:
        errors: dict[int, str] = {}
        for slot in message.ended:
            self._sampling.remove(slot)
        for request in message.new:
            for state in (self._state, self._sampling):
                try:
                    state.add(request)
                except RequestError as error:
                    errors.setdefault(request.slot, str(error))
        self._state.place_blocks(message.scheduled)
        return errors

    def _forward(self, plan: StepPlan, size: int | None) -> tuple[torch.Tensor | None, dict[int, list[TokenLogprobs]]]:
        """Logits of the rows that sample, None if there are none, and the prompt's log probabilities.

        The buffers hold ``plan``; with a ``size`` they are padded to it, for the recorded step of that batch size.
        """
        if size is not None:
            (local,) = self._graphs.run(size, lambda: self._buffers.upload_padded(size), self._decode)
            return self._model.collect_logits(local[: plan.num_requests]), {}
        hidden = self._hidden(self._buffers.upload(plan))
        prompt_logprobs = self._prompt_logprobs(plan, hidden) if self._sampling.prompt_logprobs else {}
        if not len(plan.sampling):
            return None, prompt_logprobs
        if len(plan.sampling) != plan.num_tokens:
            hidden = hidden[self._device.upload(plan.query_start[1:][plan.sampling] - 1)]
        return self._logits(hidden), prompt_logprobs

    def _pass_on(self, pipeline: PipelineStage, step: int, plan: StepPlan, size: int | None) -> None:
        """Run the plan in the buffers through this stage's layers and on to the next stage; see ``_forward``."""

        def run(inputs: StepInputs) -> tuple[torch.Tensor, ...]:
            return pipeline.run(inputs, self._kv_caches, self._metadata(inputs))

        if size is None:
            hidden, residual = run(self._buffers.upload(plan))
        else:
            hidden, residual = self._graphs.run(size, lambda: self._buffers.upload_padded(size), run)
        pipeline.send(step, plan, hidden, residual)

    def _decode(self, inputs: StepInputs) -> tuple[torch.Tensor]:
        return (self._model.local_logits(self._hidden(inputs)),)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.collect_logits(self._model.local_logits(hidden))

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        metadata = self._metadata(inputs)
        if self._pipeline is not None:
            return self._pipeline.finish(*self._pipeline.run(inputs, self._kv_caches, metadata))
        return self._model.forward(inputs.token_ids, inputs.positions, self._kv_caches, metadata)

    def _metadata(self, inputs: StepInputs) -> list[AttentionMetadata]:
        return [inputs.metadata[group] for group in self._group_of_layer]

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """Of the prompt tokens that this step's positions predict: the last position of a chunk predicts the first
        token of the next one.
        """
        found: dict[int, list[TokenLogprobs]] = {}
        for index, slot in enumerate(plan.slots.tolist()):
            num_top = self._sampling.prompt_logprobs.get(slot)
            # A request that has output went through its prompt before: it was preempted since.
            if num_top is None or self._state.output_positions(plan.slots[index : index + 1])[0]:
                continue
            first = int(plan.num_computed[index])
            last = min(first + int(plan.counts[index]), int(self._state.prompt_lengths[slot]) - 1)
            if last > first:
                start = int(plan.query_start[index])
                targets = self._state.token_ids[slot, first + 1 : last + 1].astype(np.int64)
                found[slot] = self._rows_logprobs(hidden[start : start + last - first], targets, num_top)
        return found

    def _rows_logprobs(self, hidden: torch.Tensor, targets: Int64, num_top: int) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        step = max(1, PROMPT_LOGPROB_ENTRIES // self._vocabulary_size)
        for first in range(0, len(targets), step):
            rows = slice(first, first + step)
            logits = self._logits(hidden[rows])
            if not self._parallel.tp.is_first:
                continue
            found += token_logprobs(
                logits,
                self._device.upload(targets[rows]),
                np.full(len(targets[rows]), num_top, np.int64),
                operators=self._model.operators,
            )
        return found


def _group_of_layer(model: Model, cache: KVCacheConfig) -> list[int]:
    groups = {layer: index for index, group in enumerate(cache.groups) for layer in group.layers}
    missing = [layer for layer in model.kv_cache_specs() if layer not in groups]
    if missing:
        raise EngineError(f"no KV-cache group has layer(s) {', '.join(map(str, missing))}; engine and worker disagree")
    return [groups[layer] for layer in model.kv_cache_specs()]
