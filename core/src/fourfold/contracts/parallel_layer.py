"""The parallel-layer contract: how one kind of layer is cut over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.linear_method import LinearWeight
    from fourfold.contracts.operators import Operators

LayerKind = Literal["column", "row", "merged_column", "qkv", "latent_qkv", "vocab_embedding", "head", "moe"]


class ParallelLayer(Protocol):
    """A layer that holds this rank's shard, loads it from whole checkpoint tensors, and is called with activations."""

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's part of a checkpoint tensor; ``parameter`` is the layer's own name, as ``q.weight``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class SummedLayer(Protocol):
    """What a parallel layer also offers whose result is a sum over the ranks, so that the sum can be taken later."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand of what calling the layer gives."""


class VocabularyLayer(ParallelLayer, Protocol):
    """A vocabulary embedding: its storage may serve the head as well."""

    @property
    def weight(self) -> LinearWeight:
        """This rank's rows, padding included."""


class HeadLayer(ParallelLayer, Protocol):
    """A head, called as a whole or in two halves of which the first may be recorded and the second talks."""

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> this rank's part of the logits, fp32."""

    def collect(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's part -> fp32 [R, V] on the group's first rank, [0, V] on the others."""

    def best(
        self, shard: torch.Tensor, broken: torch.Tensor, operators: Operators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``shard`` gave, and bool [R] where it is not finite -> int64 [R], each row's first largest logit,
        and bool [R] where any rank's part is not finite; on all ranks.
        """


class LatentLayer(ParallelLayer, Protocol):
    """Queries, keys and values of latent attention: [T, H] -> rows for the attention backend, whose spec says how wide.

    Parameters are ``q.weight``, or ``q_a.weight``, ``q_a.bias``, ``q_norm.weight`` and ``q_b.weight`` where queries
    have a latent too; ``kv_a.weight``, ``kv_a.bias``, ``kv_norm.weight`` and ``kv_b.weight``.
    """

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention gave -> [T, heads * value_dim] of this rank."""


class MixtureLayer(ParallelLayer, Protocol):
    """A layer of experts: [T, H] -> [T, H], whole on every rank.

    Parameters are ``router.weight`` and ``router.bias`` (added to scores to choose), ``experts.N.gate.weight``,
    ``experts.N.up.weight`` and ``experts.N.down.weight``, ``shared.gate.weight``, ``shared.up.weight`` and
    ``shared.down.weight``, and ``shared_gate.weight``. Of experts that a rank does not hold it reads no slice.
    """

    @property
    def backends(self) -> Mapping[str, str]:
        """Chosen name of each kind of its parts, as ``experts``."""


class TensorSlices(Protocol):
    """A checkpoint tensor that is read only where it is indexed, so that a rank touches only its slices."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...
