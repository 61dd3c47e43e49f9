from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

HEART = "♥"
Events = Callable[[str], list[Any]]


def both(server: Any, events: Events, prompt: Any = "The capital of France is", **fields: Any) -> dict[str, Any]:
    """The whole answer; a stream of the same request must say the same, choice by choice."""
    whole = server.complete(prompt, **fields)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    reply = server.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(reply.text)
    assert done is None
    assert usage["choices"] == []
    assert usage["usage"] == answer["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not reasons[choice["index"]], "a chunk after the finish reason"
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    for choice in answer["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert reasons[choice["index"]] == [choice["finish_reason"]]
    assert len(texts) == len(answer["choices"])
    return answer


def test_a_completion(server: Any, events: Events) -> None:
    answer = both(server, events, max_tokens=4)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "m"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" Paris.\n\n", "length", None)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_unless_asked_for_otherwise(server: Any) -> None:
    assert server.complete().json()["usage"]["completion_tokens"] == 16


def test_a_stop_string_across_tokens(start_server: Any, events: Events) -> None:
    server = start_server("DEFGHIJ")
    answer = both(server, events, max_tokens=32, stop=["DEFGHI"])
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["stop_reason"] == "DEFGHI"
    assert answer["usage"]["completion_tokens"] == 3
    server.until(lambda: server.engine.num_requests == 0, "the engine to hear of the stop")
    assert len(server.engine.aborted) == 2


@pytest.mark.parametrize("stop", [["GHIJ", "FG"], ["FG", "GHIJ"]])
def test_the_earliest_stop_counts(start_server: Any, events: Events, stop: list[str]) -> None:
    (choice,) = both(start_server("DEFGHIJ"), events, max_tokens=32, stop=stop)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("DE", "FG")


def test_a_stop_may_be_shown(start_server: Any, events: Events) -> None:
    server = start_server("DEFGHIJ")
    (choice,) = both(server, events, stop="FG", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "DEFG"


def test_a_stop_token(start_server: Any, events: Events) -> None:
    server = start_server("DEFGHIJ")
    (token_id,) = server.tokenizer.encode("GH")
    (choice,) = both(server, events, stop_token_ids=[token_id])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("DEF", "stop", token_id)


def test_eos_counts_and_is_not_shown(start_server: Any, events: Events) -> None:
    answer = both(start_server(" Paris", end=True), events)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (" Paris", "stop")
    assert answer["usage"]["completion_tokens"] == 2


def test_characters_are_whole_and_a_cut_one_is_replaced_once(start_server: Any, events: Events) -> None:
    server = start_server(HEART)
    assert both(server, events, max_tokens=9)["choices"][0]["text"] == HEART * 3
    assert both(server, events, max_tokens=10)["choices"][0]["text"] == HEART * 3 + "\ufffd"
    chunks = events(server.complete(max_tokens=10, stream=True).text)[:-1]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert all("\ufffd" not in text for text in texts[:-1])


def test_echo_with_logprobs(server: Any, events: Events) -> None:
    answer = both(server, events, echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "The capital of France is Paris"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["The", " capital", " of", " France", " is", " Paris"]
    assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert scores["text_offset"] == [0, 3, 11, 14, 21, 24]
    assert scores["top_logprobs"] == [None, *({token: -0.5} for token in scores["tokens"][1:])]


def test_echo_of_token_ids_is_their_text(server: Any, events: Events) -> None:
    token_ids = server.tokenizer.encode(f"The {HEART}")
    (choice,) = both(server, events, token_ids, echo=True, max_tokens=1)["choices"]
    assert choice["text"] == f"The {HEART} Paris"


def test_streamed_logprobs_join_to_the_whole_ones(start_server: Any, events: Events) -> None:
    server = start_server(f"a{HEART}bGHc")
    fields = {"logprobs": 2, "max_tokens": 7, "echo": True, "stop": ["zzz"]}
    whole = server.complete(**fields).json()["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = defaultdict(list)
    for chunk in events(server.complete(stream=True, **fields).text)[:-1]:
        for key, values in chunk["choices"][0]["logprobs"].items():
            joined[key] += values
    assert dict(joined) == whole
    assert len({len(values) for values in whole.values()}) == 1


def test_zero_logprobs_score_the_tokens_alone(server: Any, events: Events) -> None:
    scores = both(server, events, logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == [-0.5, -0.5]
    assert scores["top_logprobs"] is None


def test_several_choices_draw_with_different_seeds(server: Any, events: Events) -> None:
    answer = both(server, events, n=3, temperature=1, seed=1, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 24
    added = server.engine.added[:3]
    assert added[0].sampling.seed == 1
    assert len({request.sampling.seed for request in added}) == 3
    assert len({request.request_id for request in server.engine.added}) == 6


def test_several_prompts(server: Any, events: Events) -> None:
    answer = both(server, events, ["The", "The capital"], n=2, max_tokens=2, echo=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["The Paris."] * 2 + ["The capital Paris."] * 2
    assert answer["usage"]["prompt_tokens"] == 3


def test_token_id_prompts_equal_text(server: Any, events: Events) -> None:
    token_ids = server.tokenizer.encode("The capital")
    both(server, events, [token_ids, [5]], max_tokens=1)
    both(server, events, token_ids, max_tokens=1)
    both(server, events, "The capital", max_tokens=1)
    sent = [tuple(added.prompt_token_ids) for added in server.engine.added]
    assert sent == [tuple(token_ids), (5,)] * 2 + [tuple(token_ids)] * 4


def test_token_ids_are_returned_if_asked_for(server: Any, events: Events) -> None:
    (choice,) = server.complete(return_token_ids=True, max_tokens=2).json()["choices"]
    assert choice["prompt_token_ids"] == server.tokenizer.encode("The capital of France is")
    assert choice["token_ids"] == server.tokenizer.encode(" Paris.")
    chunks = events(server.complete(return_token_ids=True, max_tokens=2, stream=True).text)[:-1]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]


def test_prompt_logprobs(server: Any) -> None:
    (choice,) = server.complete("The capital", prompt_logprobs=0, max_tokens=1).json()["choices"]
    (token_id,) = server.tokenizer.encode(" capital")
    assert choice["prompt_logprobs"] == [
        None,
        {str(token_id): {"logprob": -0.5, "rank": 1, "decoded_token": " capital"}},
    ]


def test_sampling_reaches_the_engine(server: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 1.5},
        "seed": 42,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop": "xyz",
        "stop_token_ids": [9],
        "max_tokens": 3,
        "logprobs": 4,
    }
    assert server.complete(priority=3, cache_salt="mine", **fields).status_code == 200
    (added,) = server.engine.added
    expected = {**fields, "logit_bias": {7: -100, 8: 1.5}, "stop": ("xyz",), "stop_token_ids": (9,)}
    assert {name: getattr(added.sampling, name) for name in fields} == expected
    assert (added.priority, added.cache_salt, added.eos_token_ids) == (3, "mine", (2,))
    assert added.arrival_time > 0


def test_nothing_is_streamed_of_usage_unless_asked_for(server: Any, events: Events) -> None:
    *chunks, done = events(server.complete(stream=True, max_tokens=3).text)
    assert done is None
    assert all("usage" not in chunk for chunk in chunks)
    assert len(chunks) == 3
