"""Runs steps on one rank: keeps the requests' state, builds inputs, calls the model, samples.

Steps run in the order of their messages; each leaves its sampled ids in the state, or on the device, where the next one
reads them. Decides nothing of what runs, and knows no process or transport.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fourfold.contracts.step_part import StepPart, StepVote
from fourfold.distributed.group_coordinator import GroupCoordinator
from fourfold.distributed.model_parallel import ModelParallel
from fourfold.errors import CheckpointError, RequestError
from fourfold.layout import ParallelLayout
from fourfold.messages import NewRequest, ScheduledRequest, StepMessage, StepOutput
from fourfold.sampling_params import SamplingParams
from fourfold.worker.decode_graphs import DecodeGraphs
from fourfold.worker.device import Device
from fourfold.worker.launched_step import NOT_FINITE, LaunchedStep
from fourfold.worker.layer_caches import LayerCaches
from fourfold.worker.logprobs import LogprobRows, token_logprobs
from fourfold.worker.request_state import Int64, RequestState
from fourfold.worker.runnable_model import Model
from fourfold.worker.sampler import Sampled, Sampler
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import InputBuffers, SamplingInputs, StepInputs, StepPlan

if TYPE_CHECKING:
    from fourfold.config.scheduler_config import SchedulerConfig
    from fourfold.contracts.kv_cache_spec import KVCacheConfig
    from fourfold.models.adapters import AdapterSlots
    from fourfold.worker.penalties import SeenTokens
    from fourfold.worker.pipeline_stage import PipelineStage

PROMPT_LOGPROB_ENTRIES = 1 << 22
"""Logits of prompt positions computed at a time: 16 MiB of fp32."""
WARM_UP_PROMPT = 7
"""Tokens; with one of output they fit the smallest block."""
_NO_SLOTS: Final = np.zeros(0, np.int64)
ALONE = ModelParallel(
    layout=ParallelLayout(),
    rank=0,
    tp=GroupCoordinator(name="tp", ranks=(0,), rank=0),
    pp=GroupCoordinator(name="pp", ranks=(0,), rank=0),
    dp=GroupCoordinator(name="dp", ranks=(0,), rank=0),
    ep=GroupCoordinator(name="ep", ranks=(0,), rank=0),
)
"""The groups of an engine of one rank."""


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
        adapters: AdapterSlots | None = None,
        join: Callable[[RequestState], PipelineStage] | None = None,
        step_parts: Sequence[StepPart] = (),
        lockstep: bool = False,
    ) -> None:
        """``join`` makes this rank a stage of a pipeline; None: it has all layers. ``step_parts`` are the model's;
        ``lockstep``: they step together with those of other engines, in sizes that no recorded step has.
        """
        self._step_parts = tuple(step_parts)
        self._model = model
        self._parallel = parallel
        self._device = device
        self._adapters = adapters
        self._vocabulary_size = vocabulary_size
        self._num_groups = len(cache.groups)
        self._max_tokens = scheduler.max_num_batched_tokens
        slots = scheduler.num_slots
        self._state = RequestState(cache, slots=slots, max_model_len=max_model_len, vocabulary_size=vocabulary_size)
        self._pipeline = None if join is None else join(self._state)
        self._sampling = SamplingState(slots=slots, vocabulary_size=vocabulary_size)
        self._sampler = Sampler(self._sampling, operators=model.operators, device=device)
        self._buffers = InputBuffers(
            device, self._state, self._sampling, max_tokens=self._max_tokens, max_requests=scheduler.max_num_seqs
        )
        self._graphs = DecodeGraphs(
            model.operators,
            max_batch_size=scheduler.max_num_seqs,
            group=parallel.tp,
            enabled=not scheduler.enforce_eager and not lockstep,
        )
        # Where one rank has the logits, plain sampling needs no host: it is part of the recorded step.
        self._draws_ahead = device.asynchronous and parallel.tp.world_size == 1
        self._drawn = device.zeros((scheduler.max_num_seqs,), torch.int64)
        """The codes of the last recorded step; see Sampled."""
        self._owed: deque[tuple[LaunchedStep, list[tuple[int, SeenTokens]]]] = deque()
        """Steps whose sampled ids are still to be counted for penalties: rows, and who counts them."""
        self._caches = LayerCaches(model, device, cache)

    def execute(self, message: StepMessage) -> StepOutput:
        """``launch``, and wait for what it brings."""
        return self.launch(message).result()

    @torch.inference_mode()
    def launch(self, message: StepMessage) -> LaunchedStep:
        """Start one step; all ranks run the same ones. The first that shares the last layers has what is sampled.

        What fails for one request alone is in the reply's ``errors``.
        """
        self._parallel.begin_step(message.step)
        if self._pipeline is not None:
            self._pipeline.take_ids(message)
        errors = self._update_state(message)
        vote = self._begin_step(message)
        if not message.scheduled:
            return LaunchedStep(message.step, device=self._device, errors=errors, vote=vote)
        plan = StepPlan.of(message.scheduled)
        adapted = self._adapters is not None and self._adapters.activate(
            self._state.adapters[plan.slots], plan.counts, self._device.upload
        )
        # Recorded steps know no adapters.
        size = self._graphs.size_for(plan.num_requests) if plan.is_decode and not adapted else None
        self._buffers.fill(plan, padded_to=size or 0)
        started = time.perf_counter()  # what lies before is overhead in the engine's books
        if self._pipeline is not None:
            self._pipeline.receive(message.step, plan)
            if not self._pipeline.is_last:
                self._pass_on(self._pipeline, message.step, plan, size)
                return LaunchedStep(message.step, device=self._device, errors=errors)
        slots = plan.slots[plan.sampling]
        prompts: dict[int, list[LogprobRows]] = {}
        sampled = self._replay(size, slots) if size is not None else self._run_plainly(plan, slots, prompts)
        if self._pipeline is not None and sampled is not None:
            self._pipeline.send_ids(message.step, sampled.token_ids)
        launched = LaunchedStep(
            message.step,
            device=self._device,
            errors=errors,
            slots=slots,
            sampled=sampled,
            prompts=prompts,
            started=started,
            vote=vote,
        )
        if sampled is not None:
            self._note(launched, slots, sampled)
        return launched

    def warm_up(self) -> None:
        """Run a small prefill and a decode through everything that a real step uses; they write to block 0 alone.

        Raises CheckpointError for a model whose logits are not finite: no request could ever be answered.
        """
        blocks = [[0] for _ in range(self._num_groups)]
        length = min(WARM_UP_PROMPT, self._max_tokens, self._state.max_model_len - 1)
        request = NewRequest("warm-up", 0, [0] * length, SamplingParams(temperature=0.0), ())
        prefill = ScheduledRequest(0, length, 0, blocks, reset_blocks=True)
        decode = ScheduledRequest(0, 1, length, [[] for _ in blocks])
        outputs = [self.execute(StepMessage(step=0, new=[request], scheduled=[prefill]))]
        # Now, while there are no real tokens: recording may run a step several times.
        self.record_steps()
        outputs.append(self.execute(StepMessage(step=1, scheduled=[decode])))
        self.execute(StepMessage(step=2, ended=[0]))
        if any(NOT_FINITE in output.errors.values() for output in outputs):
            hint = "" if self._device.dtype == torch.float32 else ", or it needs --dtype float32"
            raise CheckpointError(
                f"the model's first logits are not finite; its weights are damaged, or its config.json is wrong{hint}"
            )

    @property
    def waited_seconds(self) -> float:
        """Spent on other stages of the pipeline so far."""
        return 0.0 if self._pipeline is None else self._pipeline.waited_seconds

    def run_largest_step(self) -> int:
        """Compute a step of as many tokens and requests as there may be, in block 0.

        Returns the bytes that recorded steps will need beside that: they share memory of their own, most of it logits.
        """
        count = min(self._buffers.max_requests, self._max_tokens)
        length = max(1, min(self._max_tokens // count, self._state.max_model_len - 1))
        sampling = SamplingParams(temperature=1.0, seed=0)
        new = [NewRequest("largest", slot, [0] * length, sampling, ()) for slot in range(count)]
        blocks = [[0] * -(-length // table.block_size) for table in self._state.block_tables]
        scheduled = [ScheduledRequest(slot, length, 0, blocks, reset_blocks=True) for slot in range(count)]
        self.execute(StepMessage(step=0, new=new, scheduled=scheduled))
        self.execute(StepMessage(step=1, ended=list(range(count))))
        return 2 * max(self._graphs.sizes, default=0) * self._vocabulary_size * torch.float32.itemsize

    def close(self) -> None:
        """Release recorded steps, the KV cache and the other stages; idempotent."""
        self.release_cache()
        if self._pipeline is not None:
            self._pipeline.close()

    def release_cache(self) -> None:
        """Give the memory of the KV cache back: no step until ``restore_cache``."""
        self.forget_steps()
        self._caches.release()

    def restore_cache(self) -> None:
        """Take it again, empty."""
        self._caches.allocate()

    def forget_steps(self) -> None:
        """Let go of all recorded steps, as what they read moves; they are recorded again, on devices that record at
        warm-up by ``record_steps``.
        """
        self._graphs.close()

    @torch.inference_mode()
    def record_steps(self) -> None:
        """Record all decode steps now, where recording at first use would be noticed; on all ranks."""
        if not self._device.asynchronous:
            return

        def padding(size: int) -> StepInputs:
            self._buffers.fill_padding(size)
            return self._buffers.upload_padded(size)

        self._graphs.record_all(padding, self._decode)

    def _replay(self, size: int, slots: Int64) -> Sampled:
        """Run the recorded step of ``size`` requests on the buffers, which are padded to it."""
        self._buffers.send()
        (local,) = self._graphs.run(size, lambda: self._buffers.upload_padded(size), self._decode)
        count = len(slots)
        if self._draws_ahead and self._sampler.is_plain(slots):
            return Sampled(self._drawn[:count], self._drawn[:count], None, _NO_SLOTS)
        return self._sample(local[:count], slots, self._buffers.sampling(count))

    def _run_plainly(self, plan: StepPlan, slots: Int64, prompts: dict[int, list[LogprobRows]]) -> Sampled | None:
        """Run the step that the buffers hold, one operation at a time; None if it samples nothing.

        The prompts' log probabilities go into ``prompts``.
        """
        inputs = self._buffers.upload(plan)
        hidden = self._hidden(inputs)
        if self._sampling.prompt_logprobs:
            prompts.update(self._prompt_logprobs(plan, hidden))
        if not len(plan.sampling):
            return None
        if len(plan.sampling) != plan.num_tokens:
            hidden = hidden[self._device.upload(plan.query_start[1:][plan.sampling] - 1)]
        return self._sample(self._model.local_logits(hidden), slots, inputs.sampling)

    def _sample(self, local: torch.Tensor, slots: Int64, inputs: SamplingInputs) -> Sampled:
        """The same ids on all ranks; ``local`` is each one's part of the logits."""
        sampled = self._choose(local, slots, inputs)
        if self._device.asynchronous:
            self._buffers.keep(inputs.slots, sampled.token_ids)
        return sampled

    def _choose(self, local: torch.Tensor, slots: Int64, inputs: SamplingInputs) -> Sampled:
        tp = self._parallel.tp
        if tp.world_size > 1 and self._sampler.is_greedy(slots):  # then nobody needs all logits
            token_ids, broken = self._model.best_tokens(local, self._device.broken_rows(local))
            return Sampled(token_ids, token_ids.masked_fill(broken, -1), None, _NO_SLOTS)
        logits = self._model.collect_logits(local)
        if tp.is_first:
            if self._sampler.looks_back(slots):
                self._count_owed()
            sampled = self._sampler.sample(logits, slots, self._state.output_positions(slots), inputs)
        else:
            token_ids = torch.zeros(len(slots), dtype=torch.int64, device=self._device.torch_device)
            sampled = Sampled(token_ids, token_ids, None, _NO_SLOTS)
        if tp.world_size > 1:
            token_ids = tp.broadcast(sampled.token_ids)
            sampled = sampled._replace(token_ids=token_ids, codes=sampled.codes if tp.is_first else token_ids)
        return sampled

    def _note(self, launched: LaunchedStep, slots: Int64, sampled: Sampled) -> None:
        """Let the steps that follow know what this one sampled."""
        if self._device.asynchronous:
            self._state.advance(slots)
        else:
            self._state.append(slots, sampled.token_ids.numpy())
        seen = self._sampling.seen
        if seen and self._parallel.tp.is_first:
            counting = [(row, seen[slot]) for row, slot in enumerate(slots.tolist()) if slot in seen]
            if counting:
                self._owed.append((launched, counting))

    def _count_owed(self) -> None:
        """Count for penalties what was sampled before; waits for steps that are still on the device."""
        while self._owed:
            launched, counting = self._owed.popleft()
            codes = launched.codes()
            for row, seen in counting:
                if codes[row] >= 0:
                    seen.add(int(codes[row]))

    def _begin_step(self, message: StepMessage) -> StepVote | None:
        """What the votes of all engines that step together come to; a step without tokens is over then."""
        if message.vote is None and not message.scheduled:
            return None
        num_tokens = sum(entry.num_tokens for entry in message.scheduled)
        vote = message.vote or StepVote(has_work=True, may_pause=False)
        for part in self._step_parts:
            vote = part.begin_step(num_tokens, vote, is_decode=num_tokens == len(message.scheduled))
        return vote

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

    def _pass_on(self, pipeline: PipelineStage, step: int, plan: StepPlan, size: int | None) -> None:
        """Run the plan in the buffers through this stage's layers and on to the next stage."""
        if size is None:
            hidden, residual = self._run_stage(pipeline, self._buffers.upload(plan))
        else:
            self._buffers.send()
            hidden, residual = self._graphs.run(size, lambda: self._buffers.upload_padded(size), self._decode)
        pipeline.send(step, plan, hidden, residual)

    def _run_stage(self, pipeline: PipelineStage, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return pipeline.run(inputs, self._caches.tensors, self._caches.metadata(inputs))

    def _decode(self, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """What is recorded: this rank's part of the logits, and with it the ids where plain sampling can follow; before
        the last stage what is handed on.
        """
        for part in self._step_parts:
            part.begin_recording(len(inputs.positions))
        if self._pipeline is not None and not self._pipeline.is_last:
            return self._run_stage(self._pipeline, inputs)
        logits = self._model.local_logits(self._hidden(inputs))
        if self._draws_ahead:
            sampled = self._sampler.plain(logits, inputs.sampling)
            self._buffers.keep(inputs.sampling.slots, sampled.token_ids)
            self._drawn[: len(sampled.codes)].copy_(sampled.codes)
        return (logits,)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.collect_logits(self._model.local_logits(hidden))

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        if self._pipeline is not None:
            return self._pipeline.finish(*self._run_stage(self._pipeline, inputs))
        token_ids = self._buffers.token_ids(inputs)
        return self._model.forward(token_ids, inputs.positions, self._caches.tensors, self._caches.metadata(inputs))

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[LogprobRows]]:
        """Of the prompt tokens that this step's positions predict: the last position of a chunk predicts the first
        token of the next one.
        """
        found: dict[int, list[LogprobRows]] = {}
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

    def _rows_logprobs(self, hidden: torch.Tensor, targets: Int64, num_top: int) -> list[LogprobRows]:
        found: list[LogprobRows] = []
        step = max(1, PROMPT_LOGPROB_ENTRIES // self._vocabulary_size)
        for first in range(0, len(targets), step):
            rows = slice(first, first + step)
            logits = self._logits(hidden[rows])
            if not self._parallel.tp.is_first:
                continue
            wanted = np.full(len(targets[rows]), num_top, np.int64)
            operators = self._model.operators
            found.append(token_logprobs(logits, self._device.upload(targets[rows]), wanted, operators=operators))
        return found
