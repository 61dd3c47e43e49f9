"""The actors of one engine's ranks. Only the driver's process imports this."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fourfold_executor_ray.cluster import ABOUT_TOKENS, nodes
from fourfold_executor_ray.environment import shared_variables
from fourfold_executor_ray.group import BundleGroup
from fourfold_executor_ray.messages import Invitation, NodeOrders, Plan, RankOrders
from fourfold_executor_ray.placement import Place, Slot, seat

_CREATION: Final = "error raised in its creation task"
_UNREACHED: Final = "all references to the actor were removed"
"""What a cluster takes it for if it cannot ask the program that has them."""


class Started(NamedTuple):
    """What is to come of actors that were started."""

    gates: dict[int, Future[str]]
    """Place -> done when that node is connected."""
    ends: list[Future[str]]
    """One a rank, done when it has ended."""


class Actors:
    """One for every rank, in the places that ``seat`` chooses."""

    def __init__(self, plan: Plan, slots: Sequence[Slot], group: BundleGroup, *, own_node: str) -> None:
        self.count = len(plan.labels)
        self._plan = plan
        self._group = group
        self._seats = seat(slots, stages=self.count // plan.tp, tp=plan.tp, own_node=own_node, replicas=plan.replicas)
        order = dict.fromkeys([own_node, *(place.slot.node.id for place in self._seats)])
        self._numbers = {node: number for number, node in enumerate(order)}
        self._handles: list[Any] = []
        self._job = ray.get_runtime_context().get_job_id()
        """A name is given once in a namespace, which engines may share; jobs are all different."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the ranks' nodes, in rank order."""
        return tuple(place.slot.node.name for place in self._seats)

    @property
    def places(self) -> tuple[int, ...]:
        """The same as numbers; 0 is the executor's own node."""
        return tuple(self._numbers[place.slot.node.id] for place in self._seats)

    def start(self, invitation: Invitation) -> Started:
        """Start them all, and connect their nodes."""
        self._handles = [self._actor(rank, place) for rank, place in enumerate(self._seats)]
        doors: dict[int, Any] = {0: invitation.door}
        for number in sorted(set(self.places) - {0}):
            doors[number] = self._open_gate(number, invitation)
        variables = shared_variables(os.environ)
        ends = []
        for rank, (handle, place) in enumerate(zip(self._handles, self._seats)):
            orders = RankOrders(
                rank=rank,
                local_rank=place.local_rank,
                local_workers=place.local_workers,
                label=self._plan.labels[rank],
                node=place.slot.node.name,
                address=place.slot.node.address,
                log_level=self._plan.log_level,
                variables=variables,
            )
            # Ray waits for the door, if that is still to be opened, and hands over its name.
            ends.append(handle.serve.remote(msgspec.msgpack.encode(orders), doors[self.places[rank]]).future())
        return Started({number: door.future() for number, door in doors.items() if number}, ends)

    def stranded(self) -> list[int]:
        """Ranks on nodes that Ray has given up. Of an actor that was yet to start there Ray itself may never tell."""
        alive = {node.id for node in nodes()}
        return [rank for rank, place in enumerate(self._seats) if place.slot.node.id not in alive]

    def kill(self) -> None:
        """End them all at once."""
        for handle in self._handles:
            with contextlib.suppress(RayError):  # it has ended
                ray.kill(handle)

    def cause(self, how: Future[str]) -> str:
        """How a rank ended, in one line."""
        try:
            return how.result(0)
        except RayTaskError as error:
            return str(error.cause)
        except RayError as error:
            return _reason(str(error))

    def _open_gate(self, number: int, invitation: Invitation) -> Any:
        ranks = tuple(rank for rank, place in enumerate(self.places) if place == number)
        orders = NodeOrders(
            place=number,
            node=self.nodes[ranks[0]],
            ranks=ranks,
            invitation=invitation,
            # To say why before the executor, which has the same deadline, only misses the ranks.
            timeout=max(1.0, self._plan.started + self._plan.timeout - time.monotonic()),
        )
        return self._handles[ranks[0]].open_gate.remote(msgspec.msgpack.encode(orders))

    def _actor(self, rank: int, place: Place) -> Any:
        # Here, since it is only named in the driver, and lives elsewhere.
        from fourfold_executor_ray.rank_actor import RankActor

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group.handle, placement_group_bundle_index=place.slot.bundle
        )
        options = {"num_gpus": 1, "num_cpus": 0} if self._group.kind == "GPU" else {"num_cpus": 1}
        return (
            ray.remote(RankActor)
            .options(
                name=f"{self._plan.labels[rank]} {self._job}", scheduling_strategy=strategy, max_restarts=0, **options
            )
            .remote()
        )


def _reason(text: str) -> str:
    """The line of Ray's text that says why: what it knows of the actor comes before that, and guesses after."""
    lines = [line.strip() for line in text.strip().splitlines()]
    telling = [line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))]
    if telling and _CREATION in telling[0]:  # an actor does nothing there but import its class
        return f"its process cannot start: {lines[-1]}; install the same fourfold and plugins on every node"
    if telling and _UNREACHED in telling[0]:
        return f"the cluster gave it up, as it could not call this program; {ABOUT_TOKENS}"
    line = (telling or [line for line in lines if line] or ["Ray does not say why"])[0]
    return line.partition(" Some common causes")[0].rstrip(".")
