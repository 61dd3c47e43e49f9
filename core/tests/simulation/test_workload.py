from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold.simulation.workload import conversations, read_trace, skewed, uniform

JSON_LINES = """\
{"arrival": 105.5, "prompt_tokens": 30, "output_tokens": 4}

{"arrival": 100, "prompt_tokens": 10, "output_tokens": 2, "conversation": "a"}
{"arrival": 103, "prompt_tokens": 20, "output_tokens": 3, "conversation": "b"}
{"arrival": 104, "prompt_tokens": 25, "output_tokens": 1, "conversation": "a"}
"""
CSV = """\
arrival,prompt_tokens,output_tokens,conversation
105.5,30,4,
100,10,2,a
103,20,3,b
104,25,1,a
"""


@pytest.mark.parametrize(("name", "text"), [("trace.jsonl", JSON_LINES), ("trace.csv", CSV)])
def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    load = read_trace(path)
    assert load.arrival.tolist() == [0, 3, 4, 5.5]
    assert load.prompt_tokens.tolist() == [10, 20, 25, 30]
    assert load.output_tokens.tolist() == [2, 3, 1, 4]
    talk = load.conversation.tolist()
    assert talk[3] == -1
    assert talk[0] == talk[2] != talk[1] >= 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is no JSON object"),
        ('{"arrival": 1, "prompt_tokens": 3}', "line 1 has no 'output_tokens'"),
        ('{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0; it must be a number from 1"),
        ('{"arrival": "x", "prompt_tokens": 1, "output_tokens": 1}', "arrival is 'x'; it must be a number"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival is nan; it must be a number from 0"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv cannot be read"):
        read_trace(tmp_path / "nothing.csv")


@pytest.mark.parametrize("make", [skewed, uniform, conversations])
def test_made_up_loads_have_their_rate(make) -> None:
    load = make(20_000, 50.0, 0)
    assert len(load) == 20_000
    assert (load.arrival[1:] >= load.arrival[:-1]).all()
    middle = load.arrival[15_000] - load.arrival[5000]
    assert middle == pytest.approx(10_000 / 50, rel=0.1)


def test_each_turn_goes_on_from_the_last() -> None:
    load = conversations(5000, 50.0, 0)
    said: dict[int, int] = {}
    for talk, prompt, output in zip(load.conversation, load.prompt_tokens, load.output_tokens):
        assert prompt > said.get(talk, 0)
        said[talk] = prompt + output


def test_one_prompt_in_twenty_one_is_long() -> None:
    prompts = skewed(21_000, 50.0, 0).prompt_tokens
    assert (prompts > 1000).sum() == pytest.approx(1000, rel=0.15)
