"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """What one piece of text brought."""

    text: str
    """Characters that are safe to show."""
    match: str | None
    """The stop string that the piece completed; nothing may be pushed after it."""


class StopStrings:
    """The stop strings of one output.

    The output ends with the first token that completes a stop string; of several completed by the same token the one
    that starts earliest counts, of those the shortest; the order of the list changes nothing. Each pattern is followed
    by its Knuth-Morris-Pratt automaton: time is linear in the text, whatever the patterns.
    """

    __slots__ = ("_held", "_include", "_patterns")

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """``include``: a matched stop string is part of the text."""
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stop)]
        self._include = include
        self._held = ""

    @property
    def any(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._patterns)

    def push(self, text: str) -> Released:
        """Text of one more token."""
        if not self._patterns or not text:
            return Released(text, None)
        best: tuple[int, int, str] | None = None
        for pattern in self._patterns:
            end = pattern.advance(text)
            if end is not None:
                start = len(self._held) + end - len(pattern.text)
                candidate = (start, len(pattern.text), pattern.text)
                best = candidate if best is None else min(best, candidate)
        text = self._held + text
        if best is not None:
            self._held = ""
            start, length, match = best
            return Released(text[: start + length if self._include else start], match)
        held = max(pattern.matched for pattern in self._patterns)
        self._held = text[len(text) - held :]
        return Released(text[: len(text) - held], None)

    def skip(self, text: str) -> str:
        """Text in which nothing matches, and into which no later match reaches back; returns it and all held text."""
        text = self._held + text
        self._held = ""
        for pattern in self._patterns:
            pattern.matched = 0
        return text

    def finish(self) -> str:
        """The held text, at the end of the output."""
        return self.skip("")


class _Pattern:
    """One stop string and how much of it the text so far ends with."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _fallbacks(text)

    def advance(self, piece: str) -> int | None:
        """The index in ``piece`` just after the first match; None: no match ends in it."""
        text, fallback, matched = self.text, self._fallback, self.matched
        if matched == 0 and text[0] not in piece:
            return None
        for index, character in enumerate(piece):
            while matched and text[matched] != character:
                matched = fallback[matched]
            if text[matched] == character:
                matched += 1
                if matched == len(text):
                    self.matched = 0
                    return index + 1
        self.matched = matched
        return None


def _fallbacks(text: str) -> list[int]:
    """At index k the length of the longest proper prefix that the first k characters end with."""
    fallback = [0, 0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = fallback[matched]
        if text[matched] == character:
            matched += 1
        fallback.append(matched)
    return fallback
