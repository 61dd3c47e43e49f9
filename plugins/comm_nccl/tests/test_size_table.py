from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fourfold.errors import EngineError
from fourfold_comm_nccl.region import MAX_PROGRAMS, MAX_STRIPE_BYTES, Region
from fourfold_comm_nccl.size_table import Plan, SizeTable
from fourfold_comm_nccl.table_cache import TableCache

TABLE = SizeTable(
    sizes=(8192, 65536, 1 << 20, 4 << 20),
    plans=(Plan("two_shot", 128), Plan("one_shot", 32), Plan("one_shot", 32), None),
)


@pytest.mark.parametrize(
    ("nbytes", "plan"),
    [
        (16, Plan("two_shot", 128)),
        (8192, Plan("two_shot", 128)),
        (8208, Plan("one_shot", 32)),
        (2 << 20, None),
        (1 << 30, None),
    ],
)
def test_a_plan_holds_up_to_its_size(nbytes: int, plan: Plan | None) -> None:
    assert TABLE.plan(nbytes) == plan


def test_it_travels_as_text() -> None:
    assert SizeTable.decode(TABLE.encode()) == TABLE
    assert str(TABLE) == (
        "up to 8 KB two_shot on 128; up to 1024 KB one_shot on 32; up to 4096 KB library; above: library"
    )


@pytest.mark.parametrize(
    "text", ["", "{}x", "[1]", '[[1, ["warp", 2]]]', "[[2, null], [1, null]]", '[[1, ["two_shot"]]]']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="is no table of sizes"):
        SizeTable.decode(text)


def test_a_table_is_kept_for_its_setting_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TableCache("a device", 2).read() is None
    TableCache("a device", 2).write(TABLE)
    assert TableCache("a device", 2).read() == TABLE
    assert TableCache("a device", 4).read() is None


def test_a_damaged_table_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    TableCache("a device").write(TABLE)
    (path,) = tmp_path.rglob("*.json")
    path.write_text("[")
    assert TableCache("a device").read() is None
    assert "is not used" in caplog.text


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_areas_of_a_region_do_not_overlap(world: int) -> None:
    region = Region(world_size=world)
    areas = [(0, 2 * MAX_PROGRAMS * world * 4)]
    for slot in range(2):
        start = region.slots_at + slot * region.slot_bytes
        for source in range(world):
            part = start + source * region.part_bytes
            # A stripe of each superblock, of which the last may be partly empty.
            areas.append((part, part + region.max_bytes // world + MAX_STRIPE_BYTES))
        areas.append((start + region.results_at, start + region.results_at + region.max_bytes))
    for (_, end), (start, _) in pairwise(areas):
        assert end <= start
    assert areas[-1][1] <= region.nbytes
    assert all(start % 16 == 0 for start, _ in areas)
