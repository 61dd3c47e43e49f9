"""The placement group of one engine: made or found, waited for, and let go. Only the driver's process imports this."""

from __future__ import annotations

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
from fourfold_executor_ray.placement import Slot, bundle_sizes, shortage

_STRATEGIES: Final = {"pack": "PACK", "spread": "SPREAD", "strict-pack": "STRICT_PACK"}
_FIRST_NOTICE: Final = 1.0
_NOTICE_EVERY: Final = 5.0


class BundleGroup:
    """Room for all ranks of an engine."""

    def __init__(self, plan: Plan) -> None:
        """Find the group that ``plan`` names, or ask for a new one. Raises ConfigError for one that is not there."""
        self.kind = cluster.device_kind()
        self._plan = plan
        self._own = not (plan.group_name or plan.group_id)
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

    def wait(self, *, stopped: Callable[[], bool], notice: Callable[[str], None]) -> list[Slot]:
        """Room for every rank, once it is reserved; ``notice`` hears what is missing.

        Raises EngineError when that takes longer than the plan allows, or ``stopped``.
        """
        deadline = self._plan.started + self._plan.timeout
        wait = _FIRST_NOTICE
        while not self._is_ready(min(wait, deadline - time.monotonic())):
            if stopped():
                raise EngineError("the start was given up")
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"{self._shortage()}; nothing came free within {self._plan.timeout:g} s (--startup-timeout)"
                )
            notice(f"waiting for the Ray cluster: {self._shortage()}")
            wait = _NOTICE_EVERY
        return self._slots()

    def remove(self) -> None:
        """Give the room back, if it was asked for here."""
        if self._own:
            remove_placement_group(self.handle)

    def _is_ready(self, seconds: float) -> bool:
        # Ray counts in whole seconds here, and refuses none.
        ready, _ = ray.wait([self.handle.ready()], timeout=max(0.01, seconds))
        return bool(ready)

    def _shortage(self) -> str:
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
        needed = len(self._plan.labels)
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
