"""What happens when ranks die, hang or fail: one cause, told to everyone, and nobody left."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from fourfold.errors import EngineError, ExecutorClosed, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.testing.processes import still_runs
from fourfold_executor_mp.executor import MpExecutor

from .conftest import DEADLINE, Start, wait_until

PROMPTLY = 2.0


def pids(executor: MpExecutor) -> list[int]:
    found: list[int] = executor.collective_rpc("pid")
    return found


def wait_until_gone(gone: list[int], timeout: float = 5.0) -> None:
    def alive() -> list[int]:
        return [pid for pid in gone if still_runs(pid)]

    wait_until(lambda: not alive(), f"the end of {gone}", timeout)


ENDS = {
    "exit": "rank 1 exited with code 9 during load_model",
    "SIGKILL": "rank 1 was killed by signal 9 (SIGKILL) during load_model",
    "SIGSEGV": "rank 1 was killed by signal 11 (SIGSEGV) during load_model",
}


@pytest.mark.parametrize("what", ENDS)
def test_a_rank_that_ends_in_a_call_is_named_with_how_and_where(start: Start, what: str) -> None:
    executor = start()
    failures: list[EngineError] = []
    executor.on_failure(failures.append)
    ranks = pids(executor)
    began = time.monotonic()
    with pytest.raises(ExecutorFailed, match=re.escape(ENDS[what])) as caught:
        executor.collective_rpc("load_model", args=(1, what), reply_rank=0)
    assert time.monotonic() - began < PROMPTLY
    assert caught.value.rank == 1
    wait_until_gone(ranks)
    assert [str(failure) for failure in failures] == [ENDS[what]]
    late: list[EngineError] = []
    executor.on_failure(late.append)
    assert late == failures
    with pytest.raises(ExecutorFailed, match=re.escape(f"'who' was called, but the executor has failed: {ENDS[what]}")):
        executor.collective_rpc("who")


def test_a_rank_that_is_killed_while_idle_is_noticed(start: Start) -> None:
    executor = start()
    told = threading.Event()
    failures: list[EngineError] = []
    executor.on_failure(failures.append)
    executor.on_failure(lambda error: told.set())
    ranks = pids(executor)
    os.kill(ranks[0], signal.SIGKILL)
    assert told.wait(PROMPTLY)
    assert str(failures[0]) == "rank 0 was killed by signal 9 (SIGKILL) while idle"
    wait_until_gone(ranks)


def test_every_pending_call_fails_at_once(start: Start) -> None:
    executor = start()
    futures = [executor.collective_rpc("wait", args=(30, 0), non_block=True) for _ in range(3)]
    os.kill(executor._processes.children[1].pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(ExecutorFailed, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
            future.result(PROMPTLY)


def test_the_echo_of_a_death_is_not_taken_for_the_cause(start: Start) -> None:
    executor = start()
    with pytest.raises(ExecutorFailed, match=r"rank 0 was killed by signal 9 \(SIGKILL\) during lose_peer"):
        executor.collective_rpc("lose_peer", args=(0, 0.02))


def test_an_error_does_not_wait_for_a_rank_that_hangs(start: Start) -> None:
    executor = start()
    executor.collective_rpc("wait", args=(30, 0), non_block=True)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 failed in load_model: ValueError: on purpose"):
        executor.collective_rpc("load_model", args=(1, "raise"), reply_rank=0)
    executor.shutdown()
    assert time.monotonic() - began < PROMPTLY


@pytest.mark.parametrize("place", ["during wait", "while idle"])
def test_a_rank_that_a_signal_stops_is_named_by_the_stall_limit(start: Start, place: str) -> None:
    executor = start(stall_timeout=0.4)
    failures: list[EngineError] = []
    told = threading.Event()
    executor.on_failure(failures.append)
    executor.on_failure(lambda error: told.set())
    ranks = pids(executor)
    future = executor.collective_rpc("wait", args=(30, 1), non_block=True) if place == "during wait" else None
    os.kill(ranks[1], signal.SIGSTOP)
    assert told.wait(PROMPTLY)
    text = f"rank 1 was stopped by a signal for 0.4 s {place}"
    assert [str(failure) for failure in failures] == [text]
    if future is not None:
        with pytest.raises(ExecutorFailed, match=text):
            future.result(0)
    wait_until_gone(ranks)


def test_a_rank_that_goes_on_in_time_is_left_alone(start: Start) -> None:
    executor = start(stall_timeout=1.0)
    ranks = pids(executor)
    for _ in range(2):
        os.kill(ranks[1], signal.SIGSTOP)
        threading.Event().wait(0.5)
        os.kill(ranks[1], signal.SIGCONT)
        assert len(executor.collective_rpc("who")) == 2
        threading.Event().wait(0.5)  # longer than from one look to the next
    assert len(executor.collective_rpc("who")) == 2


def test_a_stopped_rank_is_named_at_the_deadline_and_ended_with_the_others(start: Start) -> None:
    executor = start()
    ranks = pids(executor)
    os.kill(ranks[1], signal.SIGSTOP)
    with pytest.raises(RpcTimeout, match=r"no reply to 'who' within 0.3 s from rank\(s\) 1") as caught:
        executor.collective_rpc("who", timeout=0.3)
    assert caught.value.missing_ranks == (1,)
    executor.shutdown()
    wait_until_gone(ranks, 0.5)


def test_a_callback_may_shut_the_executor_down(start: Start) -> None:
    executor = start()
    done = threading.Event()

    def shut_down(error: EngineError) -> None:
        executor.shutdown()
        done.set()

    executor.on_failure(shut_down)
    os.kill(executor._processes.children[0].pid, signal.SIGKILL)
    assert done.wait(DEADLINE)
    with pytest.raises(ExecutorClosed):
        executor.collective_rpc("who")


def test_a_callback_of_a_future_cannot_wait_for_replies_that_it_holds_up(start: Start) -> None:
    executor = start()
    began = time.monotonic()
    future = executor.collective_rpc(
        "who", aggregate=lambda replies: executor.collective_rpc("who", timeout=10), non_block=True
    )
    with pytest.raises(EngineError, match="'who' was called by a future's callback or fold"):
        future.result(DEADLINE)
    following: list[Future[Any]] = []
    done = threading.Event()

    def go_on(before: Future[Any]) -> None:
        following.append(executor.collective_rpc("identity", args=(before.result(),), non_block=True))
        done.set()

    executor.collective_rpc("identity", args=(1,), reply_rank=0, non_block=True).add_done_callback(go_on)
    assert done.wait(DEADLINE)
    assert following[0].result(DEADLINE) == [1, 1]
    assert time.monotonic() - began < PROMPTLY


def test_calls_on_their_way_end_with_shutdown(start: Start) -> None:
    executor = start()
    future = executor.collective_rpc("wait", args=(30, 0), non_block=True)
    began = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - began < PROMPTLY
    with pytest.raises(ExecutorClosed, match="'wait' was on its way at shutdown"):
        future.result(0)


def test_three_threads_may_shut_down_at_once(start: Start) -> None:
    executor = start()
    ranks = pids(executor)
    barrier = threading.Barrier(3)
    errors: list[BaseException] = []

    def shut_down() -> None:
        try:
            barrier.wait(DEADLINE)
            executor.shutdown()
            wait_until_gone(ranks, 0.1)  # whoever returns, nobody is left
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shut_down) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert errors == []


def test_signals_to_the_whole_group_leave_the_ranks_alone(start: Start) -> None:
    executor = start()
    for pid in pids(executor):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert len(executor.collective_rpc("who")) == 2
