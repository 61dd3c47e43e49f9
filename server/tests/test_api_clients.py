"""The commands that are clients of a server, against a small one of our own."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from fourfold.errors import ConfigError, EngineError
from fourfold_server import cli
from fourfold_server.bench import random_prompts
from fourfold_server.client_errors import describe_connection
from fourfold_server.load_client import Target, Timing, complete_all, first_model
from fourfold_server.load_report import LoadReport, Percentiles
from fourfold_server.server_url import read_url


class Handler(BaseHTTPRequestHandler):
    """Streams, in chunks that are no lines; prompts and messages choose how it goes."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.headers.get("authorization") not in (None, "Bearer right"):
            self.reply(401, {"error": {"message": "wrong key"}})
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        else:
            self.complete(body)

    def chat(self, body: dict[str, Any]) -> None:
        said = body["messages"][-1]["content"]
        if said == "break":
            self.stream([{"error": {"message": "the engine died"}}])
            return
        parts = [{"choices": [{"delta": {"content": text}}]} for text in ("You said ", said, "\n♥")]
        self.stream([{"choices": [{"delta": {"role": "assistant"}}]}, *parts, {"choices": [{"delta": {}}]}])

    def complete(self, body: dict[str, Any]) -> None:
        if body.get("model") == "tiny" and max(body["prompt"]) > 255:
            self.reply(400, {"error": {"message": "prompt has a token id outside the vocabulary, 0 to 255"}})
            return
        if body["prompt"] == "refuse":
            self.reply(400, {"error": {"message": "no"}})
            return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events = [{"choices": [{"text": "x"}], "usage": None} for _ in range(body["max_tokens"])]
        if body["prompt"] == "cut":
            self.stream(events)
        else:
            self.stream([*events, {"choices": [], "usage": usage}])

    def reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, events: list[Any]) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        content = text.encode()
        for start in range(0, len(content), 7):
            part = content[start : start + 7]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    bodies: list[dict[str, Any]]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.bodies = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def invoke(*arguments: str, said: str = "") -> Any:
    return CliRunner().invoke(cli.main, arguments, input=said)


# --- bench serve -----------------------------------------------------------------------------------------------------


def test_bench_serve_counts_tokens_and_parts(server: Server) -> None:
    result = invoke(
        "bench", "serve", "--url", url(server), "--num-prompts", "5", "--input-len", "3", "--output-len", "4", "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    counts = [report[key] for key in ("completed", "failed", "prompt_tokens", "output_tokens")]
    assert counts == [5, 0, 15, 20]
    assert report["time_to_first_token"]["p50"] > 0
    bodies = server.bodies
    assert sorted(body["prompt"] for body in bodies) == sorted(random_prompts(5, 3, 0))
    assert {body["model"] for body in bodies} == {"small"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)


def test_bench_serve_prints_a_table_and_fails_with_its_requests(server: Server) -> None:
    result = invoke("bench", "serve", "--url", url(server), "--num-prompts", "2", "--output-len", "2")
    assert "output tokens per second" in result.stdout
    assert result.exit_code == 0
    result = invoke("bench", "serve", "--url", url(server), "--num-prompts", "2", "--api-key", "wrong")
    assert result.exit_code == 1
    assert "2 of 2 requests failed; the first: wrong key (status 401)" in result.stderr
    assert result.stdout == ""


def test_no_server_is_a_clear_error(server: Server) -> None:
    server.shutdown()
    server.server_close()
    for command in (["bench", "serve"], ["chat"]):
        result = invoke(*command, "--url", url(server))
        assert result.exit_code == 1
        assert url(server) in result.stderr


def test_each_request_fails_alone(server: Server) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 3} for prompt in ("refuse", "fine", "cut")]
    timings = asyncio.run(complete_all(Target(url=url(server)), bodies, 3))
    assert [timing.error for timing in timings] == [
        "no (status 400)",
        None,
        "the answer ended without its usage",
    ]
    assert (timings[1].output_tokens, len(timings[1].events)) == (3, 3)


def test_a_request_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)
        with pytest.raises(EngineError, match="cannot learn the model"):
            asyncio.run(first_model(target))
        (timing,) = asyncio.run(complete_all(target, [{"prompt": "x"}], 1))
    assert timing.error == "no end of the answer within 0.05 s"


def test_prompts_depend_on_the_seed_alone() -> None:
    prompts = random_prompts(3, 8, seed=1)
    assert prompts == random_prompts(3, 8, seed=1)
    assert prompts != random_prompts(3, 8, seed=2)
    assert all(1000 <= token_id < 48000 for prompt in prompts for token_id in prompt)
    assert prompts == random_prompts(3, 8, seed=1, vocabulary_size=49152)


