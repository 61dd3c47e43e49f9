"""The linear method around another one that adds what LoRA adapters do to some of the tokens.

T is tokens of a step, r an adapter's rank. An adapter is cut as the layer is, by the layer itself: where a layer stores
rows of its weight it stores the same rows of B [out, r], where it stores columns the same columns of A [r, in]. What a
rank adds is then its part of the whole, and the sum over the ranks is that of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from fourfold.contracts.linear_method import LinearMethod, LinearWeight

Rows = Sequence[tuple[int, torch.Tensor | None]]
"""(slot of an adapter, int64 numbers of its tokens); None: all tokens."""


class _Part(NamedTuple):
    """What an adapter adds to some outputs of a weight."""

    first_row: int
    a: torch.Tensor
    """[r, in]"""
    b: torch.Tensor
    """[outputs, r], with the scale in it."""


class AdaptedWeight:
    """The plain method's weight, and what adapters add to it."""

    __slots__ = ("parts", "plain")

    def __init__(self, plain: LinearWeight) -> None:
        self.plain = plain
        self.parts: dict[int, list[_Part]] = {}
        """By the adapter's slot."""

    @property
    def out_features(self) -> int:
        """Of the plain weight."""
        return self.plain.out_features

    @property
    def in_features(self) -> int:
        """Of the plain weight."""
        return self.plain.in_features


class _Arriving(NamedTuple):
    """The adapter that is being stored, and the matrix that layers do not cut; the other one comes through them."""

    slot: int
    whole_a: torch.Tensor | None
    whole_b: torch.Tensor | None


class LoraLinearMethod:
    """See the contract for each method; without adapters in a step it is the plain method."""

    def __init__(self, plain: LinearMethod, *, device: torch.device, dtype: torch.dtype) -> None:
        self.rows: Rows = ()
        """Which tokens of the step at hand belong to which adapter."""
        self._plain = plain
        self._device = device
        self._dtype = dtype
        self._weights: list[AdaptedWeight] = []
        self._arriving: _Arriving | None = None

    def create(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> AdaptedWeight:
        """Without adapters."""
        weight = AdaptedWeight(self._plain.create(in_features, out_features, bias=bias, dtype=dtype))
        self._weights.append(weight)
        return weight

    @contextmanager
    def storing(
        self, slot: int, *, whole_a: torch.Tensor | None = None, whole_b: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Meanwhile what layers store are parts of an adapter: of B where A is given here, of A where B is."""
        self._arriving = _Arriving(slot, whole_a, whole_b)
        try:
            yield
        finally:
            self._arriving = None

    def drop(self, slot: int) -> None:
        """Forget an adapter; nothing happens if there is none."""
        for weight in self._weights:
            weight.parts.pop(slot, None)

    def load_shard(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Pass on, or keep as an adapter's part."""
        adapted = _adapted(weight)
        arriving = self._arriving
        if arriving is None:
            self._plain.load_shard(adapted.plain, tensor, first_row=first_row)
        elif arriving.whole_a is not None:
            self._keep(adapted, arriving.slot, first_row, arriving.whole_a, tensor)
        elif arriving.whole_b is not None:
            self._keep(adapted, arriving.slot, 0, tensor, arriving.whole_b)

    def _keep(self, weight: AdaptedWeight, slot: int, first_row: int, a: torch.Tensor, b: torch.Tensor) -> None:
        # Copies: what comes may be a mapped file, or a part of something larger.
        a, b = (matrix.to(self._device, self._dtype, copy=True).contiguous() for matrix in (a, b))
        weight.parts.setdefault(slot, []).append(_Part(first_row, a, b))

    def load_bias(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Pass on."""
        self._plain.load_bias(_adapted(weight).plain, tensor, first_row=first_row)

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain product, and for each adapter's tokens ``(x @ A^T) @ B^T`` on top, in the dtype of ``x``."""
        adapted = _adapted(weight)
        out = self._plain.apply(adapted.plain, x, out_dtype=out_dtype)
        for slot, rows in self.rows:
            parts = adapted.parts.get(slot)
            if parts:
                _add(out, x if rows is None else x.index_select(0, rows), rows, parts)
        return out

    def embed(self, weight: LinearWeight, token_ids: torch.Tensor, *, first_id: int | None = None) -> torch.Tensor:
        """Pass on: vocabularies are not adapted."""
        return self._plain.embed(_adapted(weight).plain, token_ids, first_id=first_id)


def _add(out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor | None, parts: Sequence[_Part]) -> None:
    for part in parts:
        added = ((x @ part.a.t()) @ part.b.t()).to(out.dtype)
        target = out.narrow(1, part.first_row, part.b.shape[0])
        if rows is None:
            target += added
        else:
            target.index_add_(0, rows, added)


def _adapted(weight: LinearWeight) -> AdaptedWeight:
    if not isinstance(weight, AdaptedWeight):
        raise TypeError(f"the LoRA linear method got a weight of {type(weight).__name__}, which it did not create")
    return weight
