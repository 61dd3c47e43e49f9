"""Times the parts of a model on this rank, as a decode step of a pipeline runs them. Knows no rank and no partition."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Final

import torch

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup
from fourfold.contracts.step_part import StepVote
from fourfold.messages import NewRequest, ScheduledRequest
from fourfold.models.layer_costs import TYPICAL_CONTEXT
from fourfold.models.stage_partition import Stage, StageCosts
from fourfold.sampling_params import SamplingParams
from fourfold.worker.decode_graphs import DecodeGraphs
from fourfold.worker.request_state import RequestState
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import InputBuffers, StepInputs, StepPlan

if TYPE_CHECKING:
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.models.decoder import Decoder
    from fourfold.models.description import LayerDescription, ModelDescription
    from fourfold.worker.device import Device

REPETITIONS: Final = 7
"""Of which the fastest counts."""
_WORK: Final = StepVote(has_work=True, may_pause=False)


@torch.inference_mode()
def time_parts(
    description: ModelDescription,
    device: Device,
    load: Callable[[Stage], Decoder],
    *,
    num_requests: int,
    group: GroupCoordinator,
    recorded: bool = True,
) -> StageCosts:
    """Seconds of the embedding, of every layer, and of the head with the choice of a token, for a batch of decodes.

    ``load`` gives the real layers of a stage, one of each kind. The ranks of ``group``, which share layers, must all
    call this, and so must engines that share experts. ``recorded``: whether decode steps will be, where they can.
    """
    kinds: dict[LayerDescription, float] = {}
    first = last = 0.0
    for number, kind in enumerate(description.layers):
        if kind in kinds:
            continue
        is_end = not kinds  # one model with both ends is enough
        decoder = load(Stage(layers=range(number, number + 1), is_first=is_end, is_last=is_end))
        step = _DecodeStep(decoder, device, num_requests=num_requests, group=group, recorded=recorded)
        kinds[kind] = step.seconds(step.run_layer)
        if is_end:
            first, last = step.seconds(step.embed), step.seconds(step.logits, step.choose_tokens)
        for part in decoder.step_parts:
            part.close()
    return StageCosts(layers=tuple(kinds[kind] for kind in description.layers), first=first, last=last)


class _DecodeStep:
    """One token each of some requests with a typical context, through one layer; recorded where steps are."""

    def __init__(
        self, decoder: Decoder, device: Device, *, num_requests: int, group: GroupCoordinator, recorded: bool
    ) -> None:
        self._decoder = decoder
        self._recorded = recorded
        self._device = device
        self._group = group
        self._num_requests = num_requests
        d = decoder.description
        length = min(TYPICAL_CONTEXT, d.max_model_len)
        ((layer, spec),) = decoder.kv_cache_specs().items()
        blocks = -(-length // spec.block_size)
        cache = KVCacheConfig(groups=(KVCacheGroup(spec=spec, layers=(layer,)),), num_blocks=1 + blocks * num_requests)
        self._caches = [device.zeros(decoder.kv_cache_shape(layer, cache.num_blocks), decoder.kv_cache_dtype)]
        self._inputs = _inputs(cache, device, d, length=length, blocks=blocks, num_requests=num_requests)
        # Tokens that differ, and are the same on all ranks: those of a mixture go to other experts each.
        random = torch.Generator().manual_seed(0)
        self._hidden, self._residual = (
            torch.randn(num_requests, d.hidden_size, generator=random).to(device.torch_device, decoder.dtype)
            for _ in range(2)
        )

    def seconds(
        self,
        part: Callable[[StepInputs], tuple[torch.Tensor, ...]],
        then: Callable[[torch.Tensor], object] | None = None,
    ) -> float:
        """Of the fastest repetition of ``part``, and what follows it outside of a recording."""
        graphs = DecodeGraphs(
            self._decoder.operators, max_batch_size=self._num_requests, group=self._group, enabled=self._recorded
        )
        found = []
        with closing(graphs):
            for _ in range(REPETITIONS):
                started = time.perf_counter()
                for shared in self._decoder.step_parts:
                    shared.begin_step(self._num_requests, _WORK, is_decode=True)
                if self._num_requests in graphs.sizes:
                    output, *_ = graphs.run(self._num_requests, lambda: self._inputs, part)
                else:
                    output, *_ = part(self._inputs)
                if then is not None:
                    then(output)
                self._device.synchronize()
                found.append(time.perf_counter() - started)
        return min(found)

    def embed(self, inputs: StepInputs) -> tuple[torch.Tensor]:
        return (self._decoder.embed(inputs.token_ids),)

    def run_layer(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decoder.run_layers(self._hidden, self._residual, inputs.positions, self._caches, inputs.metadata)

    def logits(self, inputs: StepInputs) -> tuple[torch.Tensor]:
        return (self._decoder.local_logits(self._decoder.finish(self._hidden, self._residual)),)

    def choose_tokens(self, local: torch.Tensor) -> None:
        logits = self._decoder.collect_logits(local)
        if self._group.is_first:
            self._device.broken_rows(logits)
            self._decoder.operators.argmax(logits)


def _inputs(
    cache: KVCacheConfig, device: Device, description: ModelDescription, *, length: int, blocks: int, num_requests: int
) -> StepInputs:
    state = RequestState(cache, slots=num_requests, max_model_len=length, vocabulary_size=description.vocab_size)
    scheduled = []
    for slot in range(num_requests):
        state.add(NewRequest("timing", slot, [0] * length, SamplingParams(), ()))
        table = list(range(1 + slot * blocks, 1 + (slot + 1) * blocks))
        scheduled.append(ScheduledRequest(slot, 1, length - 1, [table], reset_blocks=True))
    state.place_blocks(scheduled)
    sampling = SamplingState(slots=num_requests, vocabulary_size=description.vocab_size)
    buffers = InputBuffers(device, state, sampling, max_tokens=num_requests, max_requests=num_requests)
    plan = StepPlan.of(scheduled)
    buffers.fill(plan)
    return buffers.upload(plan)
