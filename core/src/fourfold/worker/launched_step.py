"""A step that was started: what it brings stays on the device until it is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt

from fourfold.messages import StepOutput, TokenLogprobs
from fourfold.worker.request_state import Int64

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from fourfold.contracts.step_part import StepVote
    from fourfold.worker.device import Device, Fetch
    from fourfold.worker.logprobs import LogprobRows
    from fourfold.worker.sampler import Sampled

NOT_FINITE: Final = "the model gave logits that are not finite; this request cannot go on"


class LaunchedStep:
    """The reply of one step. ``result`` and ``codes`` wait for it, from any thread."""

    def __init__(
        self,
        step: int,
        *,
        device: Device,
        errors: Mapping[int, str],
        slots: Int64 | None = None,
        sampled: Sampled | None = None,
        prompts: Mapping[int, Sequence[LogprobRows]] | None = None,
        started: float | None = None,
        vote: StepVote | None = None,
    ) -> None:
        """Begin to bring what it computes to the host.

        ``errors`` are known already. ``sampled`` are ids of ``slots``, None in a step without any; ``prompts`` are log
        probabilities of prompts, by slot and in order. ``started`` is the ``time.perf_counter`` from which the step
        counts as in the model. ``vote`` is what those of all engines came to, for steps that they make together.
        """
        prompts = prompts or {}
        self._step = step
        self._errors = errors
        self._vote = vote
        self._slots = slots
        self._started = time.perf_counter() if started is None else started
        self._wanted = [] if sampled is None or sampled.logprobs is None else sampled.wanted.tolist()
        self._logprobs = None if sampled is None else sampled.logprobs
        self._prompts = prompts
        self._has_codes = sampled is not None
        tensors: list[torch.Tensor] = [] if sampled is None else [sampled.codes]
        if self._logprobs is not None:
            tensors += self._logprobs.tensors
        tensors += [tensor for parts in prompts.values() for part in parts for tensor in part.tensors]
        self._fetch: Fetch = device.fetch(tensors)

    def codes(self) -> npt.NDArray[Any]:
        """int64 [R]: the sampled id of each row, -1 for one that failed."""
        return self._fetch.wait()[0]

    def result(self) -> StepOutput:
        """What the engine is told."""
        arrays = list(self._fetch.wait())
        seconds = time.perf_counter() - self._started
        errors = dict(self._errors)
        token_ids: list[int] = []
        if self._has_codes:
            token_ids = arrays.pop(0).tolist()
            for row, token_id in enumerate(token_ids):
                if token_id < 0 and self._slots is not None:
                    errors.setdefault(int(self._slots[row]), NOT_FINITE)
        logprobs: list[TokenLogprobs | None] = []
        if self._logprobs is not None:
            logprobs = [None] * len(token_ids)
            for row, entry in zip(self._wanted, _taken(self._logprobs, arrays)):
                logprobs[row] = entry
        prompt_logprobs = {
            slot: [entry for part in parts for entry in _taken(part, arrays)] for slot, parts in self._prompts.items()
        }
        return StepOutput(
            step=self._step,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            forward_seconds=seconds,
            vote=self._vote,
        )


def _taken(rows: LogprobRows, arrays: list[npt.NDArray[Any]]) -> list[TokenLogprobs]:
    """What ``rows`` hold; takes their arrays off the front."""
    count = len(rows.tensors)
    mine = arrays[:count]
    del arrays[:count]
    return rows.read(mine)
