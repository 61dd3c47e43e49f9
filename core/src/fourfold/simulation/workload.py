"""Requests to simulate: from a trace, or made up. Columns of one element a request, in the order of arrival."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import ConfigError

SHORT = (64, 512)
"""Prompt tokens of a short request, from and to."""
LONG_FACTOR = 20
"""How much longer a long prompt is."""
ONE_LONG_IN = 21
OUTPUT = (16, 256)
"""Output tokens, from and to."""
TURN = (64, 384)
"""Tokens that a user adds in one turn."""
PAUSE_SECONDS = 20.0
"""Between two turns of a conversation, on average."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """What arrives when. Requests of one conversation share their beginnings: each prompt goes on from the last one."""

    arrival: NDArray[np.float64]
    """Seconds from the first, ascending."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    conversation: NDArray[np.int64]
    """A number; -1 for a request that shares nothing."""

    def __len__(self) -> int:
        return len(self.arrival)


def skewed(count: int, rate: float, seed: int) -> Workload:
    """Poisson arrivals, ``rate`` a second: one long prompt to twenty short ones, nothing shared."""
    random = np.random.default_rng(seed)
    prompts = random.integers(*SHORT, size=count)
    prompts[random.integers(ONE_LONG_IN, size=count) == 0] *= LONG_FACTOR
    return Workload(
        arrival=_poisson(random, count, rate),
        prompt_tokens=prompts,
        output_tokens=random.integers(*OUTPUT, size=count),
        conversation=np.full(count, -1),
    )


def uniform(count: int, rate: float, seed: int) -> Workload:
    """Poisson arrivals, ``rate`` a second, of short requests that share nothing."""
    random = np.random.default_rng(seed)
    return Workload(
        arrival=_poisson(random, count, rate),
        prompt_tokens=random.integers(*SHORT, size=count),
        output_tokens=random.integers(*OUTPUT, size=count),
        conversation=np.full(count, -1),
    )


def conversations(count: int, rate: float, seed: int, *, turns: int = 5) -> Workload:
    """Conversations of ``turns`` turns that begin as a Poisson process; ``count`` and ``rate`` are of turns.

    A turn's prompt is everything said before, answers included, and what the user adds.
    """
    random = np.random.default_rng(seed)
    num_talks = -(-count // turns)
    added, output = random.integers(*TURN, size=(num_talks, turns)), random.integers(*OUTPUT, size=(num_talks, turns))
    prompts = np.cumsum(added, axis=1) + np.cumsum(output, axis=1) - output
    pauses = random.exponential(PAUSE_SECONDS, size=(num_talks, turns))
    pauses[:, 0] = 0.0
    arrival = _poisson(random, num_talks, rate / turns)[:, None] + np.cumsum(pauses, axis=1)
    talk = np.broadcast_to(np.arange(num_talks)[:, None], arrival.shape)
    order = np.argsort(arrival, axis=None, kind="stable")[:count]
    return Workload(
        arrival=arrival.ravel()[order],
        prompt_tokens=prompts.ravel()[order],
        output_tokens=output.ravel()[order],
        conversation=talk.ravel()[order],
    )


def read_trace(path: Path) -> Workload:
    """A trace: JSON lines, or CSV with a header where the file's name ends so.

    A request has ``arrival`` (seconds), ``prompt_tokens``, ``output_tokens``, and perhaps ``conversation``, any text.
    Raises ConfigError, with the line, for what cannot be read.
    """
    numbers: dict[str, int] = {}
    rows = []
    try:
        with path.open(newline="") as file:
            for line, record in _records(path, file):
                rows.append(_row(record, numbers, f"{path}, line {line}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    table = np.array(rows)
    table = table[np.argsort(table[:, 0], kind="stable")]
    counts = table[:, 1:].astype(np.int64)
    return Workload(
        arrival=table[:, 0] - table[0, 0],
        prompt_tokens=counts[:, 0],
        output_tokens=counts[:, 1],
        conversation=counts[:, 2],
    )


def _poisson(random: np.random.Generator, count: int, rate: float) -> NDArray[np.float64]:
    return np.cumsum(random.exponential(1 / rate, size=count))


def _records(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix == ".csv":
        yield from enumerate(csv.DictReader(file), 2)
        return
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}, line {line} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {line} is no JSON object; write one request a line")
        yield line, record


def _row(record: Mapping[str, Any], numbers: dict[str, int], where: str) -> tuple[float, int, int, int]:
    values = []
    for name, least in (("arrival", 0), ("prompt_tokens", 1), ("output_tokens", 1)):
        try:
            value = float(record[name])
        except KeyError:
            raise ConfigError(f"{where} has no {name!r}; it needs arrival, prompt_tokens and output_tokens") from None
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: {name} is {record[name]!r}; it must be a number") from None
        if not least <= value < float("inf"):
            raise ConfigError(f"{where}: {name} is {record[name]!r}; it must be a number from {least}")
        values.append(value)
    talk = record.get("conversation")
    number = -1 if talk in (None, "") else numbers.setdefault(str(talk), len(numbers))
    return values[0], int(values[1]), int(values[2]), number
