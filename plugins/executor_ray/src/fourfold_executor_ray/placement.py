"""Which rank goes to which node: arithmetic alone, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that takes ranks."""

    id: str
    name: str
    """As people call it; no two have the same."""
    address: str
    capacity: int
    """Ranks of all engines that it has room for, where they are alone on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Room for one rank."""

    bundle: int
    """In the placement group."""
    node: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one rank is."""

    slot: Slot
    local_rank: int
    """Among the ranks of its node."""
    local_workers: int
    """Ranks of its node, with those that other replicas may have there."""


def bundle_sizes(*, stages: int, tp: int, largest_node: int) -> list[int]:
    """How many ranks each bundle of a new placement group holds; a bundle is on one node.

    A stage is a bundle where a node has room for one (``largest_node`` ranks at most), else every rank is its own.
    """
    return [tp] * stages if tp <= largest_node else [1] * (stages * tp)


def seat(slots: Iterable[Slot], *, stages: int, tp: int, own_node: str, replicas: int = 1) -> list[Place]:
    """A place for every rank, in rank order; the same for any order of ``slots``.

    Nodes come in the order of their names, the executor's own first; a stage is on one node where one has room for it.
    ``slots`` are at least ``stages * tp``. Where other ``replicas`` are is not known, so each counts with all of them.
    """
    free: dict[str, list[Slot]] = {}
    for slot in sorted(slots, key=lambda slot: (slot.node.id != own_node, slot.node.name, slot.bundle)):
        free.setdefault(slot.node.id, []).append(slot)
    whole: list[list[Slot] | None] = []
    for _ in range(stages):
        roomy = next((found for found in free.values() if len(found) >= tp), None)
        whole.append(None if roomy is None else [roomy.pop(0) for _ in range(tp)])
    rest = [slot for found in free.values() for slot in found]
    chosen: list[Slot] = []
    for stage in whole:
        chosen += stage if stage is not None else [rest.pop(0) for _ in range(tp)]
    return _numbered(chosen, replicas)


def share(slots: Iterable[Slot], *, stages: int, tp: int, replica: int, replicas: int) -> list[Slot]:
    """What one of the replicas that share ``slots`` takes of them: all of them find the same, and none the same slot.

    ``slots`` are at least ``replicas * stages * tp``.
    """
    count = stages * tp
    places = seat(slots, stages=stages * replicas, tp=tp, own_node="")
    return [place.slot for place in places[replica * count : (replica + 1) * count]]


def shortage(kind: str, *, needed: int, free: float, nodes: int) -> str:
    """What is missing, in words; ``kind`` is CPU or GPU."""
    return f"needs {_count(needed, kind)}, the cluster has {free:g} free on {_count(nodes, 'node')}"


def unique_names(hosts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Node id -> what people call it: its host name, with the start of its id where others have the same.

    ``hosts`` are pairs of id and host name.
    """
    counts = Counter(name for _, name in hosts)
    return {node: name if counts[name] == 1 else f"{name}/{node[:8]}" for node, name in hosts}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _numbered(slots: Sequence[Slot], replicas: int) -> list[Place]:
    workers = Counter(slot.node.id for slot in slots)
    seen: Counter[str] = Counter()
    places = []
    for slot in slots:
        own = workers[slot.node.id]
        most = max(own, min(own * replicas, slot.node.capacity))
        places.append(Place(slot=slot, local_rank=seen[slot.node.id], local_workers=most))
        seen[slot.node.id] += 1
    return places
