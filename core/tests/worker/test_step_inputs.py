from __future__ import annotations

import pytest
import torch

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.messages import NewRequest, ScheduledRequest
from fourfold.sampling_params import SamplingParams
from fourfold.worker.cpu_device import CpuDevice
from fourfold.worker.request_state import RequestState
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_inputs import InputBuffers, StepPlan


@pytest.fixture
def state() -> RequestState:
    groups = tuple(
        KVCacheGroup(spec=KVCacheSpec(block_size=size, bytes_per_block=1), layers=(size,)) for size in (8, 16)
    )
    state = RequestState(KVCacheConfig(groups=groups, num_blocks=9), slots=3, max_model_len=40, vocabulary_size=100)
    for slot, length in ((0, 10), (2, 3)):
        prompt = [10 * slot + position for position in range(length)]
        state.add(NewRequest("r", slot, prompt, SamplingParams(), (), []))
    state.place_blocks(
        [
            ScheduledRequest(2, 3, 0, [[4], [7]], reset_blocks=True),
            ScheduledRequest(0, 10, 0, [[3, 1], [5]], reset_blocks=True),
        ]
    )
    return state


@pytest.fixture
def buffers(state: RequestState) -> InputBuffers:
    sampling = SamplingState(slots=3, vocabulary_size=100)
    return InputBuffers(CpuDevice(dtype=torch.float32), state, sampling, max_tokens=16, max_requests=4)


def test_a_mixed_step(buffers: InputBuffers) -> None:
    plan = StepPlan.of([ScheduledRequest(2, 1, 2, [[], []]), ScheduledRequest(0, 4, 6, [[], []], samples=False)])
    assert (plan.num_requests, plan.num_tokens, plan.sampling.tolist(), plan.is_decode) == (2, 5, [0], False)
    buffers.fill(plan)
    inputs = buffers.upload(plan)
    assert inputs.token_ids.tolist() == [22, 6, 7, 8, 9]
    assert inputs.positions.tolist() == [2, 6, 7, 8, 9]
    small, large = inputs.metadata
    assert small.slot_mapping.tolist() == [4 * 8 + 2, 3 * 8 + 6, 3 * 8 + 7, 8 + 0, 8 + 1]
    assert large.slot_mapping.tolist() == [7 * 16 + 2, *range(5 * 16 + 6, 5 * 16 + 10)]
    assert [small.block_table[0, 0], *small.block_table[1, :2]] == [4, 3, 1]
    assert (small.query_start.tolist(), small.query_start_list) == ([0, 1, 5], [0, 1, 5])
    assert (small.sequence_lengths.tolist(), small.sequence_lengths_list) == ([3, 10], [3, 10])
    assert (small.max_query_length, small.max_sequence_length) == (4, 10)
    assert (small.query_start.dtype, small.slot_mapping.dtype) == (torch.int32, torch.int64)
    assert small.block_table.is_contiguous()


def test_a_padded_decode(buffers: InputBuffers) -> None:
    dirty = StepPlan.of([ScheduledRequest(slot, 1, 2, [[], []]) for slot in (0, 2, 0, 2)])
    buffers.fill(dirty)
    plan = StepPlan.of([ScheduledRequest(0, 1, 9, [[], []])])
    assert plan.is_decode
    buffers.fill(plan, padded_to=3)
    inputs = buffers.upload_padded(3)
    assert inputs.token_ids.tolist() == [9, 0, 0]
    assert inputs.positions.tolist() == [9, 0, 0]
    for metadata, own in zip(inputs.metadata, (8 + 1, 5 * 16 + 9)):
        assert metadata.slot_mapping.tolist() == [own, -1, -1]
        assert metadata.sequence_lengths.tolist() == [10, 1, 1]
        assert metadata.block_table[1:, 0].tolist() == [0, 0]
        assert metadata.query_start.tolist() == [0, 1, 2, 3]
        assert (metadata.max_query_length, metadata.max_sequence_length) == (1, 40)


def test_inputs_stay_at_their_addresses(buffers: InputBuffers) -> None:
    plan = StepPlan.of([ScheduledRequest(0, 1, 3, [[], []])])
    buffers.fill(plan)
    first = buffers.upload(plan)
    buffers.fill(StepPlan.of([ScheduledRequest(2, 1, 1, [[], []])]))
    assert first.token_ids.tolist() == [21]
    assert first.metadata[0].slot_mapping.tolist() == [4 * 8 + 1]
