"""Samples one token for every row of a batch in one pass; a row's result never depends on the other rows.

Order: logit bias, penalties, the minimum of tokens, temperature, min-p, top-k, top-p, draw. Log probabilities are of
the model's own distribution, before all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fourfold.worker.device import Device
from fourfold.worker.logprobs import token_logprobs
from fourfold.worker.penalties import apply_penalties
from fourfold.worker.request_state import Int64
from fourfold.worker.sampling_state import CHANGES_LOGITS, Feature, SamplingRows, SamplingState
from fourfold.worker.wide_rows import truncate

if TYPE_CHECKING:
    from fourfold.contracts.operators import Operators
    from fourfold.messages import TokenLogprobs


class Sampled(NamedTuple):
    """What one pass gave, one entry a row."""

    token_ids: Int64
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asks."""
    broken: Int64
    """Rows whose logits were not finite; their ids mean nothing."""


class Sampler:
    """Bound to one device, its operators, and the sampling state of its requests."""

    def __init__(self, state: SamplingState, *, operators: Operators, device: Device) -> None:
        self._state = state
        self._operators = operators
        self._device = device

    def sample(self, logits: torch.Tensor, slots: Int64, positions: Int64) -> Sampled:
        """Sample fp32 ``logits`` [R, V], which may be overwritten.

        ``slots`` [R] are the rows' requests and ``positions`` [R] the index in its output that each one samples.
        """
        rows = self._state.rows[slots]
        features = rows["features"]
        present = int(np.bitwise_or.reduce(features))
        broken = np.flatnonzero(~self._device.finite_rows(logits))
        if len(broken):
            logits[self._device.upload(broken)] = 0.0
        wanted = _having(features, Feature.LOGPROBS)
        original = self._original(logits, wanted, changes=bool(present & CHANGES_LOGITS))
        if present & Feature.BIASED:
            self._add_biases(logits, slots, _having(features, Feature.BIASED))
        if present & Feature.PENALISED:
            penalised = _having(features, Feature.PENALISED)
            seen = [self._state.seen[slot] for slot in slots[penalised].tolist()]
            apply_penalties(logits, penalised, seen, self._device)
        if present & Feature.HELD_OPEN:
            self._hold_open(logits, slots, np.flatnonzero(positions < rows["min_tokens"]))
        token_ids = self._draw(logits, rows, positions) if present & Feature.RANDOM else self._operators.argmax(logits)
        logprobs = self._logprobs(original, token_ids, rows, wanted)
        return Sampled(token_ids.cpu().numpy(), logprobs, broken)

    def _original(self, logits: torch.Tensor, wanted: Int64, *, changes: bool) -> torch.Tensor:
        if not len(wanted) or (len(wanted) == len(logits) and not changes):
            return logits
        return logits[self._device.upload(wanted)]

    def _add_biases(self, logits: torch.Tensor, slots: Int64, biased: Int64) -> None:
        biases = [self._state.biases[slot] for slot in slots[biased].tolist()]
        row = self._device.upload(np.repeat(biased, [len(bias.token_ids) for bias in biases]))
        token_ids = self._device.upload(np.concatenate([bias.token_ids for bias in biases]))
        logits[row, token_ids] += self._device.upload(np.concatenate([bias.values for bias in biases]))

    def _hold_open(self, logits: torch.Tensor, slots: Int64, held: Int64) -> None:
        if not len(held):
            return
        stops = [self._state.stop_ids[slot] for slot in slots[held].tolist()]
        row = self._device.upload(np.repeat(held, [len(ids) for ids in stops]))
        logits[row, self._device.upload(np.concatenate(stops))] = -torch.inf

    def _draw(self, logits: torch.Tensor, rows: SamplingRows, positions: Int64) -> torch.Tensor:
        upload = self._device.upload
        inverse_temperature = upload(rows["inverse_temperature"])
        truncated = _having(rows["features"], Feature.TRUNCATED)
        if len(truncated):
            at = upload(truncated)
            some = rows[truncated]
            logits[at] = truncate(
                logits[at],
                inverse_temperature[at],
                top_k=upload(some["top_k"]),
                top_p=upload(some["top_p"]),
                min_p=upload(some["min_p"]),
            )
        return self._operators.gumbel_argmax(logits, inverse_temperature, upload(rows["seed"]), upload(positions))

    def _logprobs(
        self, original: torch.Tensor, token_ids: torch.Tensor, rows: SamplingRows, wanted: Int64
    ) -> list[TokenLogprobs | None]:
        if not len(wanted):
            return []
        found = token_logprobs(
            original,
            token_ids[self._device.upload(wanted)],
            rows["num_logprobs"][wanted],
            operators=self._operators,
        )
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for row, entry in zip(wanted.tolist(), found):
            logprobs[row] = entry
        return logprobs


def _having(features: npt.NDArray[np.int64], feature: Feature) -> Int64:
    """Rows that have a feature, ascending."""
    return np.flatnonzero(features & feature)
