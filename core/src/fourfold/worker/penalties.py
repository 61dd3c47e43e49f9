"""Repetition, presence and frequency penalties, as pure functions of a request's prompt and output ids.

Counts are kept as the output grows, and only for requests that ask for a penalty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fourfold.sampling_params import SamplingParams
from fourfold.worker.device import Device
from fourfold.worker.request_state import Int64, grown


class SeenTokens:
    """The distinct ids of one request and how often each is in the output."""

    def __init__(self, sampling: SamplingParams, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        # Presence and frequency look at the output alone, so the prompt matters to the repetition penalty only.
        distinct = sorted(set(prompt)) if self.repetition != 1.0 else []
        self._index = {token_id: index for index, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, np.int64)
        self._counts = np.zeros(len(distinct), np.int64)
        for token_id in output:
            self.add(token_id)

    @staticmethod
    def needed(sampling: SamplingParams) -> bool:
        """Whether any penalty does anything."""
        return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def ids(self) -> Int64:
        """[N], distinct."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Int64:
        """[N]: how often each of ``ids`` is in the output."""
        return self._counts[: len(self._index)]

    def add(self, token_id: int) -> None:
        """Count one more output id."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = grown(self._ids, 2 * index + 16)
            self._counts = grown(self._counts, 2 * index + 16)
        self._ids[index] = token_id
        self._counts[index] += 1


def apply_penalties(logits: torch.Tensor, rows: Int64, seen: Sequence[SeenTokens], device: Device) -> None:
    """Penalise ``rows`` of fp32 ``logits`` [R, V] in place; ``seen`` has one entry a row.

    Positive logits of ids in prompt or output are divided by the repetition penalty and others multiplied by it;
    then presence is subtracted once and frequency times the count for ids in the output.
    """
    sizes = [len(tokens.ids) for tokens in seen]
    row = device.upload(np.repeat(rows, sizes))
    token_ids = device.upload(np.concatenate([tokens.ids for tokens in seen]))
    counts = device.upload(np.concatenate([tokens.counts for tokens in seen])).to(torch.float32)
    settings = np.array([(t.repetition, t.presence, t.frequency) for t in seen], np.float32)
    repetition, presence, frequency = device.upload(np.repeat(settings, sizes, axis=0)).unbind(-1)
    values = logits[row, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    logits[row, token_ids] = values
