"""The workers' copy of every request, one row a request: token ids, lengths and block tables.

A step message carries only what changed; sampled ids are appended here and feed the next step, or are only counted
where they stay on the device. Knows nothing of scheduling, sampling or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fourfold.contracts.kv_cache_spec import KVCacheConfig
from fourfold.errors import RequestError
from fourfold.messages import NewRequest, ScheduledRequest

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Element = TypeVar("Element", bound=np.generic)


class RequestState:
    """Rows are slots; they grow as the engine numbers more (preempted requests keep theirs)."""

    token_ids: Int32
    """[slots, max_model_len + 1]: prompt, then output."""
    num_tokens: Int64
    """[slots]: tokens there are."""
    num_known: Int64
    """[slots]: how many of them, from the start, ``token_ids`` has."""
    prompt_lengths: Int64
    """[slots]"""
    adapters: Int64
    """[slots]: the slots of LoRA adapters; 0: none."""

    def __init__(self, cache: KVCacheConfig, *, slots: int, max_model_len: int, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self.max_model_len = max_model_len
        # One more than the context: the last position may still sample.
        self.token_ids = np.zeros((slots, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(slots, np.int64)
        self.num_known = np.zeros(slots, np.int64)
        self.prompt_lengths = np.zeros(slots, np.int64)
        self.adapters = np.zeros(slots, np.int64)
        self.block_tables = [BlockTable(slots, max_model_len, group.spec.block_size) for group in cache.groups]
        """One a KV-cache group."""

    @property
    def slots(self) -> int:
        """Rows there are."""
        return len(self.num_tokens)

    def add(self, request: NewRequest) -> None:
        """Take a request into its slot, with the output it has so far.

        Raises RequestError for ids that do not fit; the slot then holds harmless ones of equal number.
        """
        slot = request.slot
        self._reach(slot)
        known = np.array([*request.prompt_token_ids, *request.output_token_ids], np.int64)
        length = min(len(known), self.max_model_len)
        self.num_tokens[slot] = self.num_known[slot] = length
        self.prompt_lengths[slot] = min(len(request.prompt_token_ids), length)
        self.adapters[slot] = request.adapter
        self.token_ids[slot, :length] = 0
        if len(known) > length:
            raise RequestError(f"the request has {len(known)} tokens; the context holds {length}")
        wrong = known[(known < 0) | (known >= self._vocabulary_size)]
        if len(wrong):
            raise RequestError(f"token id {wrong[0]} is outside the vocabulary, 0 to {self._vocabulary_size - 1}")
        self.token_ids[slot, :length] = known

    def place_blocks(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Append the blocks that a step brings, after emptying the tables it resets."""
        for request in scheduled:
            if request.reset_blocks:
                for table in self.block_tables:
                    table.lengths[request.slot] = 0
            elif not any(request.new_blocks):
                continue
            for table, blocks in zip(self.block_tables, request.new_blocks):
                if blocks:
                    table.append(request.slot, blocks)

    def append(self, slots: Int64, token_ids: Int64) -> None:
        """Append one sampled id to each of ``slots`` (distinct)."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1
        self.num_known[slots] += 1

    def advance(self, slots: Int64) -> None:
        """Count one more sampled id for each of ``slots`` (distinct) that the device alone knows."""
        self.num_tokens[slots] += 1

    def output_positions(self, slots: Int64) -> Int64:
        """The index in the output of the token that each of ``slots`` samples next."""
        positions: Int64 = self.num_tokens[slots] - self.prompt_lengths[slots]
        return positions

    def _reach(self, slot: int) -> None:
        if slot < self.slots:
            return
        slots = max(slot + 1, 2 * self.slots)
        self.token_ids = grown(self.token_ids, slots)
        self.num_tokens = grown(self.num_tokens, slots)
        self.num_known = grown(self.num_known, slots)
        self.prompt_lengths = grown(self.prompt_lengths, slots)
        self.adapters = grown(self.adapters, slots)
        for table in self.block_tables:
            table.grow(slots)


class BlockTable:
    """Cache blocks of every slot in one KV-cache group, in order of position."""

    blocks: Int32
    """[slots, max_blocks]; entries past a row's length are stale."""

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.blocks = np.zeros((slots, self.max_blocks), np.int32)
        self.lengths = np.zeros(slots, np.int64)

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        """Add ``blocks`` at the end of a slot's row."""
        length = int(self.lengths[slot])
        self.blocks[slot, length : length + len(blocks)] = blocks
        self.lengths[slot] = length + len(blocks)

    def grow(self, slots: int) -> None:
        """Have ``slots`` rows."""
        self.blocks = grown(self.blocks, slots)
        self.lengths = grown(self.lengths, slots)


def grown(array: npt.NDArray[Element], rows: int) -> npt.NDArray[Element]:
    """A copy of ``array`` with ``rows`` rows, the new ones zero."""
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
