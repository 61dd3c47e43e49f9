"""The actors of one engine's ranks. Only the driver's process imports this."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fourfold_executor_ray.environment import shared_variables
from fourfold_executor_ray.group import BundleGroup
from fourfold_executor_ray.messages import Invitation, Plan, RankOrders
from fourfold_executor_ray.placement import Place, Slot, seat
from fourfold_executor_ray.rank_actor import RankActor


class Actors:
    """One for every rank, in the places that ``seat`` chooses."""

    def __init__(
        self, plan: Plan, invitation: Invitation, slots: Sequence[Slot], group: BundleGroup, *, own_node: str
    ) -> None:
        self.count = len(plan.labels)
        self._plan = plan
        self._invitation = invitation
        self._group = group
        self._places = seat(slots, stages=self.count // plan.tp, tp=plan.tp, own_node=own_node)
        self._handles: list[Any] = []

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the ranks' nodes, in rank order."""
        return tuple(place.slot.node.name for place in self._places)

    def start(self) -> list[Future[str]]:
        """Start them all; each future is done when its rank has ended."""
        variables = shared_variables(os.environ)
        ends = []
        for rank, place in enumerate(self._places):
            handle = self._actor(rank, place)
            self._handles.append(handle)
            orders = RankOrders(
                rank=rank,
                local_rank=place.local_rank,
                local_workers=place.local_workers,
                label=self._plan.labels[rank],
                node=place.slot.node.name,
                address=place.slot.node.address,
                door=self._invitation.door,
                log_level=self._plan.log_level,
                variables=variables,
            )
            ends.append(handle.serve.remote(msgspec.msgpack.encode(orders)).future())
        return ends

    def kill(self) -> None:
        """End them all at once."""
        for handle in self._handles:
            with contextlib.suppress(RayError):  # it has ended
                ray.kill(handle)

    def cause(self, how: Future[str]) -> str:
        """How a rank ended, as it follows its name."""
        try:
            return how.result(0)
        except RayTaskError as error:
            return f"has failed: {error.cause}"
        except RayActorError as error:
            return f"has ended: {_reason(str(error))}"
        except RayError as error:
            return f"has ended: {_reason(str(error))}"

    def _actor(self, rank: int, place: Place) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group.handle, placement_group_bundle_index=place.slot.bundle
        )
        options = {"num_gpus": 1, "num_cpus": 0} if self._group.kind == "GPU" else {"num_cpus": 1}
        return (
            ray.remote(RankActor)
            .options(name=self._plan.labels[rank], scheduling_strategy=strategy, max_restarts=0, **options)
            .remote()
        )


def _reason(text: str) -> str:
    """The line of Ray's text that says why; Ray puts what it knows of the actor first."""
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))]
    return (telling or [line for line in lines if line] or ["Ray does not say why"])[0].rstrip(".")
