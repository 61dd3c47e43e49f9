"""Samples one token for every row of a batch in one pass; a row's result never depends on the other rows.

Order: logit bias, penalties, the minimum of tokens, temperature, min-p, top-k, top-p, draw. Log probabilities are of
the model's own distribution, before all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fourfold.contracts.operators import CheckedDraws
from fourfold.worker.device import Device
from fourfold.worker.logprobs import LogprobRows, token_logprobs
from fourfold.worker.penalties import apply_penalties
from fourfold.worker.request_state import Int64
from fourfold.worker.sampling_state import CHANGES_LOGITS, Feature, SamplingRows, SamplingState
from fourfold.worker.wide_rows import truncate, truncate_sorted

if TYPE_CHECKING:
    from fourfold.contracts.operators import Operators
    from fourfold.worker.step_inputs import SamplingInputs


class Sampled(NamedTuple):
    """What one pass gave, on the device; R rows."""

    token_ids: torch.Tensor
    """int64 [R]"""
    codes: torch.Tensor
    """int64 [R]: the same, or -1 for a row whose logits were not finite: its id means nothing."""
    logprobs: LogprobRows | None
    wanted: Int64
    """The rows that ``logprobs`` are of."""


class Sampler:
    """Bound to one device, its operators, and the sampling state of its requests."""

    def __init__(self, state: SamplingState, *, operators: Operators, device: Device) -> None:
        self._state = state
        self._operators = operators
        self._device = device
        # On an asynchronous device the host must not look at values to decide how much there is to do.
        self._checked = operators if isinstance(operators, CheckedDraws) else None
        self._truncate = truncate_sorted if device.asynchronous else truncate

    def is_greedy(self, slots: Int64) -> bool:
        """Whether the largest logit is all that these requests need."""
        return not np.bitwise_or.reduce(self._state.rows["features"][slots])

    def is_plain(self, slots: Int64) -> bool:
        """Whether ``plain`` is all that these requests need."""
        return not int(np.bitwise_or.reduce(self._state.rows["features"][slots])) & ~Feature.RANDOM

    def looks_back(self, slots: Int64) -> bool:
        """Whether what these requests sampled before matters, as it does to penalties."""
        return bool(int(np.bitwise_or.reduce(self._state.rows["features"][slots])) & Feature.PENALISED)

    def plain(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        """``sample`` for rows that are greedy or drawn from the whole vocabulary; looks at no value."""
        if self._checked is not None:
            ids, codes = self._checked.draw(logits, inputs.inverse_temperature, inputs.seeds, inputs.positions)
            return Sampled(ids, codes, None, np.zeros(0, np.int64))
        token_ids = self._operators.gumbel_argmax(logits, inputs.inverse_temperature, inputs.seeds, inputs.positions)
        return _sampled(token_ids, self._device.broken_rows(logits), None, np.zeros(0, np.int64))

    def sample(self, logits: torch.Tensor, slots: Int64, positions: Int64, inputs: SamplingInputs) -> Sampled:
        """Sample fp32 ``logits`` [R, V], which may be overwritten.

        ``slots`` [R] are the rows' requests, ``positions`` [R] the index in its output that each one samples, and
        ``inputs`` what the device has of them.
        """
        rows = self._state.rows[slots]
        features = rows["features"]
        present = int(np.bitwise_or.reduce(features))
        broken = self._device.broken_rows(logits)
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
        token_ids = self._draw(logits, rows, inputs) if present & Feature.RANDOM else self._operators.argmax(logits)
        logprobs = self._logprobs(original, token_ids, rows, wanted) if len(wanted) else None
        return _sampled(token_ids, broken, logprobs, wanted)

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
        # A number in place of a tensor would be copied to the device, and waited for.
        logits[row, self._device.upload(np.concatenate(stops))] = logits.new_full((), -torch.inf)

    def _draw(self, logits: torch.Tensor, rows: SamplingRows, inputs: SamplingInputs) -> torch.Tensor:
        upload = self._device.upload
        truncated = _having(rows["features"], Feature.TRUNCATED)
        if len(truncated):
            at = upload(truncated)
            some = rows[truncated]
            logits[at] = self._truncate(
                logits[at],
                inputs.inverse_temperature[at],
                top_k=upload(some["top_k"]),
                top_p=upload(some["top_p"]),
                min_p=upload(some["min_p"]),
            )
        return self._operators.gumbel_argmax(logits, inputs.inverse_temperature, inputs.seeds, inputs.positions)

    def _logprobs(
        self, original: torch.Tensor, token_ids: torch.Tensor, rows: SamplingRows, wanted: Int64
    ) -> LogprobRows:
        if len(wanted) != len(rows):
            token_ids = token_ids[self._device.upload(wanted)]
        return token_logprobs(original, token_ids, rows["num_logprobs"][wanted], operators=self._operators)


def _sampled(token_ids: torch.Tensor, broken: torch.Tensor, logprobs: LogprobRows | None, wanted: Int64) -> Sampled:
    return Sampled(token_ids, token_ids.masked_fill(broken, -1), logprobs, wanted)


def _having(features: npt.NDArray[np.int64], feature: Feature) -> Int64:
    """Rows that have a feature, ascending."""
    return np.flatnonzero(features & feature)
