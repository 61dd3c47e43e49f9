"""Ranks agree on communicators that work: a liar, a sleeper and a cripple are vetoed on all of them, by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from fourfold import hookimpl
from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.distributed import connection
from fourfold.distributed.connection import connect, spans
from fourfold.distributed.model_parallel import ModelParallel
from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.distributed.store import scoped
from fourfold.entries import CommunicatorContext, CommunicatorEntry, Suitability, WorkerContext
from fourfold.errors import ConfigError, EngineError, FourfoldError, RpcTimeout, Unsupported
from fourfold.plugins import PluginRegistry, load_plugins
from fourfold.testing.rank_process import Rank
from fourfold.testing.ranks import RankPool

CPU = torch.device("cpu")
Pool = Callable[[int], RankPool]


def build_plain(context: CommunicatorContext, kind: type[ProcessGroupCommunicator] = ProcessGroupCommunicator) -> Any:
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=context.timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(scoped(context.store, "g"), context.rank, len(context.ranks), options)
    return kind(group, context, graph_safe=False, deterministic=True, scatters_sums=False)


class Liar(ProcessGroupCommunicator):
    """Flips one element on the last rank."""

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        summed = super().all_reduce(tensor, channel=channel)
        if self.rank == self.world_size - 1 and summed.numel() > 5:
            summed.view(-1)[5] += 1
        return summed


def build_liar(context: CommunicatorContext) -> Any:
    return build_plain(context, Liar)


def build_sleeper(context: CommunicatorContext) -> Any:
    if context.rank == 1:
        threading.Event().wait(20)
    return build_plain(context)


class Staller(ProcessGroupCommunicator):
    """Never comes back from a sum on the last rank."""

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        if self.rank == self.world_size - 1:
            threading.Event().wait(20)
        return super().all_reduce(tensor, channel=channel)


def build_staller(context: CommunicatorContext) -> Any:
    return build_plain(context, Staller)


def build_slow(context: CommunicatorContext) -> Any:
    """Takes longer on one rank than a self-test may."""
    if context.rank == 1:
        threading.Event().wait(2)
    return build_plain(context)


def build_cripple(context: CommunicatorContext) -> Any:
    if context.rank == 1:
        raise Unsupported("rank 1 has lost a leg")
    return build_plain(context)


def build_described(context: CommunicatorContext) -> Any:
    """Tells nothing but its context, so it fails."""
    raise Unsupported(f"one host: {context.one_host}, from {context.address}")


BUILDS = {
    "described": build_described,
    "plain": build_plain,
    "liar": build_liar,
    "sleeper": build_sleeper,
    "staller": build_staller,
    "slow": build_slow,
    "cripple": build_cripple,
}


def registry_of(names: list[str], one_host: tuple[str, ...] = ()) -> PluginRegistry:
    """Communicators of these names, the first one preferred; those of ``one_host`` claim to connect no other ranks."""

    def suits(score: int) -> Callable[[EngineConfig], Suitability]:
        return lambda config: Suitability(score=score, reason="for the test")

    class Offers:
        @hookimpl
        def fourfold_communicators(self) -> list[CommunicatorEntry]:
            return [
                CommunicatorEntry(
                    name=name,
                    build=BUILDS[name],
                    suits=suits(len(names) - index),
                    capabilities=frozenset({"one_host"} if name in one_host else ()),
                )
                for index, name in enumerate(names)
            ]

    return load_plugins(entry_points=False, extra={"offers": Offers()})


def connected(
    rank: Rank, names: list[str], *, comm: str = "auto", pp: int = 1, debug: bool = False, self_test: float = 10.0
) -> ModelParallel:
    tp = rank.world_size // pp
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, debug_collectives=debug),
        backends=BackendConfig(comm=comm),
        timeouts=TimeoutConfig(startup_timeout=30.0, stall_timeout=4.0, self_test_timeout=self_test),
    )
    context = WorkerContext(
        config=config, layout=config.parallel.layout, rank=rank.rank, open_store=lambda: scoped(rank.store, "engine")
    )
    return connect(context, registry_of(names), device=CPU)


def outcome(
    rank: Rank, names: list[str], comm: str = "auto", self_test: float = 10.0, build: float = 30.0
) -> list[Any]:
    """[chosen communicator or error, warnings]."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    connection.log.addHandler(handler)
    before, connection.BUILD_TIMEOUT = connection.BUILD_TIMEOUT, build
    try:
        parallel = connected(rank, names, comm=comm, self_test=self_test)
    except FourfoldError as error:
        return [f"{type(error).__name__}: {error}", records]
    finally:
        connection.log.removeHandler(handler)
        connection.BUILD_TIMEOUT = before
    found = parallel.tp.all_reduce(torch.ones(3))
    assert found.tolist() == [rank.world_size] * 3
    parallel.close()
    return [parallel.communicators, records]


