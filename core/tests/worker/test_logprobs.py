from __future__ import annotations

import numpy as np
import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ComputeContext
from fourfold.layers.torch_operators import TorchOperators
from fourfold.worker.logprobs import token_logprobs

OPERATORS = TorchOperators(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))


def _logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]):
    rows = token_logprobs(logits, torch.tensor(token_ids), np.array(num_top), operators=OPERATORS)
    return rows.read([tensor.numpy() for tensor in rows.tensors])


def test_values_ranks_and_tops() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05]])
    first, second = _logprobs(probabilities.log() + 5, [1, 0], [2, 3])
    assert (first.token_id, first.rank, first.logprob) == (1, 3, pytest.approx(np.log(0.2), abs=1e-5))
    assert [token_id for token_id, _ in first.top] == [3, 2]
    assert [value for _, value in first.top] == pytest.approx(np.log([0.4, 0.3]).tolist(), abs=1e-5)
    assert (second.rank, [token_id for token_id, _ in second.top]) == (1, [0, 2, 1])


def test_no_tops_and_more_tops_than_ids() -> None:
    none, all_of_them = _logprobs(torch.zeros(2, 3), [0, 1], [0, 20])
    assert none.top == []
    assert sorted(all_of_them.top) == [(token_id, pytest.approx(-np.log(3))) for token_id in range(3)]
    assert (none.rank, all_of_them.rank) == (1, 1)
