"""Ranks on the two nodes of a cluster: where they are, what they know, how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.rpc.node_ranks import NodeRanks
from fourfold.testing.processes import still_runs
from fourfold_executor_ray.executor import RayExecutor
from fourfold_executor_ray.messages import Plan
from fourfold_executor_ray.session import members
from fourfold_executor_ray.settings import RaySettings

from .conftest import HERE, RayCluster, started_cluster, wait_until, with_tests_on_path
from .faulty_worker import FAULT

FAULTY = "faulty_worker:FaultyWorker"
NOTICED = 5.0
"""Seconds within which a death must be known."""
PROMPTLY = 5.0
"""Seconds within which nobody may be left."""

Start = Callable[..., RayExecutor]


def note_failures(executor: RayExecutor) -> list[EngineError]:
    failures: list[EngineError] = []
    executor.on_failure(failures.append)
    return failures


def plan_for(address: str) -> Plan:
    return Plan(
        address=address,
        placement="pack",
        namespace="",
        group_name="",
        group_id="",
        labels=("DP0",),
        tp=1,
        replica=0,
        replicas=1,
        timeout=1.0,
        started=0.0,
        folder="",
        log_level="info",
    )


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(still_runs, pids)), f"the end of {pids}", PROMPTLY)


def test_stages_are_on_nodes_of_their_own_and_a_lost_rank_is_named(
    start: Start, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FOO": "1", "RANK": "7", "HOST_IP": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    executor = start(2, 2, worker=FAULTY)
    places = executor.collective_rpc("place")
    first, second = (places[rank][0] for rank in (0, 2))
    assert places == [(first, 0, 2), (first, 1, 2), (second, 0, 2), (second, 1, 2)]
    assert first != second
    names = ["FOO", "RANK", "HOST_IP", "OMP_NUM_THREADS"]  # of the last one Ray has an opinion for each rank
    assert executor.collective_rpc("variables", args=(names,)) == [["1", None, None, os.environ.get(names[3])]] * 4
    assert executor.collective_rpc("meet") == [["0", "1", "2", "3"]] * 4
    rows = executor.processes()
    assert [row["label"] for row in rows] == ["DP0.PP0.TP0", "DP0.PP0.TP1", "DP0.PP1.TP0", "DP0.PP1.TP1"]
    assert [row["node"] for row in rows] == [first, first, second, second]
    titles = [" ".join(psutil.Process(row["pid"]).cmdline()).strip() for row in rows]
    assert titles[3] == f"fourfold worker DP0.PP1.TP1 {second}"

    failures = note_failures(executor)
    pids = executor.collective_rpc("pid")
    future = executor.collective_rpc("wait", args=(30, 3), non_block=True)
    os.kill(pids[3], signal.SIGKILL)
    wait_until(lambda: failures, "news of the death", NOTICED)
    assert str(failures[0]).startswith(f"rank 3 on node {second} has ended during wait: ")
    with pytest.raises(ExecutorFailed, match="rank 3 on node"):
        future.result(1)
    wait_until_gone(pids)
    executor.shutdown()
    assert executor.processes() == []


FAULTS = {
    "raise": (WorkerError, r"rank 2 failed in worker construction: ValueError: on purpose"),
    "exit": (ExecutorFailed, r"rank 2 on node \S+ .*during worker construction"),
    "hang": (RpcTimeout, r"from rank\(s\) 2$"),
}


@pytest.mark.parametrize("fault", ["exit", *(pytest.param(one, marks=pytest.mark.long) for one in ("raise", "hang"))])
def test_a_rank_of_another_node_that_cannot_start_is_one_error(
    fault: str, start: Start, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, f"2:{fault}")
    kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message):
        start(2, 2, worker=FAULTY, startup_timeout=12.0)


def test_what_is_missing_is_said_and_has_a_deadline(
    start: Start, cluster: RayCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    text = "needs 8 CPUs, the cluster has 4 free on 2 nodes"
    with pytest.raises(EngineError, match=rf"^{text}, .*nothing came free within 10 s \(--startup-timeout\)"):
        start(2, 4, startup_timeout=10.0)
    assert f"waiting for the Ray cluster: {text}" in caplog.text
    with pytest.raises(EngineError, match="and 4 must be on one node; nothing came free"):
        start(2, 2, startup_timeout=1.5, settings=RaySettings(placement="strict-pack"))


def test_a_stage_that_fits_no_node_is_laid_over_two(start: Start, cluster: RayCluster) -> None:
    places = start(4, worker=FAULTY).collective_rpc("place")
    assert [(local, workers) for _, local, workers in places] == [(0, 2), (1, 2)] * 2


def test_spread_stages_are_on_different_nodes(start: Start, cluster: RayCluster) -> None:
    executor = start(1, 2, worker=FAULTY, settings=RaySettings(placement="spread"))
    assert len({node for node, _, _ in executor.collective_rpc("place")}) == 2


def test_nobody_at_the_address_is_told_at_once(start: Start) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127.0.0.1:1: .*give the HOST:PORT that"):
        start(settings=RaySettings(address="127.0.0.1:1"))
    assert time.monotonic() - began < 10


@pytest.mark.long
def test_a_cluster_with_a_token_lets_in_who_has_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with started_cluster(2) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert len(start(2).collective_rpc("who")) == 2
        monkeypatch.setenv("RAY_AUTH_TOKEN", "fedcba9876543210" * 4)
        with pytest.raises(ConfigError, match=r"cannot be joined: .*; RAY_AUTH_MODE and RAY_AUTH_TOKEN must be as on"):
            start(2)


@pytest.mark.long
def test_a_token_that_the_cluster_does_not_have_is_in_the_refusal(
    start: Start, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with pytest.raises(ExecutorFailed, match=r"rank 0 on node .*: the cluster gave it up, .*; RAY_AUTH_MODE and RAY_A"):
        start(2)


@pytest.mark.long
def test_a_node_with_other_plugins_is_refused_by_name(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray_plugin.py").write_text('FOURFOLD_CONTRACT = ">=1.0,<2"\n')
    metadata = tmp_path / "stray_plugin-7.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stray-plugin\nVersion: 7.1\n")
    (metadata / "entry_points.txt").write_text("[fourfold]\nstray = stray_plugin\n")
    with started_cluster(1) as cluster:
        cluster.add(1, str(tmp_path))
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(ConfigError, match=r"^node \S+ does not fit: .* has stray-plugin 7.1 as plugin 'stray'"):
            start(1, 2)


@pytest.mark.long
def test_a_node_without_this_package_is_named(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "fourfold_executor_ray"
    absent.mkdir()
    (absent / "__init__.py").write_text('raise ModuleNotFoundError("there is no such module")')
    says = (
        r"^rank 1 on node \S+ has ended before it was connected: its process cannot start: ModuleNotFoundError: there "
        r"is no such module; install the same fourfold and plugins on every node$"
    )
    with started_cluster(1) as cluster:
        cluster.add(1, str(tmp_path))
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(ExecutorFailed, match=says):
            start(1, 2)


IN_A_PROGRAM = """
import ray, sys
from ray.util.placement_group import placement_group
sys.path.insert(0, {here!r})
from conftest import make_context
from fourfold_executor_ray.executor import RayExecutor
from fourfold_executor_ray.settings import RaySettings