def test_the_best_that_works_is_taken(rank_pool: Pool) -> None:
    assert rank_pool(2).run(outcome, ["plain", "liar"]) == [["plain", []]] * 2


def test_wrong_data_is_vetoed_by_name_and_reason(rank_pool: Pool) -> None:
    for chosen, warnings in rank_pool(2).run(outcome, ["liar", "plain"]):
        assert chosen == "plain"
        (warning,) = warnings
        assert "communicator 'liar' cannot be used for group tp, taking the next one: rank 1: all_reduce of" in warning
        assert "wrong data" in warning
        assert "element 5 is" in warning


def test_what_cannot_be_built_on_one_rank_is_vetoed_on_all(rank_pool: Pool) -> None:
    for chosen, warnings in rank_pool(2).run(outcome, ["cripple", "liar", "plain"]):
        assert chosen == "plain"
        assert "rank 1: rank 1 has lost a leg" in warnings[0]
        assert len(warnings) == 2


def test_a_hang_is_vetoed_by_name_and_reason(rank_pool: Pool) -> None:
    for chosen, (warning,) in rank_pool(2).run(outcome, ["staller", "plain"], "auto", 1.0):
        assert chosen == "plain"
        assert "communicator 'staller' cannot be used for group tp, taking the next one: rank" in warning
        assert "it did not finish its self-test within 1 s (--self-test-timeout)" in warning


def test_building_has_a_deadline_of_its_own(rank_pool: Pool) -> None:
    assert rank_pool(2).run(outcome, ["slow", "plain"], "auto", 1.0) == [["slow", []]] * 2
    for chosen, (warning,) in rank_pool(2).run(outcome, ["sleeper", "plain"], "auto", 10.0, 1.0):
        assert chosen == "plain"
        assert "it was not built within 1 s" in warning


def test_a_named_one_that_fails_is_an_error(rank_pool: Pool) -> None:
    for found, _ in rank_pool(2).run(outcome, ["liar", "plain"], "liar"):
        assert found.startswith("ConfigError: communicator 'liar' cannot be used for group tp: rank 1: all_reduce")
    for found, _ in rank_pool(2).run(outcome, ["liar"]):
        assert found.startswith("ConfigError: no communicator can run here")
        assert "vetoed: liar: rank 1: all_reduce" in found
    for found, _ in rank_pool(2).run(outcome, ["plain"], "plane"):
        assert "no communicator called 'plane'; did you mean 'plain'?" in found


def over_nodes(rank: Rank, comm: str) -> Any:
    """Two stages of two ranks, each stage on a node of its own."""
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
        backends=BackendConfig(comm=comm),
        timeouts=TimeoutConfig(startup_timeout=30.0),
    )
    node = rank.rank // 2
    context = WorkerContext(
        config=config,
        layout=config.parallel.layout,
        rank=rank.rank,
        node=f"node-{node}",
        address=f"127.0.0.{1 + node}",
        open_store=lambda: scoped(rank.store, "engine"),
    )
    try:
        parallel = connect(context, registry_of(["liar", "plain", "described"], ("liar",)), device=CPU)
    except FourfoldError as error:
        return str(error)
    parallel.close()
    return f"{parallel.communicators}, tp on hosts {parallel.tp.hosts}, pp on hosts {parallel.pp.hosts}"


