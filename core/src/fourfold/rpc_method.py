"""How a method travels to a worker: by its name, or as ``module:qualname`` of an importable function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

from fourfold.contracts.executor import Method
from fourfold.errors import ConfigError


def method_name(method: Method) -> str:
    """The text that travels for ``method``.

    Raises ConfigError for what a worker could not import: lambdas, closures, bound methods, functions of ``__main__``.
    """
    if isinstance(method, str):
        return method
    module = getattr(method, "__module__", None)
    name = getattr(method, "__qualname__", None)
    if not module or not name or not callable(method):
        raise ConfigError(f"{method!r} cannot travel to the workers; pass a method's name or a function of a module")
    where = f"{module}:{name}"
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "defined inside another function"
        raise ConfigError(f"{where} is {kind} and cannot travel to the workers; define it at the top of a module")
    if module == "__main__":
        raise ConfigError(f"{where} is in the program itself, which workers do not import; move it to a module")
    try:
        found = resolve_name(where)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where} cannot be imported by the workers: {error}") from error
    if found is not method:
        raise ConfigError(f"{where} is another object when imported; pass the function that has this name")
    return where


def bind_method(worker: object, name: str) -> Callable[..., Any]:
    """What ``name`` calls on ``worker``: its own method, or an imported function with the worker as first argument.

    Raises AttributeError or ImportError when there is no such thing.
    """
    if ":" in name:
        return partial(resolve_name(name), worker)
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(found):
        raise AttributeError(f"the worker has no method {name!r}")
    bound: Callable[..., Any] = found
    return bound
