from __future__ import annotations

from fourfold.sampling_params import MAX_SEED
from fourfold.text.seeds import choice_seed, random_seed


def test_choice_0_draws_with_the_requests_own_seed() -> None:
    assert choice_seed(42, 0) == 42
    assert choice_seed(MAX_SEED, 0) == MAX_SEED


def test_choices_of_neighbouring_seeds_all_differ() -> None:
    seeds = {choice_seed(seed, choice) for seed in range(100) for choice in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_drawn_seeds_are_valid_and_differ() -> None:
    drawn = {random_seed() for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 <= seed <= MAX_SEED for seed in drawn)