def test_groups_over_nodes_are_offered_nothing_for_one_host(rank_pool: Pool) -> None:
    assert rank_pool(4).run(over_nodes, "tp=plain,pp=auto") == ["plain, tp on hosts (0, 0), pp on hosts (0, 1)"] * 4


@pytest.mark.parametrize(
    ("hosts", "offered"),
    [((0, 0), ["any", "one"]), ((0, 1), ["any"]), ((0, 0, 1), ["any", "several"]), ((0, 1, 0, 1), ["any", "several"])],
)
def test_what_is_offered_depends_on_the_hosts(hosts: tuple[int, ...], offered: list[str]) -> None:
    capabilities = {"any": {"cpu"}, "one": {"one_host"}, "several": {"several_hosts"}}
    assert [name for name, found in capabilities.items() if spans(found, hosts)] == offered


def test_a_communicator_knows_whether_its_group_is_on_one_host_and_the_own_address(rank_pool: Pool) -> None:
    found = rank_pool(4).run(over_nodes, "tp=plain,pp=described")
    assert "rank 0: one host: False, from 127.0.0.1" in found[0]
    assert "rank 1: one host: False, from 127.0.0.1" in found[3]
    assert "one host: True, from 127.0.0.2" in rank_pool(4).run(over_nodes, "tp=described,pp=plain")[2]


def every_group(rank: Rank) -> list[Any]:
    parallel = connected(rank, ["plain", "liar"], comm="tp=plain,pp=plain", pp=2)
    tp, pp = parallel.tp, parallel.pp
    sums = [int(group.all_reduce(torch.tensor([rank.rank]))) for group in (tp, pp)]
    value = tp.broadcast_object({"ids": [1, 2], "of": rank.rank, "weights": torch.arange(3)}, source=1)
    votes = (tp.all_agree(True), tp.all_agree(rank.rank != 3), tp.all_agree(False))
    tensors = {"hidden": torch.full((4, 3), float(rank.rank)), "none": torch.empty(0, 5), "ids": torch.arange(2)}
    if pp.is_first:
        pp.isend_tensors(tensors, 1).wait()
        pp.send(torch.tensor([7]), 1)
        received: list[Any] = []
    else:
        found = pp.irecv_tensors(0, device=CPU).wait()
        assert [str(one.dtype) for one in found.values()] == ["torch.float32", "torch.float32", "torch.int64"]
        received = [list(found), found["hidden"].flatten().tolist()[:2], list(found["none"].shape)]
        assert pp.recv(torch.zeros(1, dtype=torch.int64), 0).item() == 7
    rows = tp.all_to_all(torch.arange(3), send_sizes=[1, 2], receive_sizes=[1 + tp.rank] * 2).tolist()
    shared = parallel.ep.communicator is tp.communicator
    pp.barrier()
    parallel.close()
    parallel.close()
    return [sums, value["of"], value["weights"].tolist(), list(votes), received, rows, shared, parallel.communicators]


def test_all_operations_of_groups_in_two_dimensions(rank_pool: Pool) -> None:
    results = rank_pool(4).run(every_group)
    assert [result[0] for result in results] == [[1, 2], [1, 4], [5, 2], [5, 4]]
    assert [result[1] for result in results] == [1, 1, 3, 3]
    assert all(result[2] == [0, 1, 2] for result in results)
    assert [result[3] for result in results] == [[True, True, False]] * 2 + [[True, False, False]] * 2
    assert [result[4] for result in results[2:]] == [
        [["hidden", "none", "ids"], [float(one)] * 2, [0, 5]] for one in (0, 1)
    ]
    assert [result[5] for result in results] == [[0, 0], [1, 2, 1, 2]] * 2
    assert all(result[6] is True for result in results), "groups of the same ranks share a communicator"
    assert results[0][7] == "plain"


