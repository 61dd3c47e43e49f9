"""Cuts the tokens of a step in two, anywhere: the parts run through every layer in their order, so that the second one
finds what the first has written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from fourfold.contracts.attention_backend import AttentionMetadata


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
    if inside:
        before_lengths[-1] -= starts[sequence + 1] - at
    after = [0, *(start - at for start in starts[sequence + 1 :])]
    return (
        _part(metadata, before, before_lengths, slice(0, last), slice(0, at)),
        _part(metadata, after, list(lengths[sequence:]), slice(sequence, None), slice(at, None)),
    )


def _part(
    metadata: AttentionMetadata, starts: Sequence[int], lengths: Sequence[int], sequences: slice, tokens: slice
) -> AttentionMetadata:
    device = metadata.query_start.device
    return replace(
        metadata,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=metadata.block_table[sequences],
        slot_mapping=metadata.slot_mapping[tokens],
        max_query_length=max(end - start for start, end in pairwise(starts)),
        max_sequence_length=max(lengths),
        query_start_list=list(starts),
        sequence_lengths_list=list(lengths),
    )
