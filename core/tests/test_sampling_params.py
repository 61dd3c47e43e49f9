"""Parameters of the wrong type or outside their range, as Python programs pass them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fourfold.errors import RequestError
from fourfold.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("stop", 5, "a list of strings is needed"),
        ("stop", "word", "a list of strings is needed"),
        ("stop", [1], "a list of strings is needed"),
        ("stop_token_ids", ["a"], "a list of token ids is needed"),
        ("temperature", "0", "a number is needed"),
        ("temperature", None, "a number is needed"),
        ("max_tokens", 1.5, "an integer is needed"),
        ("n", True, "an integer is needed"),
        ("ignore_eos", 1, "True or False is needed"),
        ("logit_bias", {"1": 2}, "a mapping of token ids to numbers is needed"),
        ("temperature", 3, "from 0.0 to 2.0"),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; {wanted}"
    assert caught.value.parameter == name


def test_what_is_right_travels() -> None:
    params = SamplingParams(temperature=1, stop=["a"], stop_token_ids=[3], logit_bias={4: -1}, seed=5, max_tokens=6)  # type: ignore[arg-type]
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert (travelled.stop, travelled.stop_token_ids, travelled.max_tokens) == (("a",), (3,), 6)
