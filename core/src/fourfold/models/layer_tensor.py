"""A checkpoint tensor of a layer that is more than one product, as its table names it."""

from __future__ import annotations

from typing import NamedTuple


class LayerTensor(NamedTuple):
    """One tensor."""

    parameter: str
    """The layer's own name of it."""
    shape: tuple[int, ...]
    """Before any cut."""
