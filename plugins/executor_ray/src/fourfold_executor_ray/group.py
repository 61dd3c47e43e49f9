"""The placement group of one engine: made or found, waited for, and let go. Only the driver's process imports this."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from fourfold.errors import ConfigError, EngineError
from fourfold_executor_ray import cluster
from fourfold_executor_ray.messages import Plan
from fourfold_executor_ray.placement import Slot, bundle_sizes, share, shortage

_STRATEGIES: Final = {"pack": "PACK", "spread": "SPREAD", "strict-pack": "STRICT_PACK"}
_FIRST_NOTICE: Final = 1.0
_NOTICE_EVERY: Final = 5.0
_LOOK_EVERY: Final = 0.25
"""Seconds between looks at what others use of a group."""


class BundleGroup:
    """Room for all ranks of an engine."""

    def __init__(self, plan: Plan) -> None:
        """Find the group that ``plan`` names, or ask for a new one. Raises ConfigError for one that is not there."""
        self.kind = cluster.device_kind()
        self._plan = plan
        self._own = not (plan.group_name or plan.group_id)
        self._unused: list[Slot] | None = None
        """Of a group that was found and is reserved, what nobody uses of this engine's part."""
        if plan.group_id:
            self.handle = PlacementGroup(ray.PlacementGroupID.from_hex(plan.group_id))
        elif plan.group_name:
            self.handle = _find(plan.group_name)
        else:
            self._sizes = bundle_sizes(
                stages=len(plan.labels) // plan.tp,
                tp=plan.tp,
                largest_node=max(node.capacity for node in cluster.nodes()),
            )
            self.handle = placement_group(
                [{self.kind: size} for size in self._sizes], strategy=_STRATEGIES[plan.placement]
            )

    def wait(self, *, stopped: threading.Event, notice: Callable[[str], None]) -> list[Slot]:
        """Room for every rank, once it is reserved; ``notice`` hears what is missing.

        Raises EngineError when that takes longer than the plan allows, or ``stopped``.
        """
        deadline = self._plan.started + self._plan.timeout
        wait = _FIRST_NOTICE
        while not (slots := self._room(min(wait, deadline - time.monotonic()), stopped)):
            if stopped.is_set():
                raise EngineError("the start was given up")
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"{self._shortage()}; nothing came free within {self._plan.timeout:g} s (--startup-timeout)"
                )
            notice(f"waiting for the Ray cluster: {self._shortage()}")
            wait = _NOTICE_EVERY
        return slots

    def remove(self) -> None:
        """Give the room back, if it was asked for here."""
        if self._own:
            remove_placement_group(self.handle)

    def _room(self, seconds: float, stopped: threading.Event) -> list[Slot]:
        """Slots for all ranks; none if there are not enough after ``seconds``, or when ``stopped``."""
        until = time.monotonic() + seconds
        # Ray counts in whole seconds here, and refuses none.
        ready, _ = ray.wait([self.handle.ready()], timeout=max(0.01, seconds))
        if not ready:
            return []
        slots = self._slots()
        if self._own:
            return slots
        while len(unused := self._unused_of(slots)) < len(self._plan.labels):
            self._unused = unused
            left = until - time.monotonic()
            if left <= 0 or stopped.wait(min(_LOOK_EVERY, left)):
                return []
        return unused

    def _unused_of(self, slots: list[Slot]) -> list[Slot]:
        """Those that this engine may take: of a group that replicas share its part, and none that anybody else is in,
        such as the program that asked for the group.
        """
        plan = self._plan
        if plan.replicas > 1:
            stages = len(plan.labels) // plan.tp
            slots = share(slots, stages=stages, tp=plan.tp, replica=plan.replica, replicas=plan.replicas)
        free = cluster.free_in_group(self.kind, self.handle.id.hex())
        unused = []
        for slot in slots:
            if free.get(slot.bundle, 0) >= 1:
                free[slot.bundle] -= 1
                unused.append(slot)
        return unused

    def _shortage(self) -> str:
        if self._unused is not None:
            return (
                f"the placement group has {len(self._unused)} {self.kind}(s) free for this engine, which needs "
                f"{len(self._plan.labels)}"
            )
        text = shortage(
            self.kind, needed=len(self._plan.labels), free=cluster.free(self.kind), nodes=len(cluster.nodes())
        )
        if not self._own:
            return f"the placement group is not reserved yet: {text}"
        largest = max(self._sizes) if self._plan.placement != "strict-pack" else sum(self._sizes)
        return text if largest == 1 else f"{text}, and {largest} must be on one node"

    def _slots(self) -> list[Slot]:
        table: dict[str, Any] = placement_group_table(self.handle)
        known = {node.id: node for node in cluster.nodes()}
        slots = []
        for bundle, resources in enumerate(self.handle.bundle_specs):
            node = known.get(table["bundles_to_node_id"][bundle])
            if node is not None:
                slots += [Slot(bundle=bundle, node=node)] * int(resources.get(self.kind, 0))
        needed = len(self._plan.labels) * (1 if self._own else self._plan.replicas)
        if len(slots) < needed:
            raise ConfigError(
                f"the placement group has room for {len(slots)} ranks, a {self.kind} each, and {needed} are needed"
            )
        return slots


def _find(name: str) -> PlacementGroup:
    try:
        return get_placement_group(name)
    except ValueError as error:
        raise ConfigError(f"--ray-placement-group is {name!r}: {error}") from error
