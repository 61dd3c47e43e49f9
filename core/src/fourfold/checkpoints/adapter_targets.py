"""Which modules an adapter's config says that it adapts, as PEFT reads it. Knows neither tensors nor shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from fourfold.errors import CheckpointError

_ALL: Final = "all-linear"
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")


def named_modules(values: Mapping[str, Any], modules: Collection[str], *, where: str) -> set[str]:
    """Those of ``modules``, a model's linear layers, that the config ``values`` name; all where it does not say which.

    Raises CheckpointError, with the file ``where`` it stands, for a setting that says nothing.
    """
    targets = values.get("target_modules")
    named = set(modules)
    if targets is not None and targets != _ALL:
        named = _matching(targets, modules, f"{where} has target_modules")
        if isinstance(targets, list):  # a pattern says by itself which layers it means
            named &= _in_layers(values.get("layers_to_transform"), modules, where)
    excluded = values.get("exclude_modules")
    return named - _matching(excluded, modules, f"{where} has exclude_modules") if excluded else named


def _matching(wanted: Any, modules: Collection[str], what: str) -> set[str]:
    """Modules that a pattern is the whole name of, or that one of a list is the end of."""
    if isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except (re.error, RecursionError) as error:
            raise CheckpointError(f"{what}: {wanted!r:.100}, which is no pattern: {error}") from error
        return {module for module in modules if pattern.fullmatch(module)}
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        raise CheckpointError(f"{what}: {wanted!r:.100}; a list of names, or a pattern")
    endings = tuple(f".{one}" for one in wanted)
    return {module for module in modules if f".{module}".endswith(endings)}


def _in_layers(layers: Any, modules: Collection[str], where: str) -> set[str]:
    if layers is None or layers == []:
        return set(modules)
    numbers = layers if isinstance(layers, list) else [layers]
    if not all(type(number) is int for number in numbers):
        raise CheckpointError(f"{where} has layers_to_transform: {layers!r:.100}; a list of layer numbers")
    found = ((module, _LAYER.search(module)) for module in modules)
    return {module for module, layer in found if layer is not None and int(layer[1]) in numbers}
