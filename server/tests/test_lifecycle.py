"""What happens to requests when a client, the engine or the server goes away."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from fourfold_server.errors import ErrorBoundary

Events = Callable[[str], list[Any]]
LONG = {"max_tokens": 200, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [
    ("/v1/completions", {"prompt": "The"}),
    ("/v1/completions", {"prompt": "The", "n": 3}),
    ("/v1/completions", {"prompt": ["The", " capital", " of"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 2}),
]


@contextmanager
def raw_request(server: Any, path: str, **fields: Any) -> Iterator[socket.socket]:
    """A request on a socket of our own, which may be left at any moment."""
    body = json.dumps({"model": "m", **LONG, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def assert_idle(server: Any) -> None:
    server.until(lambda: server.engine.num_requests == 0, "the engine to be idle")
    server.until(lambda: server.state.client.num_requests == 0, "the server to have no request")
    for link in server.state.client.links:
        assert (link.num_requests, link.num_tokens) == (0, 0)


@pytest.mark.parametrize(("path", "fields"), ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_computation(
    start_server: Any, path: str, fields: dict[str, Any], stream: bool
) -> None:
    server = start_server(step_seconds=0.01)
    with raw_request(server, path, stream=stream, **fields) as connection:
        if stream:
            assert b" 200 " in connection.recv(100)
        prompts = fields.get("prompt")
        num_choices = fields.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
        server.until(lambda: server.engine.num_requests == num_choices, "all choices to run")
    assert_idle(server)
    assert sorted(server.engine.aborted) == sorted(added.request_id for added in server.engine.added)
    assert server.engine.num_steps < 150


def test_a_client_that_leaves_the_queue_is_forgotten(start_server: Any) -> None:
    server = start_server(step_seconds=0.01, max_num_seqs=1)
    with raw_request(server, "/v1/completions", prompt="The", stream=True) as running:
        assert b" 200 " in running.recv(100)
        for stream in (True, False):
            with raw_request(server, "/v1/completions", prompt="The", stream=stream):
                server.until(lambda: server.engine.num_requests == 2, "the second to wait")
            server.until(lambda: server.engine.num_requests == 1, "the second to be aborted")
    assert_idle(server)


def test_a_hundred_leavers_leave_nothing(start_server: Any) -> None:
    server = start_server(step_seconds=0.001)
    for index in range(100):
        with raw_request(server, "/v1/completions", prompt="The", stream=index % 2 == 0):
            if index % 3 == 0:
                server.until(lambda: server.engine.num_requests > 0, "the request to run")
    assert_idle(server)
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == " Paris."


def test_a_client_that_stops_reading_costs_one_buffer_and_no_other_request(start_server: Any) -> None:
    server = start_server(step_seconds=0.0, max_model_len=100_000)
    fields = {"prompt": "The", "stream": True, "logprobs": 5, "max_tokens": 20_000}
    with raw_request(server, "/v1/completions", **fields) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert b" 200 " in connection.recv(100)
        for _ in range(3):
            assert server.complete(max_tokens=2).json()["choices"][0]["text"] == " Paris."
        server.until(lambda: server.engine.num_requests == 0, "the engine to finish without the reader")
    assert_idle(server)


def test_a_slow_reader_gets_everything(start_server: Any, events: Events) -> None:
    server = start_server(step_seconds=0.0, max_model_len=100_000)
    fields = {"prompt": "The", "stream": True, "max_tokens": 5000, "logprobs": 0}
    with raw_request(server, "/v1/completions", **fields) as connection:
        server.until(lambda: server.engine.num_steps >= 5000, "the engine to be done")
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(1 << 20)
    body = received.split(b"\r\n\r\n", 1)[1]
    text = "".join(json.loads(f'"{part}"') for part in _texts(body.decode()))
    assert text == " Paris.\n\n" * 1250


def _texts(body: str) -> list[str]:
    return [part.split('","logprobs"')[0] for part in body.split('"text":"')[1:]]


def test_a_dead_engine_ends_streams_with_an_error_event(start_server: Any, events: Events) -> None:
    server = start_server(step_seconds=0.01)
    body = {"model": "m", "prompt": "The", "stream": True, **LONG}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.on_loop(lambda: server.state.client.mark_dead(0, "rank 1 was killed by signal 9"))
        rest = [line for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "rank 1 was killed by signal 9" in error["message"]
    assert "data: [DONE]" not in rest


def test_a_dead_engine_fails_what_is_not_streamed_and_what_comes_next(start_server: Any) -> None:
    server = start_server(step_seconds=0.01)
    replies: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: replies.append(server.complete(n=2, **LONG)))
    waiting.start()
    server.until(lambda: server.engine.num_requests == 2, "the request to run")
    server.on_loop(lambda: server.state.client.mark_dead(0, "out of memory"))
    waiting.join(10)
    for reply in (replies[0], server.complete()):
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert reply.json()["error"]["type"] == "server_error"
    assert "out of memory" in replies[0].json()["error"]["message"]
    for probe in ("/readyz", "/health"):
        assert server.http.get(probe).status_code == 503
    assert server.http.get("/livez").status_code == 200


def test_what_outlasts_a_drain_ends_with_an_error_event(start_server: Any) -> None:
    server = start_server(step_seconds=0.01)
    with raw_request(server, "/v1/chat/completions", **CHAT, stream=True) as connection:
        assert b" 200 " in connection.recv(100)
        server.on_loop(lambda: server.state.client.fail_all("the server is shutting down"))
        received = b""
        while b"server_error" not in received:
            received += connection.recv(65536)
    assert b"the server is shutting down" in received
    assert_idle(server)


def test_while_draining_running_requests_go_on_and_new_ones_do_not(start_server: Any, events: Events) -> None:
    server = start_server(step_seconds=0.005)
    texts: list[str] = []
    body = {"stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}
    running = threading.Thread(target=lambda: texts.append(server.complete(**body).text))
    running.start()
    server.until(lambda: server.engine.num_requests == 1, "the request to run")
    server.on_loop(server.state.start_draining)
    reply = httpx.post(f"{server.url}/v1/completions", json={"model": "m", "prompt": "a"})
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert "shutting down" in reply.json()["error"]["message"]
    assert httpx.get(f"{server.url}/readyz").status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200
    running.join(10)
    *_, usage, done = events(texts[0])
    assert done is None
    assert usage["usage"]["completion_tokens"] == 40


def test_a_drain_does_not_wait_for_bodies(start_server: Any) -> None:
    server = start_server()
    host, port = server.url.removeprefix("http://").split(":")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            server.until(lambda: len(server.state.body_timeouts) == 1, "the request to wait for its body")
            server.on_loop(server.state.start_draining)
            said = b""
            while not said.endswith(b"}}"):
                said += connection.recv(65536)
        server.state.draining = False
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in said
        assert b"shutting down" in said
        server.until(lambda: not server.state.body_timeouts, "its end")


def test_a_request_that_is_cancelled_at_the_end_is_told_so() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def scenario(app: Any) -> None:
        task = asyncio.ensure_future(ErrorBoundary(app)({"type": "http"}, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(scenario(hang))
    assert sent[0]["status"] == 503
    assert b"shutting down" in sent[1]["body"]
    sent.clear()
    asyncio.run(scenario(stream))
    assert [message["type"] for message in sent] == ["http.response.start"]


def test_while_loading_the_server_is_alive_and_not_ready(start_server: Any) -> None:
    server = start_server(engine=False, model=None)
    assert server.http.get("/livez").status_code == 200
    for reply in (server.http.get("/readyz"), server.complete(), server.chat(), server.http.post("/tokenize")):
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert "loading" in reply.text
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_a_stalled_engine_fails_health_and_nothing_else(start_server: Any) -> None:
    server = start_server(stall_timeout=0.2)
    assert server.http.get("/health").status_code == 200
    server.engine.pause()
    with raw_request(server, "/v1/completions", prompt="The"):
        server.until(lambda: server.http.get("/health").status_code == 503, "the stall to be noticed")
        assert "finished no step" in server.http.get("/health").json()["reason"]
        assert server.http.get("/readyz").status_code == 200
        server.engine.resume()
        server.until(lambda: server.http.get("/health").status_code == 200, "the recovery to be noticed")


def test_a_restarted_engine_serves_again(start_server: Any) -> None:
    server = start_server(engine=True)
    server.engine.stop()
    server.on_loop(lambda: server.state.client.mark_dead(0, "killed"))
    assert server.complete().status_code == 503
    with type(server.engine)(server.run_directory, lambda request: iter([5] * 9), incarnation=2):
        server.until(lambda: server.http.get("/readyz").status_code == 200, "the new engine to be ready")
        assert server.complete(max_tokens=3).status_code == 200
