"""The choices of a batch of prompts on their way through an engine, for ``LLM``. Knows no prompt and no config."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fourfold.engine.operations import Call
from fourfold.errors import EngineError, RequestError
from fourfold.messages import AddRequest, FinishReason, RequestOutput
from fourfold.text.output_processor import Delta, OutputProcessor


class EngineCores(Protocol):
    """An engine core in this process, or several in others."""

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Take a request; returns its only output if it is refused."""

    def step(self) -> Mapping[int, list[RequestOutput]]:
        """Advance; returns what came."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests."""

    def operate(self, calls: Sequence[Call], *, timeout: float) -> None:
        """Call methods of all engine cores."""

    def shutdown(self) -> None:
        """End everything."""


class Choice(NamedTuple):
    """One engine request and what has come of it."""

    request: AddRequest
    processor: OutputProcessor
    total: Delta
    held: list[int]
    """Token ids whose text is still to be found."""


class ChoiceBatch:
    """Runs choices to their ends; whatever interrupts it, none is left in the engine."""

    def __init__(self, core: EngineCores, choices: Sequence[Choice], *, limit: int) -> None:
        self._core = core
        self._limit = limit
        self._waiting = iter(choices)
        self._running: dict[str, Choice] = {}

    def run(self) -> None:
        """Return when every choice has ended. Raises RequestError and EngineError."""
        try:
            self._fill()
            while self._running:
                for outputs in self._core.step().values():
                    for output in outputs:
                        self._take(output)
                self._fill()
        finally:
            if self._running:
                self._core.abort(list(self._running))

    def _fill(self) -> None:
        for choice in itertools.islice(self._waiting, self._limit - len(self._running)):
            self._running[choice.request.request_id] = choice
            refusal = self._core.add(choice.request)
            if refusal is not None:
                self._take(refusal)

    def _take(self, output: RequestOutput) -> None:
        choice = self._running.get(output.request_id)
        if choice is None:
            return
        if not choice.processor.looks_at_text and output.logprobs is None:
            # Nobody sees the text before its end, and all of it at once takes a fraction of the time.
            choice.held.extend(output.token_ids)
            if output.finish_reason is None and output.prompt_logprobs is None and not output.num_cached_tokens:
                return
            output.token_ids = choice.held[:]
            choice.held.clear()
        delta = choice.processor.process(output)
        choice.total.merge(delta)
        if delta.finish_reason is None:
            return
        del self._running[output.request_id]
        if output.finish_reason is None:
            self._core.abort([output.request_id])
        elif delta.finish_reason is FinishReason.ERROR:
            message = delta.error or "the engine failed on a request"
            raise RequestError(message, status=delta.error_status) if delta.error_status < 500 else EngineError(message)
