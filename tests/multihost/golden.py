"""What the embedded model is asked on hosts, and what it must say."""

from __future__ import annotations

from typing import Any, Final

from fourfold.testing.golden import CHATS, COMPLETIONS

_GREEDY: Final[dict[str, Any]] = {"model": "smollm2", "temperature": 0}
BODIES: Final = [
    {**_GREEDY, "prompt": prompt, "max_tokens": tokens} for prompt, _, tokens, _ in COMPLETIONS.values()
] + [
    {**_GREEDY, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}
    for question, _, tokens, _ in CHATS.values()
]
TEXTS: Final = [text for _, _, _, text in COMPLETIONS.values()] + [text for _, _, _, text in CHATS.values()]
LONG: Final[dict[str, Any]] = {"model": "smollm2", "max_tokens": 120, "ignore_eos": True, "temperature": 0.8}
