"""Several ranks of ``external``: threads that each run the same program, as processes of a launcher would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fourfold.config.options import build_engine_config
from fourfold.config.resolution import resolve
from fourfold.entries import ExecutorContext, WorkerContext
from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.plugins import load_plugins
from fourfold.testing.workers import EchoWorker
from fourfold_executor_uniproc.external import ExternalExecutor
from fourfold_executor_uniproc.launcher import VARIABLES, LaunchedRank, read_launcher
from fourfold_executor_uniproc.plugin import fourfold_executors

DEADLINE = 20.0
PROMPTLY = 2.0

pytestmark = pytest.mark.usefixtures("launched")


class StepWorker(EchoWorker):
    """An EchoWorker with steps."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if context.config.model.served_model_name == (f"broken-{context.rank}",):
            raise ValueError("cannot be built on purpose")
        self.steps: list[bytes] = []

    def execute_model(self, message: bytes) -> bytes:
        self.steps.append(message)
        return b"%d:" % self.rank + message

    def held(self) -> list[bytes]:
        return self.steps

    def hang(self, rank: int) -> None:
        """Raise on ``rank``; the other ranks wait for it, as in a collective."""
        if rank == self.rank:
            raise ValueError("failed on purpose")
        threading.Event().wait(3)


def build(rank: int, world_size: int = 2, **options: Any) -> ExternalExecutor:
    settings = {"seed": 0, "executor": "external", "startup_timeout": DEADLINE, "rpc_timeout": DEADLINE, **options}
    config = build_engine_config(tensor_parallel_size=world_size, **settings)
    worker = f"{__name__}:StepWorker"
    return ExternalExecutor(
        ExecutorContext(config=config, layout=config.parallel.layout, worker=worker),
        LaunchedRank(rank=rank, world_size=world_size, local_rank=rank, hosts_store=False),
    )


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """``resolve_name`` finds the worker here."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[StepWorker.__module__])


def on_ranks(
    program: Callable[[ExternalExecutor, int], Any], *, options: Mapping[int, Mapping[str, Any]] | None = None
) -> list[Any]:
    """What ``program`` returned on each of two ranks, or the error that it ended with."""

    def run(rank: int) -> Any:
        executor = None
        try:
            executor = build(rank, **(options or {}).get(rank, {}))
            return program(executor, rank)
        except EngineError as error:
            return error
        except ConfigError as error:
            return error
        finally:
            if executor is not None:
                executor.shutdown()

    with ThreadPoolExecutor(2) as pool:
        return [future.result(DEADLINE) for future in [pool.submit(run, rank) for rank in range(2)]]


def test_every_rank_sees_what_any_executor_shows() -> None:
    def program(executor: ExternalExecutor, rank: int) -> list[Any]:
        return [
            executor.collective_rpc("who"),
            executor.collective_rpc("who", reply_rank=1),
            executor.collective_rpc("who", aggregate=len),
            executor.collective_rpc("make_bytes", args=(9 << 20,), reply_rank=1) == b"\1" * (9 << 20),
            executor.collective_rpc("execute_model", args=(b"x",), reply_rank=0, non_block=True).result(0),
            executor.processes(),
        ]

    assert on_ranks(program) == [[[(0, 2), (1, 2)], (1, 2), 2, True, b"0:x", []]] * 2


def test_rounds_leave_nothing_in_the_store(agent_store: Any) -> None:
    def program(executor: ExternalExecutor, rank: int) -> int:
        for number in range(20):
            executor.collective_rpc("identity", args=(number,))
        return 0

    before = agent_store.num_keys()
    assert on_ranks(program) == [0, 0]
    assert agent_store.num_keys() - before < 20


def test_an_error_on_any_rank_reaches_all_that_wait_in_a_collective() -> None:
    def program(executor: ExternalExecutor, rank: int) -> Any:
        began = time.monotonic()
        try:
            executor.collective_rpc("hang", args=(1,))
        except WorkerError as error:
            assert time.monotonic() - began < PROMPTLY
            return error.rank, error.phase, error.message, "in hang" in error.traceback

    assert on_ranks(program) == [(1, "hang", "failed on purpose", True)] * 2


def test_a_rank_with_other_prompts_is_named_at_the_first_step_before_it_runs() -> None:
    def program(executor: ExternalExecutor, rank: int) -> Any:
        try:
            executor.collective_rpc("execute_model", args=(b"prompt %d" % rank,), reply_rank=0)
        except ExecutorFailed as error:
            assert executor._worker.steps == []
            with pytest.raises(ExecutorFailed, match="has failed"):
                executor.collective_rpc("who")
            return str(error)

    text = "rank 1 diverged at step 0; give every rank the same prompts, parameters and options, in the same order"
    assert on_ranks(program) == [text, text]


@pytest.mark.parametrize(("debug", "ran"), [(False, 2), (True, 1)])
def test_a_later_step_is_compared_too_beforehand_if_asked_for(debug: bool, ran: int) -> None:
    def program(executor: ExternalExecutor, rank: int) -> Any:
        executor.collective_rpc("execute_model", args=(b"same",), reply_rank=0)
        try:
            executor.collective_rpc("execute_model", args=(b"%d" % rank,), reply_rank=0)
        except ExecutorFailed as error:
            assert len(executor._worker.steps) == ran
            return str(error).partition(";")[0]

    options = {rank: {"debug_collectives": debug} for rank in range(2)}
    assert on_ranks(program, options=options) == ["rank 1 diverged at step 1"] * 2


def test_a_rank_that_ends_early_is_named_at_once() -> None:
    def program(executor: ExternalExecutor, rank: int) -> Any:
        executor.collective_rpc("execute_model", args=(b"same",), reply_rank=0)
        if rank == 1:
            return "ended"
        began = time.monotonic()
        with pytest.raises(ExecutorFailed, match="rank 1 was shut down while the others call 'execute_model'"):
            executor.collective_rpc("execute_model", args=(b"more",), reply_rank=0)
        return time.monotonic() - began < PROMPTLY

    assert on_ranks(program) == [True, "ended"]


def test_a_rank_that_does_not_come_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(RpcTimeout, match=r"no reply to 'plugin discovery' within 0.3 s from rank\(s\) 1"):
        build(0, startup_timeout=0.3)
    assert time.monotonic() - began < DEADLINE


def test_a_worker_that_cannot_be_built_is_told_to_all() -> None:
    options = {rank: {"served_model_name": ("broken-1",)} for rank in range(2)}
    errors = on_ranks(lambda executor, rank: None, options=options)
    text = "rank 1 failed in worker construction: ValueError: cannot be built on purpose (test_external.py, line "
    assert all(str(error).startswith(text) for error in errors), errors


def test_ranks_with_other_options_are_refused() -> None:
    errors = on_ranks(lambda executor, rank: None, options={1: {"max_num_seqs": 3}})
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "rank 1 on" in str(error)
        assert "scheduler.max_num_seqs = 3" in str(error)


# --- the launcher's environment --------------------------------------------------------------------------------------


def reason(**options: Any) -> str:
    entry = next(entry for entry in fourfold_executors() if entry.name == "external")
    return entry.suits(build_engine_config(**options)).reason


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.delenv("RANK")
    with pytest.raises(
        ConfigError, match="'external' cannot run here: RANK, MASTER_PORT are not set; start every rank"
    ):
        resolve(build_engine_config(executor="external", seed=1), load_plugins())


def test_a_seed_is_needed() -> None:
    assert "give all of them the same --seed" in reason(executor="external")
    assert reason(executor="external", seed=0) == "rank 0 of 1 that a launcher started"


def test_it_is_never_chosen_by_itself() -> None:
    assert "only where --executor is 'external'" in reason(seed=0)


def test_the_sizes_must_agree() -> None:
    assert reason(executor="external", seed=0, tensor_parallel_size=2).startswith("WORLD_SIZE is 1, and ")
    config = build_engine_config(tensor_parallel_size=2)
    context = ExecutorContext(config=config, layout=config.parallel.layout)
    launched = LaunchedRank(rank=0, world_size=3, local_rank=0, hosts_store=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 3, and .* makes 2 ranks"):
        ExternalExecutor(context, launched)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "one"}, "RANK is 'one', and the launcher should set it to a number"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2; ranks count from 0"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, str], text: str) -> None:
    environment = {**dict.fromkeys(VARIABLES, "1"), "WORLD_SIZE": "2", **change}
    with pytest.raises(ConfigError, match=text):
        read_launcher(environment)


def test_who_hosts_the_store() -> None:
    environment = {**dict.fromkeys(VARIABLES, "0"), "WORLD_SIZE": "2"}
    assert read_launcher(environment).hosts_store
    assert not read_launcher({**environment, "RANK": "1"}).hosts_store
    assert not read_launcher({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
