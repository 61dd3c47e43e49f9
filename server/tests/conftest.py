"""A server on a real socket, in a thread, over an engine without a model."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from fourfold.balancers.least_work import LeastWork
from fourfold.client.engine_client import EngineClient
from fourfold.entries import LoadBalancerContext
from fourfold.messages import AddRequest
from fourfold.testing.fake_engine import FakeEngine
from fourfold.testing.fake_tokenizer import FakeTokenizer
from fourfold.text.chat_template import ChatTemplate
from fourfold.text.served_model import ServedModel
from fourfold_server.app import create_app
from fourfold_server.config import ServerConfig
from fourfold_server.http_protocol import HttpProtocol
from fourfold_server.state import ServerState

TOKENIZER = FakeTokenizer(["The", " capital", " of", " France", " is", " Paris", "DEF", "GH"])
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = ServedModel(
    tokenizer=TOKENIZER,
    chat_template=ChatTemplate(CHATML, TOKENIZER),
    eos_token_ids=(2,),
    vocabulary_size=TOKENIZER.vocabulary_size,
)
DEADLINE = 15.0


@dataclass
class Server:
    """What tests use of a running server."""

    url: str
    http: httpx.Client
    state: ServerState
    loop: asyncio.AbstractEventLoop
    run_directory: Path
    engine: FakeEngine | None = None
    tokenizer: FakeTokenizer = field(default_factory=lambda: TOKENIZER)

    def complete(self, prompt: Any = "The capital of France is", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def on_loop(self, function: Callable[[], None]) -> None:
        """Run something in the server's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(DEADLINE)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE:g} s: {what}"
            time.sleep(0.002)


def events_of(text: str) -> list[Any]:
    """The events of a stream; ``[DONE]`` as None."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [None if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@pytest.fixture
def events() -> Callable[[str], list[Any]]:
    return events_of


def paris(request: AddRequest) -> Iterable[int]:
    """The capital's name for ever."""
    return itertools.cycle(TOKENIZER.encode(" Paris.\n\n"))


def says(text: str, *, end: bool = False) -> Callable[[AddRequest], Iterable[int]]:
    """A script of one text, then eos or the text again."""
    token_ids = TOKENIZER.encode(text)
    return lambda request: iter([*token_ids, 2]) if end else itertools.cycle(token_ids)


StartServer = Callable[..., Server]


def _starter(stack: ExitStack) -> StartServer:
    def start(
        script: Callable[[AddRequest], Iterable[int]] | str = paris,
        config: ServerConfig | None = None,
        *,
        engine: bool = True,
        model: ServedModel | None = MODEL,
        stall_timeout: float = 60.0,
        first_rank: int = 0,
        end: bool = False,
        **engine_options: Any,
    ) -> Server:
        run_directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fourfold-")))
        server = _start(stack, run_directory, config or ServerConfig(), stall_timeout, first_rank)
        server.state.model = model
        if engine:
            answering = says(script, end=end) if isinstance(script, str) else script
            server.engine = stack.enter_context(FakeEngine(run_directory, answering, **engine_options))
            server.until(lambda: server.state.client.max_model_len is not None, "the engine to be ready")
        return server

    return start


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """``start_server(script or text, config, engine=..., **engine options)``; all end with the test."""
    with ExitStack() as stack:
        yield _starter(stack)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield _starter(stack)()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """One for all tests of a module, which leave nothing behind in it."""
    engine = shared_server.engine
    assert engine is not None
    shared_server.until(lambda: engine.num_requests == 0, "the engine to be idle")
    engine.added.clear()
    engine.aborted.clear()
    return shared_server


def _start(
    stack: ExitStack, run_directory: Path, config: ServerConfig, stall_timeout: float, first_rank: int
) -> Server:
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    made: list[tuple[ServerState, asyncio.AbstractEventLoop, uvicorn.Server]] = []

    async def serve() -> None:
        balancer = LeastWork(LoadBalancerContext(num_engines=1))
        client = EngineClient(run_directory, 0, 1, balancer, first_rank=first_rank)
        await client.start()
        state = ServerState(
            config=config,
            client=client,
            served_names=("m", "alias"),
            topology=lambda: {"processes": []},
            stall_timeout=stall_timeout,
        )
        http = uvicorn.Server(
            uvicorn.Config(
                create_app(state),
                http=HttpProtocol,
                ws="none",
                loop="none",
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        made.append((state, asyncio.get_running_loop(), http))
        ready.set()
        try:
            await http.serve(sockets=[listener])
        finally:
            client.close()
            state.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
    thread.start()
    assert ready.wait(DEADLINE)
    state, loop, http = made[0]

    def stop() -> None:
        http.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive()

    stack.callback(stop)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE))
    return Server(url=url, http=client, state=state, loop=loop, run_directory=run_directory)
