"""Philox4x32-10, the counter-based generator behind every draw, on any torch device.

A draw is a pure function of seed, position and vocabulary id; nothing here has state. Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011; constants as in Random123.
"""

from __future__ import annotations

import torch

ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds. All tensors are int64 holding 32-bit words, of shapes that broadcast; returns four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product of two 32-bit words may wrap into the sign; masking makes both halves right all the same.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = product_1 & _MASK
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """32-bit words (int64) -> standard Gumbel noise fp32, computed in fp64: u = (word + 0.5) / 2**32."""
    uniform = (words.to(torch.float64) + 0.5) / 2.0**32
    return (-torch.log(-torch.log(uniform))).to(torch.float32)


def gumbel_rows(seeds: torch.Tensor, positions: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """The noise of whole rows: int64 [R], int64 [R] -> fp32 [R, V]."""
    groups = torch.arange((vocabulary_size + 3) // 4, device=seeds.device).unsqueeze(0)
    words = _words(groups, seeds.unsqueeze(1), positions.unsqueeze(1))
    return gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocabulary_size])


def gumbel_entries(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise of single entries: int64 [N] seeds, positions and vocabulary ids -> fp32 [N]."""
    words = torch.stack(_words(token_ids >> 2, seeds, positions), dim=-1)
    return gumbel(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def _words(groups: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> Words:
    zero = torch.zeros_like(groups)
    return philox4x32((groups, positions, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
