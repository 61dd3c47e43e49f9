"""How one request is sampled and when it stops. Travels as msgpack; checked once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from fourfold.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. Defaults are OpenAI's, greedy at temperature 0."""

    n: int = 1
    """Choices; choice i of a seeded request draws with a seed derived from (seed, i)."""
    temperature: float = 1.0
    """0 to 2; below 1e-5 is greedy."""
    top_k: int = 0
    """Keep the k likeliest entries; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of entries whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Drop entries less likely than this share of the likeliest; 0 to 1."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; above 0."""
    presence_penalty: float = 0.0
    """Subtracted once for tokens in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token is in the output; -2 to 2."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of token ids; -100 to 100."""
    seed: int | None = None
    """0 to 2**63 - 1; None: one is drawn at admission."""
    logprobs: int | None = None
    """Log probabilities of each sampled token and of this many likeliest; None: none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    max_tokens: int | None = None
    """Output tokens at most; None: as many as fit the context."""
    min_tokens: int = 0
    """Stop conditions are ignored before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it unless ``include_stop_str_in_output``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output; part of the ids, not of the text."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; 0 (all) or more", parameter="top_k")
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p is 0; above 0, up to 1", parameter="top_p")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if not (math.isfinite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; above 0, up to 100", parameter="repetition_penalty"
            )
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias has {token_id}: {bias}; token ids from 0, values from -100 to 100",
                    parameter="logit_bias",
                )
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; 1 or more", parameter="max_tokens")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise RequestError(
                f"min_tokens is {self.min_tokens}; from 0 to max_tokens ({self.max_tokens})", parameter="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; {MAX_STOP_STRINGS} at most", parameter="stop")
        if "" in self.stop:
            raise RequestError("stop has an empty string; every stop string needs a character", parameter="stop")

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raise RequestError for token ids at or past ``vocabulary_size``."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocabulary_size:
                    raise RequestError(
                        f"{name} has token id {token_id}; the vocabulary is 0 to {vocabulary_size - 1}", parameter=name
                    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < 1e-5


def _check_types(params: SamplingParams) -> None:
    """Python programs may pass anything; what comes over a wire has its types already."""
    for names, (is_right, wanted) in _KINDS.items():
        for name in names:
            value = getattr(params, name)
            if not (is_right(value) or (value is None and name in _OPTIONAL)):
                raise RequestError(f"{name} is {value!r}; {wanted} is needed", parameter=name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _are_strings(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _are_integers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_integer, value))


def _are_biases(value: object) -> bool:
    return isinstance(value, dict) and all(_is_integer(key) and _is_number(bias) for key, bias in value.items())


_OPTIONAL: Final = frozenset({"seed", "logprobs", "prompt_logprobs", "max_tokens"})
_KINDS: Final[dict[tuple[str, ...], tuple[Callable[[object], bool], str]]] = {
    ("n", "top_k", "min_tokens", *sorted(_OPTIONAL)): (_is_integer, "an integer"),
    (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ): (_is_number, "a number"),
    ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"): (_is_boolean, "True or False"),
    ("stop",): (_are_strings, "a list of strings"),
    ("stop_token_ids",): (_are_integers, "a list of token ids"),
    ("logit_bias",): (_are_biases, "a mapping of token ids to numbers"),
}
"""Fields -> what their values must be, and how that is said."""


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} is {value}; from {low} to {high}", parameter=name)
