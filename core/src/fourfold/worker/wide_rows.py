"""Reductions over vocabulary-wide rows: the k largest entries, and the cut of top-k, top-p and min-p.

Every result is a function of its own row alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_FEW = 1024
"""Rows that keep up to so many by top-k are cut among these alone."""


_SORTED_ROWS = 32
"""Rows that are sorted whole at a time; bounds the memory to some hundred megabytes."""
_SORTED_FIRST = (256, 4096)
"""Entries of a row that are sorted for top-p before all of them are."""


class Largest(NamedTuple):
    """The k largest entries of each row, largest first."""

    values: torch.Tensor
    """[R, k]"""
    indices: torch.Tensor
    """int64 [R, k]"""


def largest(rows: torch.Tensor, k: int) -> Largest:
    """The ``k`` largest entries of each row of [R, V].

    A row is dealt out to groups like cards, and the k groups of the largest maxima hold the k largest entries, so only
    those are searched: on a CPU that takes a fifth of the time of torch's own top-k.
    """
    size = math.isqrt(rows.shape[-1] // k)  # as many entries to search among as groups to choose from
    if size < 2:
        return Largest(*torch.topk(rows, k, dim=-1))
    num_groups = rows.shape[-1] // size
    whole = size * num_groups
    groups = rows[:, :whole].reshape(len(rows), size, num_groups)
    chosen = torch.topk(groups.amax(1), k, dim=-1).indices.unsqueeze(1)
    candidates = groups.gather(2, chosen.expand(-1, size, -1)).flatten(1)
    places = (chosen + torch.arange(0, whole, num_groups, device=rows.device).unsqueeze(-1)).flatten(1)
    if whole < rows.shape[-1]:
        rest = torch.arange(whole, rows.shape[-1], device=rows.device).expand(len(rows), -1)
        candidates, places = torch.cat([candidates, rows[:, whole:]], -1), torch.cat([places, rest], -1)
    values, order = torch.topk(candidates, k, dim=-1)
    return Largest(values, places.gather(1, order))


def truncate(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """fp32 [R, V] with the dropped entries at -inf; other arguments [R].

    On the scaled distribution, in this order: ``min_p`` drops entries less likely than that share of the likeliest
    (0: none); ``top_k`` (int64) keeps the k likeliest (0: all); ``top_p`` (fp64) keeps the smallest set of what is left
    whose share reaches it (1: all). Entries equal to the last one kept are kept too.
    """
    scaled = logits * inverse_temperature.unsqueeze(-1)
    top = scaled.amax(-1)
    threshold = top + torch.log(min_p)
    few = (top_k > 0) & (top_k <= _FEW)
    at = torch.nonzero(few).squeeze(-1)
    if len(at):
        threshold[at] = _cut_of_few(scaled[at], top[at], threshold[at], top_k[at], top_p[at])
    at = torch.nonzero(~few & (top_k > 0) & (top_k < scaled.shape[-1])).squeeze(-1)
    if len(at):
        kth = largest(scaled[at], int(top_k[at].max())).values.gather(-1, (top_k[at] - 1).unsqueeze(-1)).squeeze(-1)
        threshold[at] = torch.maximum(threshold[at], kth)
    at = torch.nonzero(~few & (top_p < 1)).squeeze(-1)
    if len(at):
        threshold[at] = _cut_of_many(scaled[at], top[at], threshold[at], top_p[at])
    return logits.masked_fill(scaled < threshold.unsqueeze(-1), -torch.inf)


def truncate_sorted(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """``truncate`` for devices where looking at a value makes the host wait: sorts whole rows, and decides nothing."""
    parts = zip(*(torch.split(tensor, _SORTED_ROWS) for tensor in (logits, inverse_temperature, top_k, top_p, min_p)))
    return torch.cat([_truncated(*part) for part in parts])


def _truncated(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    scaled = logits * inverse_temperature.unsqueeze(-1)
    values = torch.sort(scaled, dim=-1, descending=True).values
    top = values[:, 0]
    places = torch.arange(values.shape[-1], device=values.device)
    kept = (places < torch.where(top_k > 0, top_k, values.shape[-1]).unsqueeze(-1)) & (
        values >= (top + torch.log(min_p)).unsqueeze(-1)
    )
    weights = _weights(values, kept, top)
    cut = _last_kept(values, kept, weights, top_p, weights.sum(-1))
    return logits.masked_fill(scaled < cut.unsqueeze(-1), -torch.inf)


def _cut_of_few(
    scaled: torch.Tensor, top: torch.Tensor, threshold: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The smallest entry that is kept of the k largest of each row that are at least ``threshold``."""
    values = largest(scaled, min(int(top_k.max()), scaled.shape[-1])).values
    places = torch.arange(values.shape[-1], device=values.device)
    kept = (places < top_k.unsqueeze(-1)) & (values >= threshold.unsqueeze(-1))
    weights = _weights(values, kept, top)
    return _last_kept(values, kept, weights, top_p, weights.sum(-1))


def _cut_of_many(scaled: torch.Tensor, top: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest entry that is kept of those of each row that are at least ``threshold``.

    Sorts as much of a row as its share needs: a few hundred entries as a rule, the whole row at worst.
    """
    width = scaled.shape[-1]
    weights = torch.exp(scaled - top.unsqueeze(-1)).masked_fill_(scaled < threshold.unsqueeze(-1), 0.0)
    total = weights.sum(-1, dtype=torch.float64)
    cut = torch.empty_like(threshold)
    left = torch.arange(len(scaled), device=scaled.device)
    for size in (*(size for size in _SORTED_FIRST if size < width), width):
        values = largest(scaled[left], size).values
        kept = values >= threshold[left].unsqueeze(-1)
        found = _weights(values, kept, top[left])
        cut[left] = _last_kept(values, kept, found, top_p[left], total[left])
        short = found.sum(-1) < top_p[left] * total[left]
        left = left[short & kept[:, -1]]
        if not len(left):
            break
    return cut


def _weights(values: torch.Tensor, kept: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """fp64 shares of ``values`` [R, C] up to a factor a row; summed in fp64, the batch moves no cut."""
    return torch.where(kept, torch.exp(values - top.unsqueeze(-1)).double(), 0.0)


def _last_kept(
    values: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Of ``values`` [R, C], largest first, the one that brings the sum to ``top_p * total``, or the last ``kept``."""
    reached = torch.cumsum(weights, -1) >= (top_p * total).unsqueeze(-1)
    last = torch.where(reached.any(-1) & (top_p < 1), reached.to(torch.int8).argmax(-1), kept.sum(-1) - 1)
    # A row of NaN keeps nothing; it is the caller's to see, and must not fail the others.
    return values.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1)
