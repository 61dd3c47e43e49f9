"""The LoRA adapters of one rank's layers: loading, dropping, and whose turn it is. Knows no request and no name."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fourfold.checkpoints.safetensors_file import MappedFile
from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.layers.lora_linear import LoraLinearMethod
    from fourfold.models.adapter_file import Adapter

Int64 = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTarget:
    """A linear module of this rank."""

    load: Callable[[TensorSlices], None]
    """Stores this rank's part of a matrix of the weight's shape."""
    cuts_inputs: bool
    """Whether the parts are columns."""


class AdapterSlots:
    """Slots are small numbers from 1 on, which the engine hands out."""

    def __init__(self, method: LoraLinearMethod, targets: Mapping[str, AdapterTarget], tensors: Container[str]) -> None:
        """``targets``: by the module's name in the checkpoint; ``tensors``: names of all that this rank has."""
        self._method = method
        self._targets = targets
        self._tensors = tensors

    def load(self, slot: int, adapter: Adapter) -> None:
        """Read this rank's part of an adapter that was checked. Raises CheckpointError, and then there is none."""
        self.drop(slot)
        file = MappedFile(adapter.file)
        try:
            for module, names in adapter.modules.items():
                target = self._targets.get(module)
                if target is None and f"{module}.weight" in self._tensors:
                    raise CheckpointError(f"{adapter.file} adapts {module}, a layer of a kind that cannot be adapted")
                if target is not None:  # else it is another stage's
                    a, b = file.view(names.a)[:], file.view(names.b)[:].float() * adapter.scale
                    if target.cuts_inputs:
                        with self._method.storing(slot, whole_b=b):
                            target.load(a)
                    else:
                        with self._method.storing(slot, whole_a=a):
                            target.load(b)
        except BaseException:
            self.drop(slot)
            raise
        finally:
            file.close()

    def drop(self, slot: int) -> None:
        """Let go of an adapter; nothing happens if there is none."""
        self._method.drop(slot)

    def activate(self, slots: Int64, counts: Int64, upload: Upload) -> bool:
        """Have the next step's tokens adapted: ``counts`` [S] tokens of each request, whose adapters are ``slots`` [S],
        0 for none. Returns whether any is.
        """
        used = np.unique(slots[slots > 0])
        if not len(used):
            self._method.rows = ()
            return False
        if len(used) == 1 and (slots > 0).all():
            self._method.rows = ((int(used[0]), None),)
            return True
        of_token = np.repeat(slots, counts)
        self._method.rows = tuple((int(slot), upload(np.flatnonzero(of_token == slot))) for slot in used)
        return True
