from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.messages import EngineReady
from fourfold.process_messages import EngineDead
from fourfold.supervision.run_directory import RunDirectory
from fourfold.testing.ready_engine import ready_engine
from fourfold_server.node_table import NodeTable, read_nodes


@pytest.fixture
def run_directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path) as found:
        yield found


def shown(run_directory: RunDirectory) -> list[tuple[str, str, list[int], str]]:
    return [(row.node, row.role, row.replicas, row.state) for row in read_nodes(run_directory.path)]


def ready(engine: int, *nodes: str) -> EngineReady:
    return ready_engine(engine, workers=[{"node": node} for node in nodes])


def dead(engine: int) -> EngineDead:
    return EngineDead(engine=engine, incarnation=1, reason="for the test")


def test_a_node_with_replicas_that_has_gone_is_shown_as_lost(run_directory: RunDirectory) -> None:
    table = NodeTable(run_directory, "a", [0])
    table.join("b", range(1, 3))
    table.lose("b")
    assert shown(run_directory) == [("a", "head", [0], "running"), ("b", "engines", [1, 2], "lost")]
    assert all(row.since.endswith("+00:00") for row in read_nodes(run_directory.path))
    table.join("b", range(1, 3))
    assert shown(run_directory)[1] == ("b", "engines", [1, 2], "running")


def test_a_node_with_ranks_is_lost_when_its_engine_runs_without_it(run_directory: RunDirectory) -> None:
    table = NodeTable(run_directory, "a", [4, 5], first_rank=4)
    table.hear(ready(0, "a", "b"))
    table.hear(ready(1, "b", "c"))
    own = ("a", "head", [4, 5], "running")
    assert shown(run_directory) == [own, ("b", "ranks", [4, 5], "running"), ("c", "ranks", [5], "running")]
    table.hear(dead(1))
    assert shown(run_directory) == [own, ("b", "ranks", [4], "running"), ("c", "ranks", [5], "restarting")]
    table.hear(ready(1, "b"))
    assert shown(run_directory) == [own, ("b", "ranks", [4, 5], "running"), ("c", "ranks", [5], "lost")]


def test_an_engine_without_other_nodes_shows_none(run_directory: RunDirectory) -> None:
    table = NodeTable(run_directory, "a", [0])
    table.hear(ready(0, "", "a"))
    assert shown(run_directory) == [("a", "head", [0], "running")]
