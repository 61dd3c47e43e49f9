from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from fourfold_server.config import ServerConfig


def refused(reply: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """Every refusal is one OpenAI error object."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param
    return error


@pytest.fixture(scope="module")
def bodies() -> dict[str, tuple[bytes, str]]:
    plain = "application/json"
    return {
        "no json": (b"{", plain),
        "empty": (b"", plain),
        "blank": (b" \n", plain),
        "array": (b"[]", plain),
        "string": (b'"a"', plain),
        "null": (b"null", plain),
        "number": (b"1", plain),
        "form": (b"model=m", "application/x-www-form-urlencoded"),
        "text": (b'{"model": "m", "prompt": "a"}', "text/plain"),
        "other charset": (b'{"model": "m", "prompt": "a"}', "application/json; charset=latin-1"),
        "deep array": (b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", plain),
        "deep object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, plain),
        "twice": (b'{"model": "m", "prompt": "a", "prompt": "b"}', plain),
        "twice within": (b'{"model": "m", "prompt": "a", "logit_bias": {"1": 1, "1": 2}}', plain),
        "half a surrogate": (b'{"model": "m", "prompt": "\\ud800"}', plain),
        "no utf-8": (b'{"model": "m", "prompt": "\xff"}', plain),
        "utf-16": ('{"model": "m", "prompt": "a"}'.encode("utf-16"), plain),
        "nan elsewhere": (b'{"model": "m", "prompt": "a", "other": NaN}', plain),
        "long number": (b'{"model": "m", "prompt": "a", "seed": ' + b"1" * 5000 + b"}", plain),
    }


NAMES = [
    "no json",
    "empty",
    "blank",
    "array",
    "string",
    "null",
    "number",
    "form",
    "text",
    "other charset",
    "deep array",
    "deep object",
    "twice",
    "twice within",
    "half a surrogate",
    "no utf-8",
    "utf-16",
    "nan elsewhere",
    "long number",
]


def test_bad_bodies(server: Any, bodies: dict[str, tuple[bytes, str]]) -> None:
    assert sorted(bodies) == sorted(NAMES)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        for name in NAMES:
            content, kind = bodies[name]
            reply = server.http.post(path, content=content, headers={"content-type": kind})
            refused(reply)
    assert server.engine.added == []
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == " Paris."


def test_a_body_is_json_unless_it_says_otherwise(server: Any) -> None:
    content = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
    kinds = ("application/json; charset=UTF-8", "application/json; a=b; charset=utf-8", "application/x+json;a=b")
    for headers in ({}, *({"content-type": kind} for kind in kinds), {"content-encoding": "identity"}):
        assert server.http.post("/v1/completions", content=content, headers=headers).status_code == 200
    other = server.http.post("/v1/completions", content=content, headers={"content-type": "text/json; charset=utf-8"})
    refused(other)


def test_a_body_of_a_million_values_is_refused_before_it_is_parsed(server: Any) -> None:
    headers = {"content-type": "application/json"}
    reply = server.http.post("/v1/completions", content=b"[" + b"1," * 1_000_001, headers=headers)
    assert "more than 1000000 commas" in refused(reply)["message"]
    ids = server.http.post("/v1/completions", json={"model": "m", "prompt": [5] * 200_000})  # read off the event loop
    assert "prompt has 200000 tokens" in refused(ids, param="prompt")["message"]


def test_a_compressed_body_is_refused_as_such(server: Any) -> None:
    content = gzip.compress(b'{"model": "m", "prompt": "a", "max_tokens": 1}')
    reply = server.http.post("/v1/completions", content=content, headers={"content-encoding": "gzip"})
    assert "gzip" in refused(reply, 415)["message"]


@pytest.mark.parametrize("depth", [99, 300, 900, 5000])
def test_depth_is_no_failure_whatever_the_field(server: Any, depth: int) -> None:
    """Depths that the JSON parser takes are too much for what handles values by recursion."""
    texts = ("1", '"\\ud83d\\ude00"')
    lists, objects = (
        [start * depth + text + end * depth for text in texts] for start, end in (("[", "]"), ('{"a":', "}"))
    )
    for path, field in [
        ("/tokenize", "chat_template_kwargs"),
        ("/v1/chat/completions", "metadata"),
        ("/v1/completions", "prompt"),
        ("/v1/completions", "stop"),
        ("/v1/completions", "other"),
    ]:
        for value in lists if path == "/v1/completions" else objects:
            fields = {
                "model": '"m"',
                "prompt": '"a"',
                "messages": '[{"role": "user", "content": "a"}]',
                "max_tokens": "1",
            }
            if path == "/tokenize":
                del fields["prompt"]
            body = ", ".join(f'"{name}": {text}' for name, text in {**fields, field: value}.items())
            reply = server.http.post(path, content="{" + body + "}", headers={"content-type": "application/json"})
            if depth > 99:
                assert "too deeply" in refused(reply)["message"]
            elif field in ("prompt", "stop"):
                refused(reply)
            else:
                assert reply.status_code == 200, reply.text


def test_errors_quote_no_megabytes(server: Any) -> None:
    long = "a" * 100_000
    for body in [
        {"model": long, "prompt": "a"},
        {"model": "m", "prompt": [5, long]},
        {"model": "m", "prompt": [{"a": long}]},
        {"model": "m", "prompt": "a", "logit_bias": {long: 1}},
        {"model": "m", "prompt": "a", "temperature": long},
    ]:
        reply = server.http.post("/v1/completions", json=body)
        refused(reply, 404 if body["model"] == long else 400)
        assert len(reply.content) < 3000
    twice = '{"' + long + '": 1, "' + long + '": 2}'
    reply = server.http.post("/v1/completions", content=twice, headers={"content-type": "application/json"})
    assert refused(reply)["message"].endswith("twice")
    assert len(reply.content) < 3000


def test_a_huge_body_is_a_413_declared_or_not(server: Any) -> None:
    chunk = b"a" * (1 << 20)
    declared = server.http.post("/v1/completions", content=b'{"prompt": "' + 50 * chunk)
    refused(declared, 413)
    undeclared = server.http.post("/v1/completions", content=(chunk for _ in range(50)))
    refused(undeclared, 413)
    assert server.complete(max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ["-0.1", "2.1", "NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"', '"1"', "true", "1e999"]),
        ("top_p", ["0", "1.1", "-1", '"a"', "false", "NaN", "[1]"]),
        ("top_k", ["-5", "-2", "1.5", "true", '"5"']),
        ("min_p", ["-0.1", "1.1", '"a"']),
        ("presence_penalty", ["3", "-2.1", "true"]),
        ("frequency_penalty", ["3", "-2.1", "{}"]),
        ("repetition_penalty", ["0", "-1", "NaN"]),
        ("max_tokens", ["-1", "0", '"ten"', "1.5", "true", "1e3", "99999999999999999999"]),
        ("min_tokens", ["-1", "17", "true"]),
        ("n", ["0", "-1", "10000", "1.5", "true", '"2"']),
        ("seed", ["-1", "9223372036854775808", "1.5", '"a"', "true"]),
        ("logprobs", ["-1", "21", "100000", "true", '"1"']),
        ("prompt_logprobs", ["-1", "21", "true"]),
        ("stop", ['""', '["a", ""]', "5", "[5]", '{"a": 1}', json.dumps(list("abcdefghijklmnopq"))]),
        ("stop_token_ids", ["[-1]", "[100000]", '["a"]', "5", "[true]", "[1.5]"]),
        ("logit_bias", ['{"100000": 1}', '{"-1": 1}', '{"AI": 1}', '{"05": 1}', '{" 5": 1}', "[5]"]),
        ("logit_bias", ['{"5": 1e9}', '{"5": "1"}', '{"5": true}', '{"5": NaN}', '{"5": 101}']),
        ("prompt", ["null", '""', "[]", "[[]]", '["a", ""]', "5", '{"a": 1}', "true"]),
        ("prompt", ["[-1]", "[100000]", '[5, "a"]', "[5.5]", "[true]", "[null]"]),
        ("prompt", ['["a", 5]', '["a", [5]]', "[[5], 6]", "[[5], []]", '[[5], "a"]']),
        ("model", ["null", "5", "true"]),
        ("stream", ['"true"', "1"]),
        ("stream_options", ['{"include_usage": true}', "[]", "true"]),
        ("echo", ["1", '"a"']),
        ("priority", ["1.5", '"a"']),
        ("cache_salt", ["5"]),
        ("user", ["5"]),
        ("best_of", ["2", "0", "true"]),
        ("suffix", ['"b"', "5"]),
        ("ignore_eos", ["1"]),
        ("skip_special_tokens", ['"no"']),
        ("include_stop_str_in_output", ["0"]),
        ("return_token_ids", ["2"]),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(server: Any, field: str, values: list[str]) -> None:
    fields = {"model": '"m"', "prompt": '"a"'}
    for value in values:
        body = ", ".join(f'"{name}": {text}' for name, text in {**fields, field: value}.items())
        reply = server.http.post(
            "/v1/completions", content="{" + body + "}", headers={"content-type": "application/json"}
        )
        error = refused(reply)
        assert error["param"].split("[")[0].split(".")[0] == field, (value, error)
        assert error["type"] == "invalid_request_error"
    assert server.engine.added == []


def test_an_empty_prompt_is_named_by_its_index(server: Any) -> None:
    assert "prompt 1 is empty" in refused(server.complete(["a", ""]), param="prompt")["message"]
    assert "prompt 1 is an empty list" in refused(server.complete([[5], []]), param="prompt")["message"]


def test_a_prompt_of_the_wrong_kind_is_quoted(server: Any) -> None:
    assert "prompt[0] is 5.5;" in refused(server.complete([5.5]), param="prompt")["message"]
    assert "prompt[1] is [5];" in refused(server.complete(["a", [5]]), param="prompt")["message"]


def test_top_k_of_minus_one_keeps_all(server: Any) -> None:
    assert server.complete(top_k=-1, max_tokens=1).status_code == 200
    assert server.engine.added[0].sampling.top_k == 0


def test_a_prompt_that_fills_the_context(start_server: Any) -> None:
    server = start_server(max_model_len=256)
    fits = server.complete([5] * 255, max_tokens=16)
    assert (fits.json()["usage"]["completion_tokens"], fits.json()["choices"][0]["finish_reason"]) == (1, "length")
    for size in (256, 300, 9000):
        for stream in (False, True):
            error = refused(server.complete([5] * size, max_tokens=16, stream=stream), param="prompt")
            assert error["code"] == "context_length_exceeded"
            assert "256" in error["message"]
            assert str(size) in error["message"]
    error = refused(server.chat("a" * 300), param="messages")
    assert error["code"] == "context_length_exceeded"


def test_max_tokens_is_cut_to_the_context_or_refused(start_server: Any) -> None:
    assert start_server().complete([5] * 250, max_tokens=16).json()["usage"]["completion_tokens"] == 6
    strict = start_server(config=ServerConfig(strict_max_tokens=True))
    error = refused(strict.complete([5] * 250, max_tokens=16), param="max_tokens")
    assert "at most 6 fit" in error["message"]
    assert strict.complete([5] * 250, max_tokens=6).status_code == 200


def test_min_tokens_are_cut_with_max_tokens(start_server: Any) -> None:
    server = start_server(max_model_len=256)
    assert server.complete([5] * 250, max_tokens=16, min_tokens=16).json()["usage"]["completion_tokens"] == 6


def test_choices_in_all_are_limited(server: Any) -> None:
    refused(server.complete([[5]] * 100, n=11), param="n")
    refused(server.complete([[5]] * 1025), param="prompt")


def test_chat_fields_that_exclude_each_other(server: Any) -> None:
    refused(server.chat(top_logprobs=5), param="top_logprobs")
    refused(server.chat(logprobs=True, top_logprobs=21), param="top_logprobs")
    refused(server.chat(logprobs=5), param="logprobs")
    refused(server.chat(stream_options={"include_usage": True}), param="stream_options")
    refused(server.chat(prompt_logprobs=1, stream=True), param="prompt_logprobs")
    refused(server.chat(stream=True, stream_options={"include_usage": 1}), param="stream_options.include_usage")


def test_unknown_models(server: Any) -> None:
    for name in ("other", ""):
        error = refused(server.complete(model=name), 404, "model")
        assert error["code"] == "model_not_found"
    refused(server.http.get("/v1/models/other"), 404)
    assert server.complete(model="alias", max_tokens=1).json()["model"] == "m"


def test_unknown_routes_and_methods(server: Any) -> None:
    for method, path, status in [
        ("GET", "/", 404),
        ("GET", "/nope", 404),
        ("GET", "//livez", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/metrics", 405),
    ]:
        reply = server.http.request(method, path)
        refused(reply, status)
        if status == 405:
            assert reply.headers["allow"]


def test_an_engine_that_is_full_is_a_429(start_server: Any) -> None:
    # Slow steps: the refusal comes before the first token, also on a busy machine.
    server = start_server(max_num_seqs=1, max_num_waiting=1, step_seconds=0.5)
    for fields in ({}, {"stream": True}):
        reply = server.complete(n=3, **fields)
        error = refused(reply, 429)
        assert error["type"] == "rate_limit_error"
        assert reply.headers["retry-after"]
    server.until(lambda: server.engine.num_requests == 0, "the accepted choices to be aborted")
    assert server.complete(n=2, max_tokens=1).status_code == 200


def test_an_unexpected_failure_is_a_500_that_tells_nothing(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("fourfold_server.routes_completions.build_requests", fail)
    error = refused(server.complete(), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_text_that_cannot_be_decoded_fails_its_own_request_alone(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = server.tokenizer.token_bytes
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "token_bytes", lambda token_id: original(token_id + 100_000))
        refused(server.complete(max_tokens=50), 500)
    server.until(lambda: server.engine.num_requests == 0, "the abort")
    assert server.complete(max_tokens=2).status_code == 200
    assert "cannot be turned into text" in caplog.text
