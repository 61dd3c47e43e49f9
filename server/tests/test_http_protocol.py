"""What clients may send on a connection besides well-formed requests."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from fourfold_server.http_protocol import MAX_HEAD_BYTES

BODY = b'{"prompt": "The capital"}'
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQC\r\n"
CLOSE = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def talk(server: Any, *pieces: bytes) -> bytes:
    """All that the server says until it hangs up."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        said = bytearray()
        while piece := connection.recv(65536):
            said += piece
    return bytes(said)


def refusal(said: bytes, status: int) -> dict[str, Any]:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), said
    assert b"content-type: application/json" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"FOO /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\na: b\x00c\r\n\r\n",
        b"CONNECT example.org:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: -3\r\n\r\n" + BODY,
        POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
        POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_refused_with_an_error_object(server: Any, sent: bytes) -> None:
    refusal(talk(server, sent), 400)
    assert server.complete(max_tokens=1).status_code == 200


def test_an_offer_of_another_protocol_is_ignored(server: Any) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    for request in (
        [POST + OFFER + LENGTH + b"\r\n" + BODY],
        [POST, OFFER + LENGTH + b"\r\n", BODY],
        [POST + OFFER + chunked],
    ):
        said = talk(server, *request, CLOSE)
        assert said.startswith(b"HTTP/1.1 200 "), said
        assert b'"count":2' in said
        assert said.endswith(b'{"status":"alive"}')
    websocket = b"GET /livez HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert talk(server, websocket).endswith(b'{"status":"alive"}')


def test_headers_are_bounded(server: Any) -> None:
    """In one header or in many; those of a later request on the same connection too."""
    start = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
    piece = b"a: b\r\n" * 1000
    # The first piece is not counted, and a transport may read several of ours as one.
    pieces = [piece] * ((MAX_HEAD_BYTES + 500_000) // len(piece))
    host, port = server.url.removeprefix("http://").split(":")
    for first in (b"", start + b"\r\n"):
        for more in (pieces, [b"a: ", *([b"b" * 6000] * len(pieces))]):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(first + start)
                said = b""
                try:
                    for part in more:
                        connection.sendall(part)
                    while b"431" not in said and (got := connection.recv(65536)):
                        said += got
                except ConnectionError:
                    pass  # it hung up on us while we were sending
                else:
                    assert b"HTTP/1.1 431 " in said
    assert talk(server, start + pieces[0] + CLOSE.split(b"\r\n", 2)[2]).endswith(b'{"status":"alive"}')


def test_an_answer_on_its_way_is_not_mixed_with_a_refusal(start_server: Any) -> None:
    server = start_server(step_seconds=0.01)
    body = json.dumps({"model": "m", "prompt": "The", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        said = connection.recv(65536)
        connection.sendall(b"garbage\r\n\r\n")
        while piece := connection.recv(65536):
            said += piece
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b" 400 " not in said
    server.until(lambda: server.engine.num_requests == 0, "the abort")
