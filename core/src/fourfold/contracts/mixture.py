"""The mixture contracts: the parts of a layer of experts that plugins replace. Know no model and no router.

T is tokens of this rank, R rows that arrived at it, H hidden size, K experts a token, E logical experts of the model,
P physical ones (E and the redundant copies), L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

ExpertPart = Literal["gate", "up", "down"]


class Experts(Protocol):
    """The arithmetic of the experts that a rank holds, each in a local slot."""

    def load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Take the whole local part of one matrix: [I, H] for gate and up, [H, I] for down; I is the local part.

        ``expert`` is a local slot. A slot may be loaded again, between two steps.
        """

    def matrix(self, expert: int, part: ExpertPart) -> torch.Tensor:
        """What ``load`` took, in the dtype of the layer; to be read at once, by whom the expert moves to."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``down(act(gate(x)) * up(x))`` of each row's experts, weighted and summed.

        ``x`` [R, H]; ``ids`` int32 [R, K], each a local slot or -1; ``weights`` fp32 [R, K] -> [R, H] in the dtype of
        ``x``. The values of a row whose ids are all -1 do not matter, NaN included, and it gives 0. No row depends on
        another one, and the tensors stay as they are.
        """


class DispatchedTokens(NamedTuple):
    """What arrived at a rank."""

    x: torch.Tensor
    """[R, H]; rows without an expert here may hold anything."""
    ids: torch.Tensor
    """int32 [R, K]: physical experts of this rank, or -1."""
    weights: torch.Tensor
    """fp32 [R, K]."""


class AllToAll(Protocol):
    """Carries tokens to the ranks of their experts and back, in four phases, each called once a layer, in order.

    ``channel`` tells apart what is in the air at once. All ranks of the group call alike.
    """

    @property
    def graph_safe(self) -> bool:
        """Whether the phases may be captured in a device graph."""

    def dispatch_send(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        sizes: Sequence[int],
        channel: int = 0,
    ) -> None:
        """Start sending ``x`` [T, H], with ``ids`` int32 [T, K] of physical experts and ``weights`` fp32 [T, K].

        ``sizes`` are the tokens of every rank, as all ranks have agreed on them. The tensors stay as they are.
        """

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """Wait for what was sent to this rank."""

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """Start sending back ``partial`` [R, H]: for each row that arrived, the sum over this rank's experts."""

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """[T, H]: each token's partial sums, added in the order of ranks; no call of another channel changes it."""

    def close(self) -> None:
        """Release everything; idempotent."""


class ExpertPlacement(Protocol):
    """Which rank holds which expert at the start; the same answer on every rank."""

    def place(self, num_physical: int, num_ranks: int) -> tuple[int, ...]:
        """The rank of each physical expert. Counts differ by one at most; the remainder is the first ranks'."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertMap:
    """Which physical expert is a copy of which logical one, in every layer."""

    physical_to_logical: NDArray[np.int32]
    """[L, P]."""
    logical_to_physical: NDArray[np.int32]
    """[L, E, C], C the most copies of any expert; -1 past an expert's last one."""
    counts: NDArray[np.int32]
    """[L, E]: copies of each logical expert, 1 or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalancerContext:
    """What a rebalancer may like to know besides the load."""

    num_groups: int = 1
    """Groups of neighbouring experts, of some of which a token takes all of its experts; 1: the model has none."""
    hosts: tuple[int, ...] = ()
    """A number for each rank, the same for ranks of one host; empty where it is not known."""


class Rebalancer(Protocol):
    """Decides which experts get copies and where they go. The first rank asks, between two steps, for all."""

    def balance(self, load: NDArray[np.float64], num_ranks: int, num_slots: int) -> ExpertMap:
        """``load`` [L, E] is the share of tokens of each logical expert; ``num_slots`` is P, over all ranks.

        Where it raises, takes long, or gives a map without a copy of some expert, experts stay where they are.
        """
