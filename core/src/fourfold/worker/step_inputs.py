"""The model's inputs of one step, built with array arithmetic in buffers that stay at their addresses.

Recorded steps read the same buffers. Knows the request state, not the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.messages import ScheduledRequest
from fourfold.worker.device import Device
from fourfold.worker.request_state import Int64, RequestState

PADDING_SLOT = -1
PADDING_BLOCK = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """T tokens of S requests. Tensors are views of the buffers: valid until the next step is built."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    metadata: tuple[AttentionMetadata, ...]
    """One a KV-cache group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Which tokens a step computes, on the host; S requests."""

    slots: Int64
    """[S]"""
    num_computed: Int64
    """[S]"""
    counts: Int64
    """[S]"""
    query_start: Int64
    """[S + 1]"""
    sampling: Int64
    """Indices of the requests that sample, ascending."""

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
        """The plan of one step message."""
        rows = [(r.slot, r.num_computed, r.num_tokens, r.samples) for r in scheduled]
        slots, computed, counts, samples = np.array(rows, np.int64).T
        query_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        return cls(
            slots=slots,
            num_computed=computed,
            counts=counts,
            query_start=query_start,
            sampling=np.flatnonzero(samples),
        )

    @property
    def num_requests(self) -> int:
        """S."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_start[-1])

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token and samples."""
        return self.num_tokens == self.num_requests == len(self.sampling)


class InputBuffers:
    """Room for the largest step, filled in place."""

    def __init__(self, device: Device, state: RequestState, *, max_tokens: int, max_requests: int) -> None:
        self._state = state
        self._token_ids = device.mirror((max_tokens,), torch.int64)
        self._positions = device.mirror((max_tokens,), torch.int64)
        self._query_start = device.mirror((max_requests + 1,), torch.int32)
        self._sequence_lengths = device.mirror((max_requests,), torch.int32)
        self._block_tables = [device.mirror((max_requests, t.max_blocks), torch.int32) for t in state.block_tables]
        self._slot_mappings = [device.mirror((max_tokens,), torch.int64) for _ in state.block_tables]

    def fill(self, plan: StepPlan, *, padded_to: int = 0) -> None:
        """Write the inputs of ``plan``; a plan of one token a request may be padded to more requests."""
        num_requests, num_tokens = plan.num_requests, plan.num_tokens
        if num_tokens == num_requests:
            row_of, positions = np.arange(num_tokens), plan.num_computed
        else:
            row_of = np.repeat(np.arange(num_requests), plan.counts)
            positions = np.arange(num_tokens) + (plan.num_computed - plan.query_start[:-1])[row_of]
        self._token_ids.host[:num_tokens] = self._state.token_ids[plan.slots[row_of], positions]
        self._positions.host[:num_tokens] = positions
        self._query_start.host[: num_requests + 1] = plan.query_start
        lengths = plan.num_computed + plan.counts
        self._sequence_lengths.host[:num_requests] = lengths
        longest = int(lengths.max())
        for table, target, mapping in zip(self._state.block_tables, self._block_tables, self._slot_mappings):
            used = -(-longest // table.block_size)
            target.host[:num_requests, :used] = table.blocks[plan.slots, :used]
            block, offset = np.divmod(positions, table.block_size)
            mapping.host[:num_tokens] = target.host[row_of, block] * np.int64(table.block_size) + offset
        if padded_to > num_requests:
            self._pad(num_requests, padded_to)

    def upload(self, plan: StepPlan) -> StepInputs:
        """What ``fill`` wrote, on the device."""
        lengths = plan.num_computed + plan.counts
        return self._inputs(
            num_tokens=plan.num_tokens,
            max_query_length=int(plan.counts.max()),
            query_start=plan.query_start.tolist(),
            sequence_lengths=lengths.tolist(),
        )

    def upload_padded(self, num_requests: int) -> StepInputs:
        """Inputs of ``num_requests`` requests of one token, with upper bounds for the numbers on the host."""
        return self._inputs(
            num_tokens=num_requests,
            max_query_length=1,
            query_start=list(range(num_requests + 1)),
            sequence_lengths=[self._state.max_model_len] * num_requests,
        )

    def _pad(self, first: int, last: int) -> None:
        self._token_ids.host[first:last] = 0
        self._positions.host[first:last] = 0
        self._query_start.host[first + 1 : last + 1] = np.arange(first + 1, last + 1)
        self._sequence_lengths.host[first:last] = 1
        for table, mapping in zip(self._block_tables, self._slot_mappings):
            table.host[first:last, 0] = PADDING_BLOCK
            mapping.host[first:last] = PADDING_SLOT

    def _inputs(
        self, *, num_tokens: int, max_query_length: int, query_start: list[int], sequence_lengths: list[int]
    ) -> StepInputs:
        num_requests = len(sequence_lengths)
        starts = self._query_start.upload(num_requests + 1)
        lengths = self._sequence_lengths.upload(num_requests)
        metadata = tuple(
            AttentionMetadata(
                query_start=starts,
                sequence_lengths=lengths,
                block_table=table.upload(num_requests),
                slot_mapping=mapping.upload(num_tokens),
                max_query_length=max_query_length,
                max_sequence_length=max(sequence_lengths),
                query_start_list=query_start,
                sequence_lengths_list=sequence_lengths,
            )
            for table, mapping in zip(self._block_tables, self._slot_mappings)
        )
        return StepInputs(
            token_ids=self._token_ids.upload(num_tokens),
            positions=self._positions.upload(num_tokens),
            metadata=metadata,
        )
