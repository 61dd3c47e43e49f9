"""Log probabilities of the model's own distribution: before bias, penalties and temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.messages import TokenLogprobs
from fourfold.worker.request_state import Int64
from fourfold.worker.wide_rows import largest

if TYPE_CHECKING:
    from fourfold.contracts.operators import Operators


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Int64, *, operators: Operators
) -> list[TokenLogprobs]:
    """One a row of fp32 ``logits`` [R, V]: of ``token_ids`` (int64 [R]) and of the ``num_top[r]`` likeliest.

    The rank is 1 plus the number of likelier ids.
    """
    normalizer = operators.log_normalizer(logits)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    values = (chosen.squeeze(-1) - normalizer).tolist()
    widest = min(int(num_top.max()), logits.shape[-1])
    tops: list[list[tuple[int, float]]] = [[] for _ in values]
    if widest:
        found = largest(logits, widest)
        logprobs = (found.values - normalizer.unsqueeze(-1)).tolist()
        pairs = zip(found.indices.tolist(), logprobs, num_top.tolist())
        tops = [list(zip(ids[:count], row[:count])) for ids, row, count in pairs]
    return [
        TokenLogprobs(token_id=token_id, logprob=value, rank=rank, top=top)
        for token_id, value, rank, top in zip(token_ids.tolist(), values, ranks, tops)
    ]
