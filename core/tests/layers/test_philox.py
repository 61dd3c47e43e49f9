from __future__ import annotations

import math

import pytest
import torch

from fourfold.layers.philox import gumbel, gumbel_entries, gumbel_rows, philox4x32

# Random123's own known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _tensors(words: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([word]) for word in words)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(_tensors(counter), _tensors(key))
    assert tuple(int(word) for word in words) == expected


def test_gumbel_is_minus_log_of_minus_log_in_fp64() -> None:
    words = torch.tensor([0, 1, 1 << 31, (1 << 32) - 1])
    expected = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words.tolist()]
    assert gumbel(words).dtype == torch.float32
    assert torch.equal(gumbel(words), torch.tensor(expected, dtype=torch.float64).float())


def test_rows_follow_the_counter_layout() -> None:
    seed, position = (7 << 32) | 9, 5
    row = gumbel_rows(torch.tensor([seed]), torch.tensor([position]), 10)
    assert row.shape == (1, 10)
    for token_id in range(10):
        words = philox4x32(_tensors((token_id // 4, position, 0, 0)), _tensors((9, 7)))
        assert row[0, token_id] == gumbel(words[token_id % 4])[0]


def test_entries_equal_rows() -> None:
    seeds, positions = torch.tensor([3, 2**62 + 11]), torch.tensor([0, 1000])
    rows = gumbel_rows(seeds, positions, 101)
    token_ids = torch.tensor([0, 1, 50, 99, 100])
    for row in range(2):
        entries = gumbel_entries(seeds[row].expand(5), positions[row].expand(5), token_ids)
        assert torch.equal(entries, rows[row, token_ids])


def test_noise_depends_on_seed_position_and_id() -> None:
    base = gumbel_rows(torch.tensor([1]), torch.tensor([1]), 8)
    assert not torch.equal(base, gumbel_rows(torch.tensor([2]), torch.tensor([1]), 8))
    assert not torch.equal(base, gumbel_rows(torch.tensor([1 + (1 << 32)]), torch.tensor([1]), 8))
    assert not torch.equal(base, gumbel_rows(torch.tensor([1]), torch.tensor([2]), 8))
    assert len(set(base[0].tolist())) == 8


def test_noise_has_the_mean_and_variance_of_a_gumbel() -> None:
    noise = gumbel_rows(torch.arange(8), torch.arange(8), 20000).double()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
