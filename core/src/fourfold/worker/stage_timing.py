"""Times the parts of a model on this rank, as a decode step of a pipeline runs them. Knows no rank and no partition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup
from fourfold.messages import NewRequest, ScheduledRequest
from fourfold.models.layer_costs import TYPICAL_CONTEXT
from fourfold.models.stage_partition import Stage, StageCosts
from fourfold.sampling_params import SamplingParams
from fourfold.worker.request_state import RequestState
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import InputBuffers, StepInputs, StepPlan

if TYPE_CHECKING:
    from fourfold.models.decoder import Decoder
    from fourfold.models.description import LayerDescription, ModelDescription
    from fourfold.worker.device import Device

REPETITIONS: Final = 7
"""Of which the fastest counts."""


@torch.inference_mode()
def time_parts(
    description: ModelDescription, device: Device, load: Callable[[Stage], Decoder], *, num_requests: int
) -> StageCosts:
    """Seconds of the embedding, of every layer, and of the head with the choice of a token, for a batch of decodes.

    ``load`` gives the real layers of a stage, one of each kind. The ranks that share layers must all call this.
    """
    kinds: dict[LayerDescription, float] = {}
    first = last = 0.0
    for number, kind in enumerate(description.layers):
        if kind in kinds:
            continue
        is_end = not kinds  # one model with both ends is enough
        decoder = load(Stage(layers=range(number, number + 1), is_first=is_end, is_last=is_end))
        step = _DecodeStep(decoder, device, num_requests=num_requests)
        kinds[kind] = step.seconds(step.run_layer)
        if is_end:
            first, last = step.seconds(step.embed), step.seconds(step.choose_tokens)
    return StageCosts(layers=tuple(kinds[kind] for kind in description.layers), first=first, last=last)


class _DecodeStep:
    """One token each of some requests with a typical context, through one layer."""

    def __init__(self, decoder: Decoder, device: Device, *, num_requests: int) -> None:
        self._decoder = decoder
        self._device = device
        d = decoder.description
        length = min(TYPICAL_CONTEXT, d.max_model_len)
        ((layer, spec),) = decoder.kv_cache_specs().items()
        blocks = -(-length // spec.block_size)
        cache = KVCacheConfig(groups=(KVCacheGroup(spec=spec, layers=(layer,)),), num_blocks=1 + blocks * num_requests)
        self._caches = [device.zeros(decoder.kv_cache_shape(layer, cache.num_blocks), decoder.dtype)]
        self._inputs = _inputs(cache, device, d, length=length, blocks=blocks, num_requests=num_requests)
        shape = (num_requests, d.hidden_size)
        self._hidden = torch.ones(shape, dtype=decoder.dtype, device=device.torch_device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Of the fastest repetition."""
        found = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            run()
            self._device.synchronize()
            found.append(time.perf_counter() - started)
        return min(found)

    def embed(self) -> torch.Tensor:
        return self._decoder.embed(self._inputs.token_ids)

    def run_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self._hidden.clone()
        return self._decoder.run_layers(
            self._hidden.clone(), residual, self._inputs.positions, self._caches, self._inputs.metadata
        )

    def choose_tokens(self) -> torch.Tensor:
        hidden = self._decoder.finish(self._hidden.clone(), self._hidden.clone())
        return self._decoder.operators.argmax(self._decoder.logits(hidden))


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
