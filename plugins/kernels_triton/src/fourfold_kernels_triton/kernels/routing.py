"""The kernel that chooses the experts of a row. Ties go to the lower number; fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl

from fourfold_kernels_triton.kernels.ordering import wait_for_predecessor

_NONE = tl.constexpr(1 << 30)
"""Above any number of an expert or of a group."""


@triton.jit
def choose_rows(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    row_stride,
    scale,
    least_sum,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZES: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Ids and weights [rows, TOP_K] of rows of logits; grid: rows. Lanes are [GROUPS, SIZES], padded groups of experts.

    PLACES is a power of two, TOP_K at least.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    members = tl.arange(0, SIZES)
    real = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    numbers = groups[:, None] * GROUP_SIZE + members[None, :]
    if BIASED:
        bias = tl.load(bias_ptr + numbers, mask=real, other=0.0)
    wait_for_predecessor(EARLY)
    logits = tl.load(logits_ptr + row * row_stride + numbers, mask=real, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        raised = tl.exp(logits - tl.max(logits))
        scores = raised / tl.sum(raised)
    choice = scores + bias if BIASED else scores
    eligible = real
    if TOP_GROUPS < NUM_GROUPS:
        held = tl.where(real, choice, float("-inf"))
        best_groups = _in_best_groups(held, groups, members, NUM_GROUPS, TOP_GROUPS, BEST_TWO)
        eligible = eligible & best_groups[:, None]
    places = tl.arange(0, PLACES)
    ids = tl.zeros((PLACES,), tl.int32)
    weights = tl.zeros((PLACES,), tl.float32)
    for place in tl.static_range(TOP_K):
        # Whatever is not a number comes last, and still only once.
        left = tl.where(eligible & (choice >= float("-inf")), choice, float("-inf"))
        best = tl.max(left)
        number = tl.min(tl.where(eligible & (left == best), numbers, _NONE))
        chosen = numbers == number
        ids = tl.where(places == place, number, ids)
        weights = tl.where(places == place, tl.sum(tl.where(chosen & real, scores, 0.0)), weights)
        eligible = eligible & ~chosen
    if NORMALIZE:
        weights = weights / (tl.sum(weights) + least_sum)
    at = row * TOP_K + places
    tl.store(ids_ptr + at, ids, mask=places < TOP_K)
    tl.store(weights_ptr + at, weights * scale, mask=places < TOP_K)


@triton.jit
def _in_best_groups(
    choice, groups, members, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr
):
    """Whether each of the groups of ``choice`` is one of the best, by its best member or by its best two."""
    best = tl.max(choice, axis=1)
    scores = best
    if BEST_TWO:
        first = tl.min(tl.where(choice == best[:, None], members[None, :], _NONE), axis=1)
        scores += tl.max(tl.where(members[None, :] == first[:, None], float("-inf"), choice), axis=1)
    left = groups < NUM_GROUPS
    taken = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(tl.where(left, scores, float("-inf")))
        candidates = left & ((scores == top) | ~(scores >= float("-inf")))
        number = tl.min(tl.where(candidates, groups, _NONE))
        taken = taken | (groups == number)
        left = left & (groups != number)
    return taken
