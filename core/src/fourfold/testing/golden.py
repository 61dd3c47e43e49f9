"""What the embedded model says, greedily and at float32, in every layout. Cases by name."""

from __future__ import annotations

from typing import Final, NamedTuple


class Golden(NamedTuple):
    """A question and its answer."""

    prompt: str
    """Of a completion, or the user's message of a chat."""
    prompt_tokens: int
    max_tokens: int
    text: str


_ALPHABET: Final = "DEFGHIJKLMNOPQRSTUVWXYZ\n\n"
_HI: Final = "Hello there! I'm here to help with any kind of creative writing project. What can I help you with?"

COMPLETIONS: Final = {
    "G1": Golden("The capital of France is", 5, 4, " Paris.\n\n"),
    "G2": Golden("1, 2, 3, 4, 5,", 14, 12, " 6, 7, 8, 9,"),
    "G3": Golden("Here is the English alphabet: ABC", 7, 16, _ALPHABET),
    "G4": Golden("♥" * 12, 24, 14, "♥" * 7),
    "G5": Golden("1. 日本\n2. 日本\n3. 日本\n4. 日本\n5.", 30, 14, " 日本\n6. 日本\n7."),
    "G6": Golden(" ".join(["你好"] * 6), 29, 10, " 你好 你好"),
}
CHATS: Final = {
    "G7": Golden("What is the capital of France?", 37, 8, "The capital of France is Paris."),
    "G8": Golden("Say hi.", 33, 24, _HI),
}
