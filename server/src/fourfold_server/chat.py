"""`fourfold chat`: talks to a server over its API, streaming; with a model, starts a server of its own for the time."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from fourfold.errors import ConfigError, EngineError, FourfoldError
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold_server.client_errors import describe_answer, describe_connection
from fourfold_server.server_url import read_url

if TYPE_CHECKING:
    import httpx

_HELP = "/system TEXT sets the system prompt, /reset forgets the conversation, /exit leaves; Ctrl-C stops an answer"
_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 300.0
"""Seconds between two parts of an answer."""
_START_TIMEOUT = 600.0
_STOP_TIMEOUT = 10.0


@dataclass(kw_only=True, slots=True)
class Conversation:
    """What was said, and how answers are asked for."""

    url: str
    api_key: str | None
    temperature: float
    max_tokens: int | None
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def body(self, model: str) -> dict[str, Any]:
        """The request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {
            "model": model,
            "messages": [*system, *self.turns],
            "temperature": self.temperature,
            "stream": True,
            **limit,
        }


def build_command() -> click.Command:
    """The command."""

    @click.command(
        "chat",
        help="Chat with a model in the terminal. Without MODEL it talks to the server at --url; with MODEL it starts "
        "one of its own, which takes SERVE_OPTIONS (those of `fourfold serve`), and ends it afterwards.",
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("model", required=False)
    @click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
    @click.option("--url", help="The server to talk to. [default: http://127.0.0.1:8000]")
    @click.option("--api-key", envvar="FOURFOLD_API_KEY", help="The server's API key.")
    @click.option("--system", help="The system prompt.")
    @click.option("--temperature", type=float, default=0.7, show_default=True, help="0 takes the likeliest words.")
    @click.option("--max-tokens", type=int, help="Tokens of one answer at most.")
    def command(model: str | None, serve_options: tuple[str, ...], url: str | None, **settings: Any) -> None:
        if model is not None and model.startswith("-"):
            raise click.UsageError(f"No such option {model!r}; options of `fourfold serve` come after MODEL")
        if model is not None and url is not None:
            raise click.UsageError("give MODEL to start a server, or --url to talk to one that runs; not both")
        with contextlib.ExitStack() as stack:
            if model is not None:
                url = stack.enter_context(_own_server(model, serve_options))
            _talk(Conversation(url=read_url(url or "http://127.0.0.1:8000"), **settings))

    return command


@contextlib.contextmanager
def _own_server(model: str, serve_options: tuple[str, ...]) -> Iterator[str]:
    """A server that ends with the block, or with this process; gives its URL."""
    events: queue.SimpleQueue[bytes | ChildExit] = queue.SimpleQueue()
    arguments = ["serve", model, "--port", "0", "--log-level", "warning", *serve_options]

    def hear(child: ChildProcess, event: bytes | ChildExit) -> None:
        events.put(event)

    with ChildSupervisor() as supervisor:
        server = supervisor.start(
            ChildCommand(module="fourfold_server.cli", label="the server", arguments=arguments),
            on_report=hear,
            on_exit=hear,
        )
        try:
            event = events.get(timeout=_START_TIMEOUT)
        except queue.Empty:
            raise EngineError(f"{server} was not ready within {_START_TIMEOUT:g} s") from None
        if isinstance(event, ChildExit):  # it has said why
            kind = ConfigError if event.status == 2 else EngineError
            raise kind(f"the server {event}")
        yield json.loads(event)["url"]
        supervisor.close(grace=_STOP_TIMEOUT)


def _talk(conversation: Conversation) -> None:
    import httpx

    headers = {"Authorization": f"Bearer {conversation.api_key}"} if conversation.api_key else {}
    timeout = httpx.Timeout(_READ_TIMEOUT, connect=_CONNECT_TIMEOUT)
    with httpx.Client(base_url=conversation.url, headers=headers, timeout=timeout) as client:
        model = _first_model(client, conversation.url)
        click.echo(f"{model} at {conversation.url}\n{_HELP}", err=True)
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not _obey(conversation, line):
                    return
            elif line:
                _take_turn(client, conversation, model, line)


def _interactive() -> bool:
    """Whether somebody types; what comes through a pipe is a script, which a failure ends."""
    return sys.stdin.isatty()


def _read_line() -> str | None:
    """What the user types; None at the end."""
    if not _interactive():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo()
        return None


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a command; False ends the chat."""
    name, _, argument = line.partition(" ")
    if name == "/exit":
        return False
    if name == "/reset":
        conversation.turns.clear()
    elif name == "/system":
        conversation.system = argument.strip() or None
        conversation.turns.clear()
    else:
        click.echo(_HELP, err=True)
    return True


def _take_turn(client: httpx.Client, conversation: Conversation, model: str, question: str) -> None:
    conversation.turns.append({"role": "user", "content": question})
    answer = ""
    try:
        for part in _stream(client, conversation.body(model)):
            answer += part
            click.echo(part, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]")
    except FourfoldError as error:
        if answer:
            click.echo()
        if not _interactive():
            raise
        click.echo(f"Error: {error}", err=True)
    else:
        click.echo()
    if answer:
        conversation.turns.append({"role": "assistant", "content": answer})
    else:
        conversation.turns.pop()


def _first_model(client: httpx.Client, url: str) -> str:
    import httpx

    try:
        reply = client.get("/v1/models")
    except httpx.HTTPError as error:
        problem = describe_connection(error, secure=url.startswith("https:"))
        raise EngineError(f"cannot reach a server at {url}: {problem}") from error
    if reply.status_code != 200:
        raise EngineError(describe_answer(reply.status_code, reply.content))
    try:
        name: str = reply.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models lists no model; is it an OpenAI-compatible server?") from error
    return name


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The parts of an answer as they come. Raises EngineError."""
    import httpx

    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise EngineError(describe_answer(reply.status_code, reply.read()))
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _parts(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise EngineError(f"the connection broke: {describe_connection(error, secure=True)}") from error


def _parts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise EngineError(event["error"]["message"])
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            yield text
