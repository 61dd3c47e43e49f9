from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.models.microbatches import cut_metadata, cut_tokens


def metadata(counts: list[int], lengths: list[int]) -> AttentionMetadata:
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(len(counts), dtype=torch.int32)[:, None],
        slot_mapping=torch.arange(starts[-1]),
        max_query_length=max(counts),
        max_sequence_length=max(lengths),
        query_start_list=starts,
        sequence_lengths_list=lengths,
    )


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_no_part_is_empty(count: int) -> None:
    first, second = cut_tokens(count)
    assert first + second == count
    assert 1 <= second <= first <= second + 1


def test_a_sequence_may_be_in_both_parts() -> None:
    first, second = cut_metadata(metadata([2, 5, 1], [10, 25, 30]), 4)
    assert (first.query_start_list, first.sequence_lengths_list) == ([0, 2, 4], [10, 22])
    assert (second.query_start_list, second.sequence_lengths_list) == ([0, 3, 4], [25, 30])
    assert first.block_table.tolist() == [[0], [1]]
    assert second.block_table.tolist() == [[1], [2]]
    assert (first.slot_mapping.tolist(), second.slot_mapping.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (first.max_query_length, first.max_sequence_length) == (2, 22)
    assert (second.max_query_length, second.max_sequence_length) == (3, 30)
    for part in (first, second):
        assert part.query_start.tolist() == part.query_start_list
        assert part.sequence_lengths.tolist() == part.sequence_lengths_list


def test_a_cut_between_sequences_leaves_them_whole() -> None:
    first, second = cut_metadata(metadata([2, 5, 1], [10, 25, 30]), 7)
    assert (first.query_start_list, first.sequence_lengths_list) == ([0, 2, 7], [10, 25])
    assert (second.query_start_list, second.sequence_lengths_list) == ([0, 1], [30])


class InTurns:
    """A step part that cuts every step, and runs the parts one after the other in each layer's absence."""

    def __init__(self) -> None:
        self.cuts = 0

    def take_turns(self, num_tokens: int) -> object:
        if num_tokens < 2:
            return None
        self.cuts += 1
        return lambda bodies: [body() for body in bodies]


def test_a_decoder_says_the_same_in_parts(
    save_random: Callable[..., Any], load_decoder: Callable[..., Any], paged: Callable[..., Any]
) -> None:
    folder, _ = save_random(
        "Llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=128,
    )
    plain, cut = (paged(load_decoder(folder), num_sequences=2) for _ in range(2))
    part = InTurns()
    cut.decoder.step_parts = (part,)
    steps = [{0: [5, 6, 7, 8, 9], 1: [1, 2]}, {0: [3], 1: [4]}, {1: [5, 6, 7]}, {0: [8]}]
    for tokens in steps:
        torch.testing.assert_close(cut.step(tokens), plain.step(tokens))
    assert part.cuts == 3
