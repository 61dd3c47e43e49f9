"""The fields that completions and chat share, and how they become SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fourfold.errors import RequestError
from fourfold.sampling_params import MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS, SamplingParams
from fourfold_server.fields import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Field,
    Kind,
    Table,
    list_of,
    one_or_list_of,
    read_fields,
    refused,
    shown,
    without_effect,
    wrong_type,
)


def _read_logit_bias(path: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object of token id: bias is needed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 19 and str(int(key)) == key):
            raise RequestError(f"{path} has the key {shown(key)}; keys are token ids in digits", parameter=path)
        # The parameter is the whole field: clients look for its name.
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise RequestError(f"{path}[{key}] is {shown(bias)}; a number from -100 to 100 is needed", parameter=path)
        biases[int(key)] = float(bias)
    return biases


LOGIT_BIAS: Final = Kind(
    _read_logit_bias,
    {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
)


def _read_top_k(path: str, value: Any) -> int:
    count: int = INTEGER.read(path, value)
    # Other servers say -1 for all.
    return 0 if count == -1 else count


TOP_K: Final = Kind(_read_top_k, INTEGER.schema)

STREAM_OPTIONS: Final[Table] = {
    "include_usage": Field(kind=BOOLEAN, doc="Send one more chunk with the usage before the end.", default=False),
    "include_obfuscation": Field(kind=BOOLEAN, doc="Padding against traffic analysis.", only=(False,)),
}

SAMPLING: Final[Table] = {
    "temperature": Field(kind=NUMBER, doc="0 to 2; 0 is greedy.", default=1.0),
    "top_p": Field(kind=NUMBER, doc="Keep the smallest set of tokens whose probability reaches this.", default=1.0),
    "top_k": Field(kind=TOP_K, doc="Keep this many likeliest tokens; 0 and -1 keep all.", default=0),
    "min_p": Field(kind=NUMBER, doc="Drop tokens less likely than this share of the likeliest.", default=0.0),
    "presence_penalty": Field(kind=NUMBER, doc="-2 to 2; for tokens that are in the output.", default=0.0),
    "frequency_penalty": Field(kind=NUMBER, doc="-2 to 2; for each time a token is in the output.", default=0.0),
    "repetition_penalty": Field(kind=NUMBER, doc="Above 1 discourages tokens of prompt and output.", default=1.0),
    "logit_bias": Field(kind=LOGIT_BIAS, doc="Token id to a bias from -100 to 100.", default={}),
    "seed": Field(kind=INTEGER, doc=f"0 to {MAX_SEED}; equal seeds give equal outputs."),
    "stop": Field(
        kind=one_or_list_of(STRING), doc=f"Up to {MAX_STOP_STRINGS} strings that end the output.", default=()
    ),
    "stop_token_ids": Field(kind=list_of(INTEGER), doc="Token ids that end the output.", default=()),
    "include_stop_str_in_output": Field(
        kind=BOOLEAN, doc="Whether a matched stop string is part of the text.", default=False
    ),
    "min_tokens": Field(
        kind=INTEGER, doc="Nothing ends the output before this many tokens; no match reaches back.", default=0
    ),
    "ignore_eos": Field(kind=BOOLEAN, doc="Whether to go on after the end-of-text token.", default=False),
    "skip_special_tokens": Field(kind=BOOLEAN, doc="Whether special tokens are left out of the text.", default=True),
}

# Of other servers: what would answer something else than was asked for is refused, not ignored.
_FOREIGN: Final[Table] = {
    **{
        name: refused("Structured output.")
        for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    },
    "allowed_token_ids": refused("Tokens of which alone the output is made."),
    "bad_words": refused("Words that the output must not have.", harmless=([],)),
    "use_beam_search": refused("Beam search.", harmless=(False,)),
    "truncate_prompt_tokens": refused("Tokens of the prompt's end that are kept."),
}

REQUEST: Final[Table] = {
    "model": Field(kind=STRING, doc="one of the models that /v1/models lists.", required=True),
    "n": Field(kind=INTEGER, doc="Choices for each prompt.", default=1),
    "stream": Field(kind=BOOLEAN, doc="Whether to send server-sent events.", default=False),
    "stream_options": Field(kind=OBJECT, doc="With stream: include_usage."),
    "priority": Field(kind=INTEGER, doc="With --scheduler priority lower numbers run first.", default=0),
    "cache_salt": Field(kind=STRING, doc="Only requests of equal salt share cached prompts.", default=""),
    "prompt_logprobs": Field(kind=INTEGER, doc=f"Score the prompt, with 0 to {MAX_LOGPROBS} alternatives."),
    "return_token_ids": Field(kind=BOOLEAN, doc="Whether to send token ids beside the text.", default=False),
    "user": without_effect(STRING, "An identifier of the end user."),
    **_FOREIGN,
}


def build_sampling(values: Mapping[str, Any], **fields: Any) -> SamplingParams:
    """SamplingParams of the read fields; ``fields`` come on top. Raises RequestError."""
    chosen: dict[str, Any] = {name: values[name] for name in SAMPLING}
    chosen["stop"] = tuple(chosen["stop"])
    chosen["stop_token_ids"] = tuple(chosen["stop_token_ids"])
    return SamplingParams(**{**chosen, **fields})


def read_stream_options(values: Mapping[str, Any], *, strict: bool, ignored: list[str]) -> bool:
    """Whether to send usage at the end of the stream. Raises RequestError when nothing is streamed."""
    options = values["stream_options"]
    if options is None:
        return False
    if not values["stream"]:
        raise RequestError("stream_options needs stream: true", parameter="stream_options")
    read = read_fields(STREAM_OPTIONS, options, strict=strict, path="stream_options.")
    ignored += read.ignored
    return bool(read.values["include_usage"])


def check_constants(constants: tuple[str, ...]) -> None:
    """Raise RequestError for NaN and Infinity in a body whose known fields are all right."""
    if constants:
        raise RequestError(f"the body has {constants[0]}, which is not valid JSON")
