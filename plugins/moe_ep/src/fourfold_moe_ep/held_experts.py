"""The experts of one layer on one rank: what is where, how much each is asked for, and their matrices as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fourfold_moe_ep.expert_copies import CopyTable, map_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fourfold.contracts.mixture import ExpertMap, ExpertPart, Experts

_PARTS: Final[tuple[ExpertPart, ...]] = ("gate", "up", "down")


class HeldExperts:
    """Experts in slots, and the map that says which they are. P physical experts, E logical ones."""

    def __init__(
        self,
        experts: Experts,
        first: ExpertMap,
        local: Sequence[int],
        *,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        counts_load: bool,
    ) -> None:
        """``first`` is the map of one layer; ``local`` this rank's physical experts by slot; ``sizes`` are H and I."""
        self.experts = experts
        self.device = device
        self.logical: NDArray[np.int32] = first.physical_to_logical[0]
        """[P]: the logical expert at each place."""
        self._num_experts = first.counts.shape[1]
        self._slot_of = {place: slot for slot, place in enumerate(local)}
        self._local = list(local)
        self._dtype = dtype
        hidden, inner = sizes
        self._shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self._row = 3 * hidden * inner
        self._copies = CopyTable(first, 0, device)
        self._load = torch.zeros(self._num_experts, dtype=torch.int64, device=device) if counts_load else None

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return self._row * self._dtype.itemsize

    def slots_of(self, logical: int) -> list[int]:
        """This rank's slots that hold an expert."""
        return np.flatnonzero(self.logical[self._local] == logical).tolist()

    def choose(self, ids: torch.Tensor) -> torch.Tensor:
        """Count what is asked for, and say which copy serves: int32 [T, K] logical -> physical experts."""
        if self._load is not None:
            asked = ids.flatten().long()
            self._load.scatter_add_(0, asked, torch.ones_like(asked))
        return self._copies.choose(ids)

    def take_load(self) -> torch.Tensor:
        """int64 [E]: how often each logical expert was asked for since the last time."""
        if self._load is None:
            return torch.zeros(self._num_experts, dtype=torch.int64, device=self.device)
        load = self._load.clone()
        self._load.zero_()
        return load

    def new_rows(self, count: int) -> torch.Tensor:
        """Room for so many experts, each a row."""
        return torch.zeros(count, self._row, dtype=self._dtype, device=self.device)

    def read_into(self, row: torch.Tensor, place: int) -> None:
        """The matrices of a physical expert of this rank."""
        for part, piece in zip(_PARTS, torch.split(row, self._row // 3)):
            piece.copy_(self.experts.matrix(self._slot_of[place], part).reshape(-1))

    def write(self, place: int, row: torch.Tensor) -> None:
        """Let a physical expert of this rank be the one in ``row``."""
        for part, piece in zip(_PARTS, torch.split(row, self._row // 3)):
            self.experts.load(self._slot_of[place], part, piece.view(self._shapes[part]))

    def set_map(self, logical: NDArray[np.int32]) -> None:
        """Take another map [P], between two steps and on all ranks."""
        self.logical = logical
        self._copies.set(map_of(logical[None], self._num_experts), 0)