def diverges(rank: Rank, how: str) -> str:
    """Steps of two sums each; rank 1 does something else at step 5."""
    parallel = connected(rank, ["plain"], debug=True)
    tp = parallel.tp
    try:
        for step in range(8):
            parallel.begin_step(step)
            odd = rank.rank == 1 and step == 5
            for number in range(2):
                if odd and number == 0 and how == "skips":
                    continue
                tp.all_reduce(torch.ones(3, 5 if odd and how == "reshapes" else 4))
            if odd and how == "adds":
                tp.broadcast(torch.ones(2))
            if odd and how == "leaves":
                rank.store.wait(["over"])
                return "left"
    except EngineError as error:
        rank.store.set("over", "")
        return f"{type(error).__name__}: {error}"
    finally:
        parallel.close()
    return "nothing noticed"


def test_divergence_names_operation_rank_and_step(rank_pool: Pool) -> None:
    pool = rank_pool(2)
    skipped = pool.run(diverges, "skips")
    assert (
        "rank 0 runs all_reduce float32 [3, 4] in step 5, rank 1 runs all_reduce float32 [3, 4] in step 6" in skipped[0]
    )
    assert skipped[1].startswith("EngineError: collective 12 of group tp differs: rank 1 runs")
    added = pool.run(diverges, "adds")
    assert (
        "rank 0 runs all_reduce float32 [3, 4] in step 6, rank 1 runs broadcast float32 [2] from 0 in step 5"
        in added[0]
    )
    reshaped = pool.run(diverges, "reshapes")
    assert "rank 1 runs all_reduce float32 [3, 5] in step 5, rank 0 runs all_reduce float32 [3, 4]" in reshaped[1]
    left = pool.run(diverges, "leaves")
    assert left[0].startswith(
        "RpcTimeout: no reply to 'all_reduce float32 [3, 4] in step 6 (collective 13 of group tp)'"
    )
    assert left[0].endswith("from rank(s) 1")


def comes_late(rank: Rank) -> str:
    if rank.rank == 1:
        rank.store.wait(["over"])
        return ""
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2), timeouts=TimeoutConfig(startup_timeout=1.0))
    context = WorkerContext(config=config, layout=config.parallel.layout, rank=0, open_store=lambda: rank.store)
    try:
        connect(context, registry_of(["plain"]), device=CPU)
    except RpcTimeout as error:
        return str(error)
    finally:
        rank.store.set("over", "")
    return "nothing"


def test_a_rank_that_never_comes_is_named(rank_pool: Pool) -> None:
    assert rank_pool(2).run(comes_late)[0] == "no reply to 'meeting in group tp' within 1 s from rank(s) 1"


def test_an_executor_without_a_meeting_place_is_told_so() -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    context = WorkerContext(config=config, layout=config.parallel.layout, rank=0)
    with pytest.raises(ConfigError, match="this executor gives them no place to meet"):
        connect(context, registry_of(["plain"]), device=CPU)


def devices_of_threads(rank: Rank) -> list[str]:
    """What is made current, and on which thread, while a group is connected."""
    seen: set[str] = set()
    module: Any = torch.cpu
    before = module.set_device
    module.set_device = lambda device: seen.add(f"{threading.current_thread().name} {device}")
    try:
        connected(rank, ["plain"]).close()
    finally:
        module.set_device = before
    return sorted(seen)


def test_communicators_are_built_and_tested_with_their_device_current(rank_pool: Pool) -> None:
    assert rank_pool(2).run(devices_of_threads) == [["communicator-test cpu"]] * 2
