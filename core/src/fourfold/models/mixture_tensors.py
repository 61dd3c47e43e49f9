"""The tensors of a layer of experts: this project's names of them, and the other names and shapes of checkpoints.

A reader of a checkpoint with any of these becomes one with a tensor for each matrix of each expert. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fourfold.errors import CheckpointError
from fourfold.models.layer_tensor import LayerTensor

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.models.description import ModelDescription

_PARTS: Final = ("gate", "up", "down")
_RENAMED: Final = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),
)
"""What families call the same things."""
_STACKED: Final = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
"""All experts in one tensor: [E, 2 I, H], gate rows first, and [E, H, I]."""


def mixture_tensors(description: ModelDescription) -> dict[str, LayerTensor]:
    """Checkpoint name, without the layer's prefix -> the tensor; empty for a model without a mixture."""
    mixture, hidden = description.mixture, description.hidden_size
    if mixture is None:
        return {}
    tensors = {"mlp.gate.weight": LayerTensor("router.weight", (mixture.num_experts, hidden))}
    if mixture.score_bias:
        tensors["mlp.gate.e_score_correction_bias"] = LayerTensor("router.bias", (mixture.num_experts,))
    for expert in range(mixture.num_experts):
        for part, shape in _matrices(mixture.intermediate_size, hidden):
            name = f"mlp.experts.{expert}.{part}_proj.weight"
            tensors[name] = LayerTensor(f"experts.{expert}.{part}.weight", shape)
    if mixture.shared_intermediate_size:
        for part, shape in _matrices(mixture.shared_intermediate_size, hidden):
            tensors[f"mlp.shared_expert.{part}_proj.weight"] = LayerTensor(f"shared.{part}.weight", shape)
    if mixture.shared_gate:
        tensors["mlp.shared_expert_gate.weight"] = LayerTensor("shared_gate.weight", (1, hidden))
    return tensors


def _matrices(inner: int, hidden: int) -> list[tuple[str, tuple[int, int]]]:
    return [(part, (hidden, inner) if part == "down" else (inner, hidden)) for part in _PARTS]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a matrix of an expert is within a stacked tensor."""

    name: str
    expert: int
    first_row: int
    num_rows: int


class MixtureReader:
    """A TensorReader over another one in which experts may be stacked, and names may be another family's."""

    def __init__(self, inner: TensorReader) -> None:
        self._inner = inner
        self._names: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        # Each is asked for once, since its matrices are read in turn with those of another.
        self._stacked: dict[str, TensorSlices] = {}
        for name in inner.names():
            renamed = name
            for pattern, replacement in _RENAMED:
                renamed = pattern.sub(replacement, renamed)
            stacked = _STACKED.match(renamed)
            if stacked is None:
                self._names[renamed] = name
            else:
                self._add_stacked(name, *stacked.groups())

    def names(self) -> Iterable[str]:
        """This project's names."""
        return [*self._names, *self._places]

    def tensor(self, name: str) -> TensorSlices:
        """Raises CheckpointError for a name that is not there."""
        place = self._places.get(name)
        if place is None:
            return self._inner.tensor(self._names.get(name, name))
        return _ExpertSlices(self._stacked[place.name], place)

    def _add_stacked(self, name: str, prefix: str, kind: str) -> None:
        self._stacked[name] = self._inner.tensor(name)
        shape = self._stacked[name].shape
        if len(shape) != 3 or (kind == "gate_up_proj" and shape[1] % 2):
            raise CheckpointError(f"tensor {name} has shape {list(shape)}; a matrix for each expert, gate and up alike")
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                own = f"{prefix}.{expert}.{part}_proj.weight"
                self._places[own] = _Place(name, expert, index * rows, rows)


class _ExpertSlices:
    """One matrix of a stacked tensor; reads nothing of the others."""

    def __init__(self, stacked: TensorSlices, place: _Place) -> None:
        self._stacked = stacked
        self._place = place

    @property
    def shape(self) -> Sequence[int]:
        """Of the matrix."""
        return (self._place.num_rows, self._stacked.shape[2])

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self._place.num_rows)
        first, expert = self._place.first_row, self._place.expert
        return self._stacked[(slice(expert, expert + 1), slice(first + start, first + stop), *columns)][0]