ray.init(address={address!r}, log_to_driver=False, configure_logging=False)
placement_group([{{"CPU": 1}}] * 2, strategy="STRICT_SPREAD", name="mine")
settings = RaySettings(placement_group="mine")
executor = RayExecutor(make_context(2, worker="faulty_worker:FaultyWorker", settings=settings))
print(len({{node for node, _, _ in executor.collective_rpc("place")}}))
executor.shutdown()
"""


def test_a_program_that_is_connected_brings_its_cluster_and_its_group(shared_cluster: RayCluster) -> None:
    code = IN_A_PROGRAM.format(here=str(HERE), address=shared_cluster.address)
    environment = {name: value for name, value in with_tests_on_path().items() if name != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "2\n"


IN_A_GROUP = """
import sys; sys.path.insert(0, {here!r})
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from conftest import make_context
from fourfold.errors import EngineError
from fourfold_executor_ray.executor import RayExecutor
from fourfold_executor_ray.settings import RaySettings
ray.init(address={address!r}, namespace="ours", configure_logging=False, log_to_driver=False)
group = placement_group([dict(CPU=1)] * 4, name="shared")
ray.get(group.ready())

@ray.remote(num_cpus=1)
class Occupant:
    def come(self):
        return None

strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
occupant = Occupant.options(scheduling_strategy=strategy).remote()
ray.get(occupant.come.remote())

def start(tp, **timeouts):
    return RayExecutor(make_context(tp, settings=RaySettings(placement_group="shared"), **timeouts))

executors = [start(2), start(1)]
print(sum(len(executor.collective_rpc("pid")) for executor in executors))
try:
    start(1, startup_timeout=10.0)
except EngineError as error:
    print(error)
for executor in executors:
    executor.shutdown()
