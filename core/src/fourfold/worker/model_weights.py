"""The weights of one rank: what they are read from, and whether they are there. Knows no request and no cache."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.recorded_reading import RecordedFormat
from fourfold.contracts.linear_method import ReleasableWeights
from fourfold.errors import CheckpointError
from fourfold.models.loading import check_model, fill_model

if TYPE_CHECKING:
    from fourfold.checkpoints.progress import Progress
    from fourfold.checkpoints.resolve import Checkpoint
    from fourfold.models.building import BuiltDecoder
    from fourfold.models.description import ModelDescription

_FREE = ("dtype", "max_model_len", "max_position")
"""Fields of a description that do not change what the weights mean."""


class ModelWeights:
    """Of a decoder that is built. Storage stays the decoder's; this fills it, empties it and fills it again."""

    def __init__(self, built: BuiltDecoder, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        """What the weights are read from, now and when they are read again."""
        self.reading = RecordedFormat(checkpoint.format)
        """Knows which parts this rank takes; reads nothing more."""
        self._built = built
        holders = (built.linear_method, built.weight_memory)
        self._releasable = [one for one in holders if isinstance(one, ReleasableWeights)]
        self._are_lost = True

    def fill(self, progress: Progress) -> None:
        """Read them all; raises CheckpointError, after which they are lost."""
        self._are_lost = True
        self.reading = RecordedFormat(self.checkpoint.format)
        fill_model(self._built, replace(self.checkpoint, format=self.reading), progress)
        self._are_lost = False

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError for a checkpoint that is not one of the same model, and change nothing."""
        _check_alike(self._built.decoder.description, checkpoint)
        check_model(self._built, checkpoint)

    def discard(self) -> None:
        """Others come next, here and on all replicas."""
        self._are_lost = True
        for one in self._releasable:
            one.discard_weights()

    def replace(self, checkpoint: Checkpoint) -> None:
        """Read those of another checkpoint of the model, after ``discard``."""
        self.checkpoint = checkpoint
        self._are_lost = True
        self.restore()

    def release(self, *, keep: bool) -> None:
        """Give their memory back, as far as those who hold them can; see ``ReleasableWeights``."""
        for one in self._releasable:
            one.release_weights(keep=keep and not self._are_lost)
        if self._releasable:
            self._are_lost = self._are_lost or not keep

    def restore(self) -> None:
        """Have them again, from the host's memory or from the checkpoint."""
        for one in self._releasable:
            one.restore_weights()
        if self._are_lost:
            self.fill(NoProgress())


def _check_alike(mine: ModelDescription, checkpoint: Checkpoint) -> None:
    for field in fields(mine):
        wanted, found = getattr(mine, field.name), getattr(checkpoint.description, field.name)
        if field.name not in _FREE and wanted != found:
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: its {field.name} is {found!r:.100}, that of the model "
                f"which runs {wanted!r:.100}"
            )
