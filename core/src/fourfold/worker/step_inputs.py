"""The inputs of one step, built with array arithmetic in buffers that stay at their addresses.

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
from fourfold.worker.sampling_state import SamplingState
from fourfold.worker.step_sections import DeviceSections, HostSections, StepSections

PADDING_SLOT = -1
PADDING_BLOCK = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingInputs:
    """How R rows are drawn, for ``Operators.gumbel_argmax``, and whose they are."""

    slots: torch.Tensor
    """int64 [R]"""
    inverse_temperature: torch.Tensor
    """fp32 [R]; 0 is greedy."""
    seeds: torch.Tensor
    """int64 [R]"""
    positions: torch.Tensor
    """int64 [R]: the index in the output that is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """T tokens of S requests. Tensors are views of the buffers: valid until the next step is built."""

    token_ids: torch.Tensor
    """int64 [T]; on an asynchronous device those that the host knows."""
    sources: torch.Tensor
    """int64 [T]: where in ``InputBuffers.feed`` each token's id is. For asynchronous devices."""
    positions: torch.Tensor
    """int64 [T]"""
    metadata: tuple[AttentionMetadata, ...]
    """One a KV-cache group."""
    sampling: SamplingInputs
    """Of the rows that sample, in their order."""


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
    """Room for the largest step, filled in place; one upload a step."""

    def __init__(
        self,
        device: Device,
        state: RequestState,
        sampling: SamplingState,
        *,
        max_tokens: int,
        max_requests: int,
    ) -> None:
        self.max_requests = max_requests
        self._state = state
        self._sampling = sampling
        self._max_blocks = tuple(table.max_blocks for table in state.block_tables)
        self._feeds = device.asynchronous
        self._num_fed = state.slots + 1
        """Ids of the last sampled tokens, and one that padding rows overwrite."""
        largest = StepSections(max_tokens, max_requests, self._max_blocks)
        self._staging = device.staging(largest.nbytes, kept=largest.aligned(self._num_fed * 8))
        self._known: dict[int, StepSections] = {}
        """Sections of decode steps by number of requests."""
        self._place = 0
        self._current = largest
        kept = self._staging.device[: len(self._staging.device) - largest.nbytes]
        self._first_known = len(kept) // 8
        self._last_sampled = kept.view(torch.int64)
        self._uploaded = self._staging.device[len(kept) :]
        self._feed = self._staging.device[: len(kept) + 8 * max_tokens].view(torch.int64)

    def fill(self, plan: StepPlan, *, padded_to: int = 0) -> None:
        """Write the inputs of ``plan``; a plan of one token a request may be padded to more requests."""
        num_requests, num_tokens = plan.num_requests, plan.num_tokens
        decode = num_tokens == num_requests
        if decode:
            row_of, positions = np.arange(num_tokens), plan.num_computed
        else:
            row_of = np.repeat(np.arange(num_requests), plan.counts)
            positions = np.arange(num_tokens) + (plan.num_computed - plan.query_start[:-1])[row_of]
        host = self._claim(max(num_tokens, padded_to), max(num_requests, padded_to))
        slot_of = plan.slots if decode else plan.slots[row_of]
        host.token_ids[:num_tokens] = self._state.token_ids[slot_of, positions]
        if self._feeds:
            sampled = positions >= self._state.num_known[slot_of]
            host.sources[:num_tokens] = np.where(sampled, slot_of, np.arange(num_tokens) + self._first_known)
        host.positions[:num_tokens] = positions
        host.query_start[: num_requests + 1] = plan.query_start
        lengths = plan.num_computed + plan.counts
        host.sequence_lengths[:num_requests] = lengths
        longest = int(lengths.max())
        for table, target, mapping in zip(self._state.block_tables, host.block_tables, host.slot_mappings):
            used = -(-longest // table.block_size)
            target[:num_requests, :used] = table.blocks[plan.slots, :used]
            block, offset = np.divmod(positions, table.block_size)
            mapping[:num_tokens] = target[row_of, block] * np.int64(table.block_size) + offset
        self._fill_sampling(host, plan.slots[plan.sampling])
        if padded_to > num_requests:
            self._pad(host, num_requests, padded_to)

    def fill_padding(self, num_requests: int) -> None:
        """Write inputs of ``num_requests`` padding rows alone."""
        host = self._claim(num_requests, num_requests)
        host.query_start[0] = 0
        self._pad(host, 0, num_requests)

    def upload(self, plan: StepPlan) -> StepInputs:
        """What ``fill`` wrote, on the device."""
        lengths = plan.num_computed + plan.counts
        return self._inputs(
            num_sampling=len(plan.sampling),
            max_query_length=int(plan.counts.max()),
            query_start=plan.query_start.tolist(),
            sequence_lengths=lengths.tolist(),
        )

    def upload_padded(self, num_requests: int) -> StepInputs:
        """Inputs of ``num_requests`` requests of one token, with upper bounds for the numbers on the host."""
        return self._inputs(
            num_sampling=num_requests,
            max_query_length=1,
            query_start=list(range(num_requests + 1)),
            sequence_lengths=[self._state.max_model_len] * num_requests,
        )

    def send(self) -> None:
        """Upload what ``fill`` wrote, for a recorded step that has its views of it already."""
        self._staging.upload(self._place, self._current.nbytes)

    def sampling(self, num_rows: int) -> SamplingInputs:
        """The device's view of the rows that sample, in the step that was filled last."""
        device = self._on_device()
        return SamplingInputs(
            slots=device.sampling_slots[:num_rows],
            inverse_temperature=device.inverse_temperature[:num_rows],
            seeds=device.seeds[:num_rows],
            positions=device.output_positions[:num_rows],
        )

    def token_ids(self, inputs: StepInputs) -> torch.Tensor:
        """int64 [T]: the ids to compute, with those that were sampled on the device and are not known here."""
        return self._feed.index_select(0, inputs.sources) if self._feeds else inputs.token_ids

    def keep(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Let ``token_ids`` (int64 [R]) be the last sampled ones of ``slots``, for the steps that follow."""
        self._last_sampled.index_copy_(0, slots, token_ids)

    def _sections(self, num_tokens: int, num_requests: int) -> StepSections:
        if num_tokens != num_requests:
            return StepSections(num_tokens, num_requests, self._max_blocks)
        sections = self._known.get(num_requests)
        if sections is None:
            sections = self._known[num_requests] = StepSections(num_tokens, num_requests, self._max_blocks)
        return sections

    def _claim(self, num_tokens: int, num_requests: int) -> HostSections:
        self._place = self._staging.claim()
        self._current = self._sections(num_tokens, num_requests)
        return self._current.on_host(self._staging.hosts, self._place)

    def _fill_sampling(self, host: HostSections, slots: Int64) -> None:
        count = len(slots)
        rows = self._sampling.rows[slots]
        host.sampling_slots[:count] = slots
        host.seeds[:count] = rows["seed"]
        host.output_positions[:count] = self._state.output_positions(slots)
        host.inverse_temperature[:count] = rows["inverse_temperature"]

    def _pad(self, host: HostSections, first: int, last: int) -> None:
        host.token_ids[first:last] = 0
        host.sources[first:last] = np.arange(first, last) + self._first_known
        host.positions[first:last] = 0
        host.query_start[first + 1 : last + 1] = np.arange(first + 1, last + 1)
        host.sequence_lengths[first:last] = 1
        for table, mapping in zip(host.block_tables, host.slot_mappings):
            table[first:last, 0] = PADDING_BLOCK
            mapping[first:last] = PADDING_SLOT
        host.sampling_slots[first:last] = self._num_fed - 1
        host.seeds[first:last] = 0
        host.output_positions[first:last] = 0
        host.inverse_temperature[first:last] = 0

    def _inputs(
        self,
        *,
        num_sampling: int,
        max_query_length: int,
        query_start: list[int],
        sequence_lengths: list[int],
    ) -> StepInputs:
        self.send()
        device = self._on_device()
        metadata = tuple(
            AttentionMetadata(
                query_start=device.query_start,
                sequence_lengths=device.sequence_lengths,
                block_table=table,
                slot_mapping=mapping,
                max_query_length=max_query_length,
                max_sequence_length=max(sequence_lengths),
                query_start_list=query_start,
                sequence_lengths_list=sequence_lengths,
            )
            for table, mapping in zip(device.block_tables, device.slot_mappings)
        )
        return StepInputs(
            token_ids=device.token_ids,
            sources=device.sources,
            positions=device.positions,
            metadata=metadata,
            sampling=self.sampling(num_sampling),
        )

    def _on_device(self) -> DeviceSections:
        return self._current.on_device(self._uploaded)
