from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold_executor_ray.placement import Node, Slot, bundle_sizes, seat, share, shortage, unique_names

NODES = {name: Node(id=f"id-{name}", name=name, address="", capacity=4) for name in "abcd"}


def slots(**counts: int) -> list[Slot]:
    numbers = itertools.count()
    return [Slot(bundle=next(numbers), node=NODES[name]) for name, count in counts.items() for _ in range(count)]


def names(found: list[Slot], *, stages: int, tp: int, own: str = "") -> str:
    return "".join(place.slot.node.name for place in seat(found, stages=stages, tp=tp, own_node=f"id-{own}"))


TABLE = [
    # room, stages, tp, own node, node of each rank
    ({"a": 2, "b": 2}, 2, 2, "", "aabb"),
    ({"a": 2, "b": 2}, 2, 2, "b", "bbaa"),
    ({"a": 4}, 2, 2, "", "aaaa"),
    ({"a": 1, "b": 2, "c": 1}, 2, 2, "", "bbac"),  # one stage is whole, the other cannot be
    ({"a": 3, "b": 3}, 3, 2, "", "aabbab"),
    ({"a": 1, "b": 1, "c": 1, "d": 1}, 4, 1, "c", "cabd"),
    ({"a": 1, "b": 4}, 2, 2, "a", "bbbb"),
]


@pytest.mark.parametrize(("room", "stages", "tp", "own", "expected"), TABLE)
def test_a_stage_is_on_one_node_where_one_has_room(
    room: dict[str, int], stages: int, tp: int, own: str, expected: str
) -> None:
    for order in itertools.islice(itertools.permutations(slots(**room)), 50):
        assert names(list(order), stages=stages, tp=tp, own=own) == expected


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_every_rank_has_a_slot_of_its_own(counts: list[int], stages: int, tp: int) -> None:
    room = slots(**dict(zip("abcd", counts)))
    if len(room) < stages * tp:
        return
    places = seat(room, stages=stages, tp=tp, own_node="")
    assert len({place.slot.bundle for place in places}) == len(places) == stages * tp
    for node in NODES.values():
        here = [place for place in places if place.slot.node == node]
        assert [place.local_rank for place in here] == list(range(len(here)))
        assert {place.local_workers for place in here} <= {len(here)}
    groups = [places[at : at + tp] for at in range(0, len(places), tp)]
    torn = [group for group in groups if len({place.slot.node.id for place in group}) > 1]
    assert len(torn) == max(0, stages - sum(count // tp for count in counts))


def test_other_replicas_may_be_on_the_same_node_as_far_as_there_is_room() -> None:
    for replicas, expected in ((1, 2), (2, 4), (3, 4)):
        places = seat(slots(a=2), stages=1, tp=2, own_node="", replicas=replicas)
        assert [place.local_workers for place in places] == [expected] * 2


@given(st.permutations(slots(a=3, b=2, c=4)), st.integers(1, 2))
def test_replicas_that_share_a_group_take_different_slots(room: list[Slot], stages: int) -> None:
    taken = [share(room, stages=stages, tp=2, replica=replica, replicas=2) for replica in range(2)]
    assert [len(found) for found in taken] == [2 * stages] * 2
    assert len({slot.bundle for found in taken for slot in found}) == 4 * stages
    assert all(
        len({slot.node.name for slot in found[at : at + 2]}) == 1 for found in taken for at in (0, stages * 2 - 2)
    )


def test_a_stage_is_a_bundle_unless_no_node_has_room_for_one() -> None:
    assert bundle_sizes(stages=2, tp=4, largest_node=4) == [4, 4]
    assert bundle_sizes(stages=2, tp=4, largest_node=3) == [1] * 8


def test_what_is_missing_is_said() -> None:
    assert shortage("CPU", needed=4, free=2, nodes=2) == "needs 4 CPUs, the cluster has 2 free on 2 nodes"
    assert shortage("GPU", needed=1, free=0, nodes=1) == "needs 1 GPU, the cluster has 0 free on 1 node"


def test_nodes_of_one_host_name_are_told_apart() -> None:
    hosts = [("0123456789", "one"), ("abcdefghij", "two"), ("ABCDEFGHIJ", "two")]
    assert unique_names(hosts) == {"0123456789": "one", "abcdefghij": "two/abcdefgh", "ABCDEFGHIJ": "two/ABCDEFGH"}
