"""HTTP/1.1 on one connection: refuses what is no HTTP as an OpenAI error, and ignores wishes for other protocols."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from fourfold.errors import RequestError
from fourfold_server.errors import error_body

MAX_HEAD_BYTES = 65536
"""Of a request line with its headers, apart from what comes with the first piece of it."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on headers, and with the body of a request that offers an upgrade.

    Some clients, Java's among them, offer HTTP/2 with every request. Whoever does not take the offer answers as if it
    had not been made, but the parser takes what follows the headers for the other protocol.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent."""
        self._unset_keepalive_if_required()
        within_head = self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(RequestError("the request is no HTTP/1.1"))
            return
        if within_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(RequestError(f"the headers have more than {MAX_HEAD_BYTES} bytes", status=431))

    def on_message_begin(self) -> None:
        """As the parser says."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """As the parser says."""
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """As the parser says."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the same request again without its offer; ``rest`` is what follows its headers."""
        method: bytes = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(RequestError("this server is no proxy"))
            return
        version = self.parser.get_http_version().encode()
        head = [method + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.lower().split(b","))
                head.append(b"connection: " + b", ".join(token for token in tokens if token != b"upgrade"))
            elif name != b"upgrade":
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # older versions are lenient without being told
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def _refuse(self, error: RequestError) -> None:
        """Hang up, after an answer unless it would be taken for that to an earlier request."""
        cycle = self.cycle
        at_fault = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or at_fault:
            body = error_body(error)
            headers = (
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
            )
            self.transport.write(STATUS_LINE[error.status] + b"\r\n".join([*headers, b"", body]))
        self.transport.close()
