"""Log probabilities of the model's own distribution: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from fourfold.messages import TokenLogprobs
from fourfold.worker.request_state import Int64
from fourfold.worker.wide_rows import largest

if TYPE_CHECKING:
    from fourfold.contracts.operators import Operators


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of R rows, on the device."""

    tensors: tuple[torch.Tensor, ...]
    """Ids, log probabilities and ranks [R], and the ids and log probabilities of the likeliest [R, widest]."""
    num_top: Int64
    """[R]: how many likeliest ones are asked for."""

    def read(self, arrays: Sequence[npt.NDArray[Any]]) -> list[TokenLogprobs]:
        """One a row; ``arrays`` are what ``tensors`` hold."""
        token_ids, values, ranks, top_ids, tops = (array.tolist() for array in arrays)
        return [
            TokenLogprobs(token_id=token_id, logprob=value, rank=rank, top=list(zip(ids[:count], top[:count])))
            for token_id, value, rank, ids, top, count in zip(
                token_ids, values, ranks, top_ids, tops, self.num_top.tolist()
            )
        ]


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Int64, *, operators: Operators
) -> LogprobRows:
    """Of ``token_ids`` (int64 [R]) in rows of fp32 ``logits`` [R, V], and of the ``num_top[r]`` likeliest of each row.

    The rank is 1 plus the number of likelier ids.
    """
    normalizer = operators.log_normalizer(logits).unsqueeze(-1)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    ranks = (logits > chosen).sum(-1) + 1
    found = largest(logits, max(1, min(int(num_top.max()), logits.shape[-1])))
    values = (chosen - normalizer).squeeze(-1)
    return LogprobRows((token_ids, values, ranks, found.indices, found.values - normalizer), num_top)
