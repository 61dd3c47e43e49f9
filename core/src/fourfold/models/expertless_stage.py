"""The vote of a stage without experts, whose engines step together for the sake of other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fourfold.distributed.ballot import Ballot

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.step_part import StepPart, StepVote, TakeTurns
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.models.description import ModelDescription
    from fourfold.models.stage_partition import Stage


class ExpertlessStage:
    """See ``fourfold.contracts.step_part.StepPart``: reduces the vote, which else layers of experts do.

    An engine hears the outcome from its last stage, and has to leave a wave after the same step as the others.
    """

    def __init__(self, link: Communicator, ranks_per_engine: int) -> None:
        """``link`` moves tensors on the CPU, between the ranks of this stage in all engines."""
        self._ballot = Ballot(link, ranks_per_engine)

    def begin_step(self, num_tokens: int, vote: StepVote, *, is_decode: bool) -> StepVote:
        """See StepPart."""
        return self._ballot.hold(num_tokens, vote, wants_cut=False).vote

    def begin_recording(self, num_tokens: int) -> None:
        """See StepPart."""

    def take_turns(self, num_tokens: int) -> TakeTurns | None:
        """See StepPart."""
        return None

    def end_step(self) -> None:
        """See StepPart."""

    def counters(self) -> Mapping[str, float]:
        """See StepPart."""
        return {}

    def report(self) -> Mapping[str, Any]:
        """See StepPart."""
        return {}

    def close(self) -> None:
        """See StepPart."""


def first_step_parts(
    description: ModelDescription, stage: Stage, group: GroupCoordinator, expert_group: GroupCoordinator
) -> dict[str, StepPart]:
    """What a stage does between steps whatever its layers are built of: it votes, where none of them will."""
    link = expert_group.host or expert_group.communicator
    mixes = any(description.layers[layer].mixture for layer in stage.layers)
    if link is None or mixes or expert_group.world_size == group.world_size:
        return {}
    return {"expertless stage": ExpertlessStage(link, group.world_size)}
