"""Where in one buffer the inputs of a step of T tokens and S requests lie, as arrays and as tensors.

A step is one copy to the device, so its inputs lie together, whatever their types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT: Final = 64
"""Bytes: kernels are compiled for aligned addresses, and a row of cache lines is not shared."""
_TORCH_DTYPES: Final = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSections:
    """Arrays in one host buffer; T tokens, S requests, one block table and mapping a KV-cache group."""

    token_ids: Int64
    sources: Int64
    positions: Int64
    slot_mappings: tuple[Int64, ...]
    sampling_slots: Int64
    """[S], as are the three that follow: the first rows are of those requests that sample."""
    seeds: Int64
    output_positions: Int64
    inverse_temperature: npt.NDArray[np.float32]
    query_start: Int32
    """[S + 1]"""
    sequence_lengths: Int32
    block_tables: tuple[Int32, ...]
    """[S, blocks of the longest request]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSections:
    """The same as tensors in the device's buffer."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    slot_mappings: tuple[torch.Tensor, ...]
    sampling_slots: torch.Tensor
    seeds: torch.Tensor
    output_positions: torch.Tensor
    inverse_temperature: torch.Tensor
    query_start: torch.Tensor
    sequence_lengths: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]


class StepSections:
    """The places for one T and S, and the views that were made of them."""

    def __init__(self, num_tokens: int, num_requests: int, max_blocks: Sequence[int]) -> None:
        """``max_blocks`` are the columns of each KV-cache group's block table."""
        tokens, requests = (num_tokens,), (num_requests,)
        self._num_groups = len(max_blocks)
        self._places: list[tuple[int, type[Any], tuple[int, ...]]] = []
        self.nbytes = 0
        """From the start of the buffer to the end of the last section."""
        # The ids that the host knows come first: they lie right after those that the device keeps.
        for kind, shape in (
            *((np.int64, tokens) for _ in range(3 + len(max_blocks))),
            *((np.int64, requests) for _ in range(3)),
            (np.float32, requests),
            (np.int32, (num_requests + 1,)),
            (np.int32, requests),
            *((np.int32, (num_requests, columns)) for columns in max_blocks),
        ):
            self._places.append((self.nbytes, kind, shape))
            self.nbytes = self.aligned(self.nbytes + math.prod(shape) * np.dtype(kind).itemsize)
        self._hosts: dict[int, HostSections] = {}
        self._device: DeviceSections | None = None

    @staticmethod
    def aligned(nbytes: int) -> int:
        """``nbytes``, or the next number at which a section may begin."""
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def on_host(self, buffers: Sequence[npt.NDArray[np.uint8]], place: int) -> HostSections:
        """The arrays in ``buffers[place]``, which must be the same buffers in every call."""
        sections = self._hosts.get(place)
        if sections is None:
            buffer = buffers[place]
            views = [
                buffer[first : first + math.prod(shape) * np.dtype(kind).itemsize].view(kind).reshape(shape)
                for first, kind, shape in self._places
            ]
            sections = self._hosts[place] = HostSections(**self._named(views))
        return sections

    def on_device(self, buffer: torch.Tensor) -> DeviceSections:
        """The tensors in uint8 ``buffer``, which must be the same buffer in every call."""
        if self._device is None:
            views = [
                buffer[first : first + math.prod(shape) * np.dtype(kind).itemsize].view(_TORCH_DTYPES[kind]).view(shape)
                for first, kind, shape in self._places
            ]
            self._device = DeviceSections(**self._named(views))
        return self._device

    def _named(self, views: Sequence[Any]) -> dict[str, Any]:
        groups = self._num_groups
        token_ids, sources, positions = views[:3]
        slots, seeds, output_positions, inverse_temperature, starts, lengths = views[3 + groups : 9 + groups]
        return {
            "token_ids": token_ids,
            "sources": sources,
            "positions": positions,
            "slot_mappings": tuple(views[3 : 3 + groups]),
            "sampling_slots": slots,
            "seeds": seeds,
            "output_positions": output_positions,
            "inverse_temperature": inverse_temperature,
            "query_start": starts,
            "sequence_lengths": lengths,
            "block_tables": tuple(views[9 + groups :]),
        }
