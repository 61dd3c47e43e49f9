"""The linear-method contract: the arithmetic of one linear layer's shard, apart from how it was cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class LinearWeight(Protocol):
    """What ``create`` returns: the storage of one layer's shard in the method's own layout."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class LinearMethod(Protocol):
    """Stores and applies weights of shape [out, in] that arrive row block by row block.

    A weight travels through ``create`` -> ``load_shard`` for every block of output rows -> ``apply`` at each step.
    """

    def create(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> LinearWeight:
        """Allocate the storage of a [out_features, in_features] weight (and bias [out_features])."""

    def load_shard(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Store ``tensor`` ([rows, in], any float dtype) as output rows ``first_row`` onwards."""

    def load_bias(self, weight: LinearWeight, tensor: torch.Tensor, *, first_row: int) -> None:
        """Store ``tensor`` ([rows], any float dtype) as bias entries ``first_row`` onwards."""

    def apply(self, weight: LinearWeight, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``x`` [T, in] -> [T, out] with bias, in ``out_dtype`` (default: that of ``x``)."""

    def embed(self, weight: LinearWeight, token_ids: torch.Tensor, *, first_id: int | None = None) -> torch.Tensor:
        """Rows of the weight as an embedding table: int64 [T] -> [T, in], in the weight's dtype.

        With ``first_id`` the weight holds the rows of ids from there on, and ids of other rows give zeros; without, it
        holds them all. Serves tied embeddings, so that a prepacked head needs no dense copy beside it.
        """


@runtime_checkable
class ReleasableWeights(Protocol):
    """A linear method that can do without the memory of its weights for a while, for engines that sleep.

    It speaks of all weights that the method has created. Optional: of a method without it, weights stay where they are.
    """

    def release_weights(self, *, keep: bool) -> None:
        """Give the device's memory back; twice is harmless.

        With ``keep`` the content goes to the host's memory, which on a CPU is where it is; without, it is lost, and
        what an earlier call kept as well. Recorded steps are closed before.
        """

    def restore_weights(self) -> None:
        """Take memory again; the content is what was kept, else undefined until ``load_shard`` brings it."""

    def discard_weights(self) -> None:
        """Other weights come next, at the same addresses: all replicas are told before any of them loads."""
