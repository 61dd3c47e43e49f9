"""Reads the string under each field of a dataclass, so that help and documentation are written once."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from functools import cache
from typing import Any


def field_docs(owner: type[Any]) -> dict[str, str]:
    """Field name -> the string literal under it, on one line; fields without one are absent."""
    node = _class_node(owner)
    if node is None:
        return {}
    docs: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _string(below) is not None:
            docs[field.target.id] = inspect.cleandoc(_string(below) or "").replace("\n", " ")
    return docs


def _class_node(owner: type[Any]) -> ast.ClassDef | None:
    body: list[ast.stmt] = _tree(owner.__module__)
    node: ast.ClassDef | None = None
    for name in owner.__qualname__.split("."):
        if name == "<locals>":  # a class made inside a function; the function was found by its own name
            continue
        found = [one for one in body if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and one.name == name]
        if not found:
            return None
        node = found[0] if isinstance(found[0], ast.ClassDef) else None
        body = found[0].body
    return node


@cache
def _tree(module: str) -> list[ast.stmt]:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return []
    # linecache also reads modules that are not plain files
    return ast.parse("".join(linecache.getlines(file, vars(found)))).body


def _string(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None
