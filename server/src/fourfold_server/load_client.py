"""Loads an OpenAI-compatible server with completions, times what comes back, and spends little itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fourfold.errors import EngineError
from fourfold_server.client_errors import describe_answer, describe_connection

_STREAM_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server, and how to talk to it."""

    url: str
    """As ``read_url`` returns it."""
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds for one request."""

    @property
    def secure(self) -> bool:
        """Whether over TLS."""
        return self.url.startswith("https:")


@dataclass(kw_only=True, slots=True)
class Timing:
    """One request, in seconds of ``time.perf_counter``."""

    start: float
    end: float = 0.0
    events: list[float] = field(default_factory=list)
    """When each part of the text came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


async def complete_all(target: Target, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Timing]:
    """Send streaming completions, ``concurrency`` at a time, in order; failures are in ``Timing.error``."""
    slots = asyncio.Semaphore(concurrency)

    async def run(body: dict[str, Any]) -> Timing:
        async with slots:
            timing = Timing(start=time.perf_counter())
            try:
                async with asyncio.timeout(target.timeout):
                    await _complete(target, body, timing)
            except TimeoutError:
                timing.error = f"no end of the answer within {target.timeout:g} s"
            except (OSError, asyncio.IncompleteReadError) as error:
                timing.error = describe_connection(error, secure=target.secure)
            except EngineError as error:
                timing.error = str(error)
            timing.end = time.perf_counter()
            return timing

    return list(await asyncio.gather(*map(run, bodies)))


async def first_model(target: Target) -> str:
    """The first model that the server serves. Raises EngineError."""
    try:
        async with asyncio.timeout(target.timeout), _request(target, "GET", "/v1/models", b"") as lines:
            text = b"".join([line async for line in lines])
        name: str = json.loads(text)["data"][0]["id"]
    except TimeoutError as error:
        raise EngineError(f"cannot learn the model from {target.url}: no answer in {target.timeout:g} s") from error
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{target.url}/v1/models lists no model; is it an OpenAI-compatible server?") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        problem = describe_connection(error, secure=target.secure)
        raise EngineError(f"cannot reach a server at {target.url}: {problem}") from error
    return name


async def _complete(target: Target, body: dict[str, Any], timing: Timing) -> None:
    async with _request(target, "POST", "/v1/completions", json.dumps(body).encode()) as lines:
        async for line in lines:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineError(event["error"]["message"])
            if event.get("choices"):
                timing.events.append(now)
            if usage := event.get("usage"):
                timing.prompt_tokens, timing.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not timing.output_tokens:
        raise EngineError("the answer ended without its usage")


@contextlib.asynccontextmanager
async def _request(target: Target, method: str, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    """One request on a connection of its own; gives the lines of a reply with status 200."""
    parts = urlsplit(target.url)
    secure = ssl.create_default_context() if target.secure else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, limit=_STREAM_LIMIT, ssl=secure)
    try:
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status, headers = await _read_head(reader)
        lines = _lines(_chunks(reader) if headers.get("transfer-encoding") == "chunked" else _whole(reader))
        if status != 200:
            raise EngineError(describe_answer(status, b"\n".join([line async for line in lines])))
        yield lines
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        status = int(head[0].split()[1])
    except (IndexError, ValueError):
        raise EngineError(f"{head[0]!r} is no HTTP reply") from None
    fields = (line.partition(":") for line in head[1:] if line)
    return status, {name.lower(): value.strip().lower() for name, _, value in fields}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _whole(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(_STREAM_LIMIT):
        yield part


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