@pytest.mark.parametrize("size", [1, 2, 256, 1500])
def test_prompts_stay_within_a_small_vocabulary(size: int) -> None:
    (prompt,) = random_prompts(1, 200, seed=1, vocabulary_size=size)
    assert 0 <= min(prompt) <= max(prompt) < size


def test_bench_serve_says_how_to_load_a_model_with_a_small_vocabulary(server: Server) -> None:
    arguments = ["bench", "serve", "--url", url(server), "--num-prompts", "2", "--model", "tiny"]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "outside the vocabulary, 0 to 255 (status 400); give the model's --vocabulary-size" in result.stderr
    assert invoke(*arguments, "--vocabulary-size", "256").exit_code == 0


def test_report_figures() -> None:
    timings = [
        Timing(start=0.0, end=2.0, events=[0.5, 1.0, 2.0], prompt_tokens=4, output_tokens=3),
        Timing(start=1.0, end=4.0, error="lost"),
    ]
    report = LoadReport.of(timings)
    assert (report.completed, report.failed, report.first_error) == (1, 1, "lost")
    assert (report.seconds, report.output_tokens_per_second) == (4.0, 0.75)
    assert report.time_to_first_token == Percentiles(p50=500.0, p90=500.0, p99=500.0)
    assert report.inter_token_latency.p50 == 750.0
    assert report.time_per_output_token.p50 == 750.0
    assert Percentiles.of([]) == Percentiles(p50=0.0, p90=0.0, p99=0.0)


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://x:port", "http://[::1", "http://x?y"])
def test_what_is_no_url(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--url is .*such as http://127\.0\.0\.1:8000"):
        read_url(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "localhost"])
def test_a_url_needs_its_scheme(address: str) -> None:
    with pytest.raises(ConfigError, match=f"without http:// or https://; write http://{address}$"):
        read_url(address)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_is_that_of_the_server(end: str) -> None:
    assert read_url(f" http://x:1/path{end}") == "http://x:1/path"


def test_a_url_may_end_as_clients_of_openai_have_it(server: Server) -> None:
    for command in (["bench", "serve", "--num-prompts", "1"], ["chat"]):
        assert invoke(*command, "--url", f"{url(server)}/v1/").exit_code == 0


def test_connections_are_described() -> None:
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    wrapped = OSError("connect failed")
    wrapped.__cause__ = untrusted
    assert describe_connection(wrapped, secure=True) == (
        "its certificate is not trusted (self-signed certificate); "
        "set SSL_CERT_FILE to a PEM file with the certificate that signed it"
    )
    assert "is it an http:// server?" in describe_connection(ssl.SSLError(1, "wrong version"), secure=True)
    assert describe_connection(OSError("No route."), secure=True) == "No route"
    closed = asyncio.IncompleteReadError(b"", None)
    assert describe_connection(closed, secure=False).endswith("is it an https:// server?")


def test_a_server_without_tls_is_recognised(server: Server) -> None:
    for command in (["bench", "serve"], ["chat"]):
        result = invoke(*command, "--url", url(server).replace("http:", "https:"))
        assert result.exit_code == 1
        assert "is it an http:// server?" in result.stderr


# --- chat --------------------------------------------------------------------------------------------------------


def test_chat_streams_and_remembers(server: Server) -> None:
    result = invoke("chat", "--url", url(server), "--temperature", "0", said="hi\nagain\n/exit\n")
    assert result.exit_code == 0, result.output
    assert "You said hi\n♥" in result.stdout
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hi", "You said hi\n♥", "again"]
    assert server.bodies[0]["temperature"] == 0
    assert "max_tokens" not in server.bodies[0]


def test_chat_commands(server: Server) -> None:
    said = "one\n/reset\ntwo\n/system Be brief.\nthree\n/unknown\n\n"
    result = invoke("chat", "--url", url(server), "--system", "S", "--max-tokens", "9", said=said)
    assert result.exit_code == 0
    seen = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert seen == [["S", "one"], ["S", "two"], ["Be brief.", "three"]]
    assert server.bodies[0]["max_tokens"] == 9
    assert result.stderr.count("/system TEXT sets") == 2


def test_a_failed_answer_is_shown_and_not_remembered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_server.chat._interactive", lambda: True)
    result = invoke("chat", "--url", url(server), said="break\nfine\n")
    assert "Error: the engine died\n" in result.stderr
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["fine"]


def test_a_failed_answer_ends_a_script(server: Server) -> None:
    result = invoke("chat", "--url", url(server), said="hi\nbreak\nfine\n")
    assert result.exit_code == 1
    assert result.stdout == "You said hi\n♥\n"
    assert result.stderr.endswith("Error: the engine died\n")
    assert len(server.bodies) == 2
