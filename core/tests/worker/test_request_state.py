from __future__ import annotations

import numpy as np
import pytest

from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.errors import RequestError
from fourfold.messages import NewRequest, ScheduledRequest
from fourfold.sampling_params import SamplingParams
from fourfold.worker.request_state import RequestState, grown


@pytest.fixture
def state() -> RequestState:
    groups = tuple(
        KVCacheGroup(spec=KVCacheSpec(block_size=size, bytes_per_block=1), layers=(size,)) for size in (8, 16)
    )
    return RequestState(KVCacheConfig(groups=groups, num_blocks=9), slots=2, max_model_len=40, vocabulary_size=100)


def _request(slot: int, prompt: list[int], output: list[int] | None = None) -> NewRequest:
    return NewRequest("r", slot, prompt, SamplingParams(), (), output or [])


def test_add_and_append(state: RequestState) -> None:
    state.add(_request(0, [1, 2, 3]))
    state.add(_request(1, [4], [5, 6]))
    slots = np.array([1, 0])
    assert state.output_positions(slots).tolist() == [2, 0]
    state.append(slots, np.array([70, 80]))
    assert state.token_ids[0, :4].tolist() == [1, 2, 3, 80]
    assert state.token_ids[1, :4].tolist() == [4, 5, 6, 70]
    assert state.num_tokens.tolist() == [4, 4]
    assert state.output_positions(slots).tolist() == [3, 1]


def test_block_tables_of_each_group(state: RequestState) -> None:
    state.add(_request(1, [1] * 20))
    first = ScheduledRequest(1, 20, 0, [[5, 3, 4], [7, 1]], reset_blocks=True)
    state.place_blocks([first])
    state.place_blocks([ScheduledRequest(1, 1, 20, [[2], []])])
    small, large = state.block_tables
    assert (small.max_blocks, large.max_blocks) == (5, 3)
    assert small.blocks[1, :4].tolist() == [5, 3, 4, 2]
    assert large.blocks[1, :2].tolist() == [7, 1]
    assert (small.lengths.tolist(), large.lengths.tolist()) == ([0, 4], [0, 2])
    state.place_blocks([ScheduledRequest(1, 5, 0, [[8], [6]], reset_blocks=True)])
    assert (int(small.lengths[1]), int(small.blocks[1, 0]), int(large.blocks[1, 0])) == (1, 8, 6)


def test_a_slot_past_the_end_grows_every_array(state: RequestState) -> None:
    state.add(_request(0, [1, 2]))
    state.place_blocks([ScheduledRequest(0, 2, 0, [[5], [6]], reset_blocks=True)])
    state.add(_request(6, [9]))
    state.place_blocks([ScheduledRequest(6, 1, 0, [[4], [3]], reset_blocks=True)])
    assert state.slots == 7
    assert state.token_ids[[0, 6], 0].tolist() == [1, 9]
    assert [table.blocks[[0, 6], 0].tolist() for table in state.block_tables] == [[5, 4], [6, 3]]


def test_refused_requests_leave_harmless_rows(state: RequestState) -> None:
    with pytest.raises(RequestError, match="41 tokens; the context holds 40"):
        state.add(_request(0, [3] * 40, [3]))
    assert state.num_tokens[0] == 40
    with pytest.raises(RequestError, match="token id 100 is outside the vocabulary, 0 to 99"):
        state.add(_request(0, [3, 100, 7]))
    assert state.num_tokens[0] == 3
    assert not state.token_ids[0].any()


def test_grown_keeps_values_and_type() -> None:
    larger = grown(np.array([[1, 2]], np.int32), 3)
    assert larger.dtype == np.int32
    assert larger.tolist() == [[1, 2], [0, 0], [0, 0]]
