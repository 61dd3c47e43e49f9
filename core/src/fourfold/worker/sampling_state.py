"""How every request is sampled, one row a slot: numbers as columns, lists of ids as arrays.

Rows are filled when a request arrives and read by the sampler. Knows no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fourfold.messages import NewRequest
from fourfold.sampling_params import SamplingParams
from fourfold.worker.penalties import SeenTokens
from fourfold.worker.request_state import Int64, grown

Float32 = npt.NDArray[np.float32]
SamplingRows = npt.NDArray[Any]
"""A structured array with the fields of ROW."""

ROW: Final = np.dtype(
    [
        ("features", np.int64),
        ("inverse_temperature", np.float32),  # 0 is greedy
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("min_tokens", np.int64),
        ("num_logprobs", np.int64),
    ]
)


class Feature(IntFlag):
    """What a row needs beyond an argmax; the sampler skips what no row of a batch needs."""

    RANDOM = 1
    TRUNCATED = 2
    BIASED = 4
    PENALISED = 8
    HELD_OPEN = 16
    """A minimum of output tokens."""
    LOGPROBS = 32


CHANGES_LOGITS: Final = Feature.TRUNCATED | Feature.BIASED | Feature.PENALISED | Feature.HELD_OPEN


@dataclass(frozen=True, slots=True)
class Bias:
    """Distinct token ids and what is added to each one's logit."""

    token_ids: Int64
    values: Float32


class SamplingState:
    """Sampling of every slot."""

    def __init__(self, *, slots: int, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self.rows: SamplingRows = np.zeros(slots, ROW)
        self.biases: dict[int, Bias] = {}
        self.seen: dict[int, SeenTokens] = {}
        """Of requests with penalties."""
        self.stop_ids: dict[int, Int64] = {}
        """Ids that end a request, of requests with min_tokens."""
        self.prompt_logprobs: dict[int, int] = {}
        """slot -> how many likeliest ids, of requests that ask for log probabilities of their prompt."""

    def add(self, request: NewRequest) -> None:
        """Take a request into its slot.

        Raises RequestError for ids outside the vocabulary; the slot is greedy then.
        """
        slot, sampling = request.slot, request.sampling
        if slot >= len(self.rows):
            self.rows = grown(self.rows, max(slot + 1, 2 * len(self.rows)))
        self.remove(slot)
        sampling.check_vocabulary(self._vocabulary_size)
        features = _features(sampling)
        self.rows[slot] = (
            features,
            0.0 if sampling.greedy else 1.0 / sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed or 0,
            sampling.min_tokens,
            sampling.logprobs or 0,
        )
        if sampling.logit_bias:
            self.biases[slot] = Bias(
                np.array(list(sampling.logit_bias), np.int64), np.array(list(sampling.logit_bias.values()), np.float32)
            )
        if Feature.PENALISED in features:
            self.seen[slot] = SeenTokens(sampling, request.prompt_token_ids, request.output_token_ids)
        if sampling.min_tokens:
            eos = () if sampling.ignore_eos else request.eos_token_ids
            self.stop_ids[slot] = np.array(sorted({*sampling.stop_token_ids, *eos}), np.int64)
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = sampling.prompt_logprobs

    def remove(self, slot: int) -> None:
        """Forget the request in a slot; harmless when there is none."""
        if slot < len(self.rows):
            self.rows[slot] = np.zeros((), ROW)
        for table in (self.biases, self.seen, self.stop_ids, self.prompt_logprobs):
            table.pop(slot, None)


def _features(sampling: SamplingParams) -> Feature:
    features = Feature(0)
    if not sampling.greedy:
        features |= Feature.RANDOM
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            features |= Feature.TRUNCATED
    if sampling.logit_bias:
        features |= Feature.BIASED
    if SeenTokens.needed(sampling):
        features |= Feature.PENALISED
    if sampling.min_tokens:
        features |= Feature.HELD_OPEN
    if sampling.logprobs is not None:
        features |= Feature.LOGPROBS
    return features
