"""What every executor must do. An author writes ``class TestMine(ExecutorConformance): name = "mine"``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.config.timeout_config import TimeoutConfig
from fourfold.contracts.executor import Executor
from fourfold.entries import ExecutorContext, ExecutorEntry
from fourfold.errors import (
    ConfigError,
    EngineError,
    ExecutorClosed,
    ExecutorFailed,
    RpcTimeout,
    Unsupported,
    WorkerError,
)
from fourfold.plugins import load_plugins
from fourfold.testing.conformance import Conformance
from fourfold.testing.workers import plugin_manifest, scaled_rank

ECHO = "fourfold.testing.workers:EchoWorker"
UNBUILDABLE = "fourfold.testing.workers:UnbuildableWorker"
MEBIBYTE = 1 << 20
PROMPTLY = 2.0
"""Seconds within which an error or a death must reach the caller."""
PATIENTLY = 30.0
"""Seconds after which a test gives up."""


class ExecutorConformance(Conformance):
    """The executor contract, on ranks that need no model and no torch."""

    name: ClassVar[str]
    """The entry's name."""
    world_size: ClassVar[int] = 2
    """Ranks to test with; 1 for an executor of one rank."""

    @pytest.fixture
    def entry(self) -> ExecutorEntry:
        """The entry, found through its entry point, so that packaging is tested too."""
        return load_plugins().executors()[self.name]

    @pytest.fixture
    def executor(self, entry: ExecutorEntry) -> Iterator[Executor]:
        """A started executor."""
        executor = entry.build(self.context())
        yield executor
        executor.shutdown()

    @property
    def last(self) -> int:
        """The last rank."""
        return self.world_size - 1

    def context(self, worker: str = ECHO) -> ExecutorContext:
        """What an executor of ``world_size`` ranks is built from."""
        config = EngineConfig(
            parallel=ParallelConfig(tensor_parallel_size=self.world_size), timeouts=TimeoutConfig(rpc_timeout=PATIENTLY)
        )
        return ExecutorContext(config=config, layout=config.parallel.layout, worker=worker)

    # --- shape of a call ---------------------------------------------------------------------------------------

    def test_it_says_what_it_is(self, executor: Executor) -> None:
        assert executor.world_size == self.world_size
        assert executor.output_rank == self.context().layout.output_rank
        assert executor.max_in_flight >= 1

    def test_it_suits_what_it_is_tested_with(self, entry: ExecutorEntry) -> None:
        suits = entry.suits(self.context().config)
        assert suits.score > 0, suits.reason

    def test_replies_come_in_rank_order(self, executor: Executor) -> None:
        assert executor.collective_rpc("who") == [(rank, self.world_size) for rank in range(self.world_size)]

    def test_arguments_reach_every_rank(self, executor: Executor) -> None:
        replies = executor.collective_rpc("echo", args=(1, "two"), kwargs={"three": [3.5, None]})
        assert replies == [{"args": (1, "two"), "kwargs": {"three": [3.5, None]}}] * self.world_size

    def test_one_rank_may_reply(self, executor: Executor) -> None:
        assert executor.collective_rpc("who", reply_rank=self.last) == (self.last, self.world_size)

    def test_an_aggregate_folds_all_replies_in_rank_order(self, executor: Executor) -> None:
        folded = executor.collective_rpc("who", aggregate=lambda replies: [rank for rank, _ in replies])
        assert folded == list(range(self.world_size))

    def test_non_block_gives_a_future(self, executor: Executor) -> None:
        future = executor.collective_rpc("identity", args=(5,), non_block=True)
        assert isinstance(future, Future)
        assert future.result(PATIENTLY) == [5] * self.world_size

    def test_futures_keep_their_calls_apart(self, executor: Executor) -> None:
        futures = [
            executor.collective_rpc("identity", args=(number,), reply_rank=0, non_block=True)
            for number in range(executor.max_in_flight)
        ]
        assert [future.result(PATIENTLY) for future in futures] == list(range(executor.max_in_flight))

    def test_a_deferred_reply_holds_up_no_other_call(self, executor: Executor) -> None:
        if executor.max_in_flight < 2:
            pytest.skip("this executor has one call in the air at most")
        for rank in (None, self.last):
            begun = executor.collective_rpc("begin", args=(5,), reply_rank=rank, non_block=True)
            failing = executor.collective_rpc("begin", args=(5,), kwargs={"fails": True}, reply_rank=0, non_block=True)
            executor.collective_rpc("finish")
            assert begun.result(PATIENTLY) == ([5] * self.world_size if rank is None else 5)
            with pytest.raises(WorkerError, match="failed later on purpose") as caught:
                failing.result(PATIENTLY)
            assert (caught.value.phase, caught.value.type_name) == ("begin", "ValueError")
        assert executor.collective_rpc("begin", args=("now",)) == ["now"] * self.world_size

    def test_arrays_and_tuples_arrive_as_they_were(self, executor: Executor) -> None:
        array = np.arange(6, dtype=np.int16).reshape(2, 3)
        for value, found in executor.collective_rpc("identity", args=([(1, b"2"), array],)):
            assert value == (1, b"2")
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)

    def test_sixteen_mebibytes_travel_both_ways(self, executor: Executor) -> None:
        sent = os.urandom(MEBIBYTE) * 16
        for reply in executor.collective_rpc("identity", args=(sent,)):
            assert reply == sent
        for rank, reply in enumerate(executor.collective_rpc("make_bytes", args=(16 * MEBIBYTE,))):
            assert reply == bytes([rank]) * (16 * MEBIBYTE)

    def test_arguments_are_copies(self, executor: Executor) -> None:
        sent = [1]
        for reply in executor.collective_rpc("identity", args=(sent,)):
            reply.append(2)
        assert sent == [1]

    # --- functions as methods ------------------------------------------------------------------------------------

    def test_a_function_travels_by_name(self, executor: Executor) -> None:
        replies = executor.collective_rpc(scaled_rank, args=(10,), kwargs={"offset": 1})
        assert replies == [10 * rank + 1 for rank in range(self.world_size)]

    def test_lambdas_and_closures_are_refused_by_name(self, executor: Executor) -> None:
        def closure(worker: Any) -> int:
            return executor.world_size

        unnamed: Callable[..., Any] = lambda worker: 1  # noqa: E731
        with pytest.raises(ConfigError, match="lambda"):
            executor.collective_rpc(unnamed)
        with pytest.raises(ConfigError, match="closure"):
            executor.collective_rpc(closure)
        assert executor.collective_rpc("who", reply_rank=0) == (0, self.world_size)

    def test_ranks_find_the_same_plugins(self, executor: Executor) -> None:
        ours = [(row.plugin, row.distribution, row.version) for row in load_plugins().manifest]
        for theirs in executor.collective_rpc(plugin_manifest):
            assert theirs == ours

    # --- errors --------------------------------------------------------------------------------------------------

    def test_an_error_on_any_rank_reaches_the_caller(self, executor: Executor) -> None:
        for rank in range(self.world_size):
            for reply_rank in (None, 0, self.last):
                started = time.monotonic()
                with pytest.raises(WorkerError) as caught:
                    executor.collective_rpc("fail", args=(rank,), reply_rank=reply_rank)
                assert time.monotonic() - started < PROMPTLY
                error = caught.value
                assert (error.rank, error.phase, error.type_name) == (rank, "fail", "ValueError")
                assert error.message == f"rank {rank} failed on purpose"
                assert "in fail" in error.traceback

    def test_an_error_reaches_a_future(self, executor: Executor) -> None:
        future = executor.collective_rpc("fail", args=(self.last,), reply_rank=0, non_block=True)
        with pytest.raises(WorkerError, match="failed on purpose"):
            future.result(PATIENTLY)

    def test_calls_go_on_after_an_error(self, executor: Executor) -> None:
        with pytest.raises(WorkerError):
            executor.collective_rpc("fail", args=(0,))
        assert executor.collective_rpc("identity", args=("next",)) == ["next"] * self.world_size

    def test_an_unknown_method_is_an_error_that_names_it(self, executor: Executor) -> None:
        with pytest.raises(WorkerError, match="no_such_method"):
            executor.collective_rpc("no_such_method")
        with pytest.raises(WorkerError, match="__init__"):
            executor.collective_rpc("__init__")

    def test_what_cannot_travel_is_refused(self, executor: Executor) -> None:
        with pytest.raises(Unsupported, match="object"):
            executor.collective_rpc("identity", args=(object(),))
        with pytest.raises(WorkerError, match="object"):
            executor.collective_rpc("unsendable")
        assert executor.collective_rpc("identity", args=(1,), reply_rank=0) == 1

    def test_a_worker_that_cannot_be_built_is_an_error_that_says_why(self, entry: ExecutorEntry) -> None:
        with pytest.raises(Exception, match="cannot be built on purpose"):
            entry.build(self.context(UNBUILDABLE)).collective_rpc("who")

    # --- deadlines -----------------------------------------------------------------------------------------------

    def test_a_timeout_names_the_ranks_that_are_missing(self, executor: Executor) -> None:
        with pytest.raises(RpcTimeout) as caught:
            executor.collective_rpc("wait", args=(0.5, self.last), timeout=0.1)
        assert caught.value.missing_ranks == (self.last,)
        assert isinstance(caught.value, TimeoutError)

    def test_a_late_reply_is_never_taken_for_the_next(self, executor: Executor) -> None:
        with pytest.raises(RpcTimeout):
            executor.collective_rpc("wait", args=(0.3, self.last), timeout=0.1)
        for number in range(5):
            assert executor.collective_rpc("identity", args=(number,)) == [number] * self.world_size

    # --- many callers --------------------------------------------------------------------------------------------

    def test_eight_threads_get_their_own_replies(self, executor: Executor) -> None:
        def call(thread: int) -> list[Any]:
            return [executor.collective_rpc("identity", args=([thread, number],)) for number in range(25)]

        with ThreadPoolExecutor(8) as threads:
            for thread, replies in enumerate(threads.map(call, range(8), timeout=PATIENTLY)):
                assert replies == [[[thread, number]] * self.world_size for number in range(25)]

    def test_a_hundred_cancelled_calls_leave_no_reply_behind(self, executor: Executor) -> None:
        for number in range(100):
            cancelled = executor.collective_rpc("identity", args=(-1,), non_block=True)
            cancelled.cancel()
            assert executor.collective_rpc("identity", args=(number,)) == [number] * self.world_size
            try:
                cancelled.result(PATIENTLY)
            except CancelledError:
                continue

    def test_two_executors_do_not_meet(self, entry: ExecutorEntry, executor: Executor) -> None:
        other = entry.build(self.context())
        try:
            futures = [
                one.collective_rpc("identity", args=(n,), non_block=True) for n, one in enumerate((executor, other))
            ]
            assert [future.result(PATIENTLY) for future in futures] == [[n] * self.world_size for n in range(2)]
        finally:
            other.shutdown()
        assert executor.collective_rpc("identity", args=(3,)) == [3] * self.world_size

    # --- the end -------------------------------------------------------------------------------------------------

    def test_shutdown_twice_is_harmless(self, entry: ExecutorEntry) -> None:
        executor = entry.build(self.context())
        executor.shutdown()
        executor.shutdown()

    def test_a_call_after_shutdown_is_refused(self, executor: Executor) -> None:
        executor.shutdown()
        with pytest.raises(ExecutorClosed, match="who"):
            executor.collective_rpc("who")

    def test_shutdown_is_no_failure(self, executor: Executor) -> None:
        failures: list[EngineError] = []
        executor.on_failure(failures.append)
        executor.shutdown()
        executor.on_failure(failures.append)
        assert failures == []

    def test_nothing_is_left_after_shutdown(self, entry: ExecutorEntry) -> None:
        children, memory = set(psutil.Process().children(recursive=True)), set(os.listdir("/dev/shm"))
        executor = entry.build(self.context())
        executor.collective_rpc("who")
        ours = set(psutil.Process().children(recursive=True)) - children
        executor.shutdown()
        _, alive = psutil.wait_procs(ours, timeout=PATIENTLY)
        assert alive == []
        assert set(os.listdir("/dev/shm")) - memory == set()

    def test_a_lost_rank_fails_the_executor_for_good(self, executor: Executor) -> None:
        failures: list[EngineError] = []
        told = threading.Event()

        def note(error: EngineError) -> None:
            failures.append(error)
            told.set()

        executor.on_failure(note)
        with pytest.raises(EngineError):
            executor.collective_rpc("leave", args=(self.last,))
        assert told.wait(PROMPTLY), "nobody was told within 2 s"
        with pytest.raises(ExecutorFailed):
            executor.collective_rpc("who")
        late: list[EngineError] = []
        executor.on_failure(late.append)
        assert late == failures
        assert len(failures) == 1
        assert str(self.last) in str(failures[0])

    def test_the_claim_of_processes_is_true(self, entry: ExecutorEntry, executor: Executor) -> None:
        pids = executor.collective_rpc("pid")
        shown = [row["pid"] for row in executor.processes()]
        if "processes" in entry.capabilities:
            assert len({*pids, os.getpid()}) == self.world_size + 1
            assert shown == pids
        else:
            assert set(pids) == {os.getpid()}
            assert shown == []

    def test_a_killed_rank_is_noticed(self, entry: ExecutorEntry, executor: Executor) -> None:
        if "processes" not in entry.capabilities:
            pytest.skip("its ranks have no process of their own")
        told = threading.Event()
        executor.on_failure(lambda error: told.set())
        first = executor.collective_rpc("pid", reply_rank=0)
        future = executor.collective_rpc("wait", args=(PATIENTLY, self.last), non_block=True)
        os.kill(first, signal.SIGKILL)
        assert told.wait(PROMPTLY), "nobody was told within 2 s"
        with pytest.raises(EngineError):
            future.result(PROMPTLY)
