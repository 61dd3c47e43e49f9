"""Renders chat messages with a model's jinja2 template and tokenizes the result. Knows no HTTP and checks no roles.

The template may write special tokens; the people who chat may not. Before rendering, every special token that stands in
a string of theirs is replaced by a mark made of private-use characters and a number that nobody can guess, so that
templates which trim or search their content see it otherwise unchanged. After rendering, the text is cut at the special
tokens, which now all come from the template; the marks turn back into text; and what lies between is encoded with
special tokens treated as plain text. Chats without such strings, nearly all, are encoded in one piece.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fourfold.checkpoints.json_file import read_json
from fourfold.contracts.tokenizer import Tokenizer
from fourfold.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One model's template; safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """``special_tokens`` are the names that templates use, such as ``bos_token``. Raises ConfigError."""
        self.source = source
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._pattern = _alternatives(_special_texts(tokenizer))
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. ``continue_final_message`` ends it within the last message, for the model to go on.

        Raises RequestError when the template refuses the messages or fails on them.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables or {})
        end = f"\ue000{secrets.token_hex(8)}\ue001"
        last = {**messages[-1], "content": str(messages[-1].get("content") or "") + end}
        text = self._render([*messages[:-1], last], False, variables or {})
        head, mark, _ = text.rpartition(end)
        if not mark:
            raise RequestError(
                "the chat template drops the final message's content, so it cannot be continued",
                parameter="continue_final_message",
            )
        return head

    def encode(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids; special tokens in messages and variables are plain text. Raises RequestError."""
        shield = _Shield(self._pattern)
        text = self.render(
            shield.cover(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=shield.cover(variables),
        )
        if not shield.covered:
            return self._tokenizer.encode(text, add_special_tokens=False)
        token_ids: list[int] = []
        # The pattern is one group, so that split returns the special tokens at odd places.
        for place, part in enumerate(self._pattern.split(text)):
            if part:
                token_ids += self._tokenizer.encode(
                    shield.uncover(part), add_special_tokens=False, parse_special=place % 2 == 1
                )
        return token_ids

    def _render(self, messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        names = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except _Refused as error:
            raise RequestError(f"the chat template refuses the messages: {error}", parameter="messages") from error
        except Exception as error:
            # A template is a program: on messages that it was not made for it may fail with any exception.
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", parameter="messages"
            ) from error


def load_chat_template(folder: Path, tokenizer: Tokenizer, *, override: str | None = None) -> ChatTemplate | None:
    """The template of a prepared checkpoint folder, or that in the file ``override``; None: the model has none."""
    settings = _read_json(folder / "tokenizer_config.json")
    source: str | None
    if override is not None:
        source = _read_override(Path(override))
    elif (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        source = _default_template(settings.get("chat_template"))
    if not source:
        return None
    tokens = {**_read_json(folder / "special_tokens_map.json"), **settings}
    texts = {name: _token_text(value) for name, value in tokens.items() if name.endswith("_token")}
    return ChatTemplate(
        source, tokenizer, special_tokens={name: text for name, text in texts.items() if text is not None}
    )


class _Refused(jinja2.TemplateError):
    """A template called raise_exception."""


class _Shield:
    """Marks that stand for special tokens in strings which are not the template's."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.covered: list[str] = []
        """The special tokens found; a mark names one by its place here."""
        self._pattern = pattern
        self._number = secrets.token_hex(8)

    def cover(self, value: Any) -> Any:
        """``value`` with special tokens replaced by marks in every string."""
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """``text`` with marks turned back into what they stand for."""
        return re.sub(f"\ue000{self._number}([0-9]+)\ue001", lambda match: self.covered[int(match[1])], text)

    def _mark(self, match: re.Match[str]) -> str:
        self.covered.append(match[0])
        return f"\ue000{self._number}{len(self.covered) - 1}\ue001"


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; serving renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Plain JSON, unlike jinja2's own filter, which escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    """Longest first: of two special tokens that begin alike the longer one is meant."""
    texts = {tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokenizer.special_token_ids}
    return sorted(texts - {""}, key=lambda text: (-len(text), text))


def _alternatives(texts: Sequence[str]) -> re.Pattern[str]:
    """One group that matches any of ``texts``; nothing if there are none."""
    return re.compile(f"({'|'.join(map(re.escape, texts)) if texts else '(?!)'})")


def _default_template(value: Any) -> str | None:
    """``chat_template`` is a string, or a list of named ones of which ``default`` is meant."""
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, Mapping) and item.get("name") == "default"]
        value = named[-1].get("template") if named else None
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    """Special tokens are strings, or objects with a ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_override(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {str(path)!r} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
