"""Reads YAML whose top level has every key once. Imported only by who reads a file."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """The content. Raises yaml.YAMLError, also for a key that is there twice: the last would win without a word."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    seen: set[str] = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        name = str(key.value)
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"{name!r} is there twice", problem_mark=key.start_mark)
        seen.add(name)
    return yaml.safe_load(text)
