"""Cuts the tokens of a step in two, anywhere: the parts run through every layer in their order, so that the second one
finds what the first has written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from fourfold.contracts.attention_backend import AttentionMetadata

if TYPE_CHECKING:
    import torch


def cut_tokens(num_tokens: int) -> tuple[int, int]:
    """Tokens of the two parts, neither of which is empty from two tokens on."""
    return num_tokens - num_tokens // 2, num_tokens // 2


def cut_metadata(metadata: AttentionMetadata, at: int) -> tuple[AttentionMetadata, AttentionMetadata]:
    """What describes the tokens before ``at``, and the rest; a sequence may be in both."""
    starts, lengths = metadata.query_start_list, metadata.sequence_lengths_list
    sequence = bisect_right(starts, at) - 1
    inside = at > starts[sequence]
    last = sequence + inside
    before = [*starts[:last], at]
    before_lengths = list(lengths[:last])
    # Computed where the tensors are: the device may be steps behind, and its graphs read what they hold at each replay.
    query_start, device_lengths = metadata.query_start, metadata.sequence_lengths[:last]
    if inside:
        missing = starts[sequence + 1] - at
        before_lengths[-1] -= missing
        device_lengths = device_lengths.clone()
        device_lengths[-1:] -= missing
    after = [0, *(start - at for start in starts[sequence + 1 :])]
    return (
        _part(
            metadata,
            (before, query_start[: last + 1].clamp(max=at)),
            (before_lengths, device_lengths),
            slice(0, last),
            slice(0, at),
        ),
        _part(
            metadata,
            (after, (query_start[sequence:] - at).clamp(min=0)),
            (list(lengths[sequence:]), metadata.sequence_lengths[sequence:]),
            slice(sequence, None),
            slice(at, None),
        ),
    )


def _part(
    metadata: AttentionMetadata,
    query_start: tuple[Sequence[int], torch.Tensor],
    sequence_lengths: tuple[Sequence[int], torch.Tensor],
    sequences: slice,
    tokens: slice,
) -> AttentionMetadata:
    """The numbers on the host, and the same on the device."""
    starts, lengths = query_start[0], sequence_lengths[0]
    return replace(
        metadata,
        query_start=query_start[1],
        sequence_lengths=sequence_lengths[1],
        block_table=metadata.block_table[sequences],
        slot_mapping=metadata.slot_mapping[tokens],
        max_query_length=max(end - start for start, end in pairwise(starts)),
        max_sequence_length=max(lengths),
        query_start_list=list(starts),
        sequence_lengths_list=list(lengths),
    )
