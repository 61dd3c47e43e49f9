"""Every layout on a Ray cluster says what one rank says; whoever kills a server on one leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import product

import psutil
import pytest

from fourfold import LLM
from fourfold.errors import ConfigError
from fourfold.testing.processes import still_runs
from fourfold_executor_ray.session import members

from .conftest import ONE_THREAD, Start
from .ray_cluster import RayCluster, started_cluster
from .running_server import Server, wait_until
from .test_lifecycle import LONG, assert_port_is_free, port_of, stream, wait_until_gone
from .test_tensor_parallel import IDS, answers, expected

pytestmark = pytest.mark.long

LAYOUTS = list(product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2)))
COVERED = [(tp, pp, dp) for tp, pp, dp in LAYOUTS if tp in (1, 3) or (pp, dp) == (1, 1)]


@pytest.fixture(scope="module")
def wide() -> Iterator[RayCluster]:
    """Two nodes, together with room for the widest layout."""
    with started_cluster(12, 12) as cluster:
        yield cluster


@pytest.mark.parametrize(("tp", "pp", "dp"), COVERED)
def test_every_layout_says_the_same(
    tp: int, pp: int, dp: int, wide: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ONE_THREAD, "RAY_ADDRESS": wide.address}.items():
        monkeypatch.setenv(name, value)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    with LLM("smollm2", dtype="float32", executor="ray", max_model_len=512, num_blocks=200, **sizes) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor_parallel_size": 16}, "from 1 to 9"),
        ({"pipeline_parallel_size": 31}, "30"),
        ({"tensor_parallel_size": 0}, "1 or more"),
        ({"data_parallel_size": -1}, "1 or more"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_ray_is_asked(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("smollm2", executor="ray", **sizes)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked"])
@pytest.mark.parametrize("moment", ["load", "idle", "generation"])
@pytest.mark.parametrize("own", [True, False], ids=["own-cluster", "given-cluster"])
def test_whoever_ends_a_server_leaves_nothing(
    moment: str, own: bool, end: signal.Signals, start: Start, wide: RayCluster
) -> None:
    """No process, actors in a cluster that goes on among them, no shared memory, socket or folder, and not the port."""
    before = traces()
    server = start(
        *("--executor", "ray", "--tensor-parallel-size", "2", "--drain-timeout", "1"),
        ready=False,
        environment={"RAY_ADDRESS": "" if own else wide.address},
    )
    if moment == "load":
        wait_until(lambda: "the ranks run in" in server.log or ray_is_up(server), 60, "the start")
    else:
        server.wait_until_ready()
    opened = stream(server, LONG) if moment == "generation" else None
    port = port_of(server)
    processes = [server.parent, *server.descendants()]
    server.signal(end)
    server.wait(20)
    wait_until_gone(processes, 5)
    wait_until(lambda: not workers(wide), 5, "the end of the ranks")
    assert_port_is_free(port)
    if opened is not None:
        opened.join(10)
    wait_until(lambda: traces() <= before, 5, f"the end of {traces() - before}")


def traces() -> set[str]:
    """What may be left where everybody writes."""
    memory = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return memory | {f"/tmp/{name}" for name in os.listdir("/tmp") if name.startswith("fourfold-")}


def workers(cluster: RayCluster) -> set[int]:
    """Ranks in actors of a cluster."""
    found = set()
    for pid in members(cluster.session):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(psutil.Process(pid).cmdline()).startswith("fourfold worker") and still_runs(pid):
                found.add(pid)
    return found


def ray_is_up(server: Server) -> bool:
    return any("raylet" in process.name() for process in server.descendants())