"""


@pytest.mark.long
def test_engines_of_one_program_share_its_group_with_others(shared_cluster: RayCluster) -> None:
    code = IN_A_GROUP.format(here=str(HERE), address=shared_cluster.address)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180)
    assert result.returncode == 0, result.stderr
    ranks, shortage = result.stdout.splitlines()
    assert ranks == "3"
    assert shortage.startswith("the placement group has 0 CPU(s) free for this engine, which needs 1; nothing came")


def test_whoever_does_not_speak_is_named_at_the_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(EngineError, match=f"^the Ray cluster {address} has not answered within 1 s"):
            start(2, startup_timeout=1.0)


def test_both_versions_are_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from fourfold_executor_ray import cluster

    def refuse(**options: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.1\nThis process with:\n    Ray: 2.2\n"
        )

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"started with: Ray: 2\.1 This process with: Ray: 2\.2"):
        cluster.join_cluster(plan_for("auto"))


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_stopped_rank_is_ended_and_named(rank: int, start: Start, cluster: RayCluster) -> None:
    executor = start(2, 2, worker=FAULTY, stall_timeout=2.0)
    node = executor.collective_rpc("place")[rank][0]
    failures = note_failures(executor)
    pids = executor.collective_rpc("pid")
    os.kill(pids[rank], signal.SIGSTOP)
    wait_until(lambda: failures, "news of the stopped rank", 2.0 + NOTICED)
    assert node in str(failures[0])
    # The rank that has its node's connection is lost with that.
    how = "no sign of life for 4 s" if rank == 2 else f"rank {rank} on node {node} was stopped by a signal for 2 s"
    assert how in str(failures[0])
    # Ray asks a process to end before it kills it, and a stopped one does not hear.
    wait_until(lambda: not any(map(still_runs, pids)), f"the end of {pids}")


def test_the_end_of_the_driver_is_the_end_of_the_ranks(start: Start, cluster: RayCluster) -> None:
    executor = start(1, 2, settings=RaySettings(placement="spread"))
    failures = note_failures(executor)
    pids = executor.collective_rpc("pid")
    assert executor._driver is not None
    os.kill(executor._driver.pid, signal.SIGKILL)
    wait_until(lambda: failures, "news of the end", NOTICED)
    assert str(failures[0]) == "the process that speaks to Ray was killed by signal 9 (SIGKILL)"
    wait_until_gone(pids)


def test_a_lost_node_is_named_and_another_one_takes_its_place(start: Start, cluster: RayCluster) -> None:
    executor = start(2, 2, worker=FAULTY)
    node = executor.collective_rpc("place")[2][0]
    failures = note_failures(executor)
    pids = executor.collective_rpc("pid")
    began = time.monotonic()
    cluster.kill(1)
    wait_until(lambda: failures, "news of the node", NOTICED)
    assert time.monotonic() - began < NOTICED
    assert node in str(failures[0])
    wait_until_gone(pids)
    executor.shutdown()
    adding = threading.Thread(target=cluster.add, args=(2,))
    adding.start()
    assert len(start(2, 2).collective_rpc("who")) == 4  # it waits for the node that joins late
    adding.join()


@pytest.mark.parametrize("end", [pytest.param("close", marks=pytest.mark.long), "SIGKILL"])
def test_a_cluster_of_its_own_ends_with_it(end: str, tmp_path: Path) -> None:
    environment = {**with_tests_on_path(), "TMPDIR": "/tmp", "HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, HERE / "own_cluster.py"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        driver, folder = program.stdout.readline().split()
        pids = list(members(int(driver)))
        assert len(pids) > 3
        if end == "SIGKILL":
            program.kill()
        else:
            program.stdin.close()
            assert program.wait(20) == 0
            assert not Path(folder).exists()
        wait_until_gone(pids)
    wait_until(lambda: not Path(folder).exists(), "the end of the folder", PROMPTLY)
    assert list(tmp_path.iterdir()) == [], "Ray wrote to the user's home"


def test_a_cluster_that_was_about_to_start_leaves_no_folder(tmp_path: Path) -> None:
    environment = {**with_tests_on_path(), "TMPDIR": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen([sys.executable, HERE / "own_cluster.py"], env=environment, stdin=subprocess.PIPE) as program:
        started = wait_until(lambda: psutil.Process(program.pid).children(), "the start of the driver")
        program.kill()
    wait_until_gone([process.pid for process in started])
    wait_until(lambda: list(tmp_path.iterdir()) == [], "an empty folder", PROMPTLY)


@pytest.mark.long
def test_a_node_that_cannot_reach_the_executor_says_so(
    start: Start, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable(NodeRanks):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.url = "tcp://127.0.0.1:1"

    monkeypatch.setattr("fourfold_executor_ray.executor.NodeRanks", Unreachable)
    says = r"rank 2 on node \S+ has ended before it was connected: no node answers at tcp://127.0.0.1:1 within"
    with pytest.raises(ExecutorFailed, match=says):
        start(2, 2, startup_timeout=15.0)
