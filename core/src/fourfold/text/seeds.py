"""Seeds of choices: from the request's own, or drawn. Knows no generator."""

from __future__ import annotations

import secrets

from fourfold.sampling_params import MAX_SEED

_WORD = 2**64 - 1


def random_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices; choice 0 draws with the request's own, as it would alone."""
    if choice == 0:
        return seed
    # One round of splitmix64: neighbouring (seed, choice) pairs end up far apart.
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return (mixed ^ (mixed >> 31)) & MAX_SEED
