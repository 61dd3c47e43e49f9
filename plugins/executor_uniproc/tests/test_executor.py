"""What is uniproc's own, beyond the promises of every executor."""

from __future__ import annotations

import threading

import pytest

from fourfold.config.options import build_engine_config
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, ExecutorClosed, RpcTimeout
from fourfold_executor_uniproc.executor import UniprocExecutor
from fourfold_executor_uniproc.plugin import fourfold_executors

ECHO = "fourfold.testing.workers:EchoWorker"
DEADLINE = 20


def build(**options):
    config = build_engine_config(**options)
    return UniprocExecutor(ExecutorContext(config=config, layout=config.parallel.layout, worker=ECHO))


@pytest.fixture
def executor():
    executor = build()
    yield executor
    executor.shutdown()


def test_it_suits_one_rank_only():
    entry = next(entry for entry in fourfold_executors() if entry.name == "uniproc")
    assert entry.suits(build_engine_config(data_parallel_size=4)).score == 100
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        suits = entry.suits(build_engine_config(**sizes))
        assert suits.score == 0
        assert suits.reason.endswith("makes 2; install an executor plugin for several ranks")


def test_several_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"runs one rank, and .* makes 2"):
        build(tensor_parallel_size=2)


def test_a_future_is_done_at_once(executor):
    assert executor.collective_rpc("who", non_block=True).done()
    assert executor.collective_rpc("fail", args=(0,), non_block=True).done()


def test_a_call_runs_in_the_callers_thread(executor):
    assert executor.collective_rpc(thread_of, reply_rank=0) == threading.get_ident()


def test_waiting_for_another_call_counts_against_the_deadline(executor):
    release, inside = threading.Event(), threading.Event()

    def hold(worker_inside=inside, worker_release=release):
        executor._worker.hold = lambda: (worker_inside.set(), worker_release.wait(DEADLINE))
        executor.collective_rpc("hold")

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(DEADLINE)
        with pytest.raises(RpcTimeout, match=r"no reply to 'who' within 0.05 s from rank\(s\) 0"):
            executor.collective_rpc("who", timeout=0.05)
    finally:
        release.set()
        thread.join(DEADLINE)
    assert executor.collective_rpc("who", reply_rank=0) == (0, 1)


def test_shutdown_ends_the_worker_once(executor):
    worker = executor._worker
    executor.shutdown()
    assert worker.was_shut_down
    worker.was_shut_down = False
    executor.shutdown()
    assert not worker.was_shut_down
    with pytest.raises(ExecutorClosed):
        executor.collective_rpc("who", non_block=True).result(0)


def test_a_worker_that_ends_badly_does_not_keep_the_engine_from_ending(executor, caplog):
    executor._worker.shutdown = lambda: 1 / 0
    executor.shutdown()
    assert "rank 0 failed in shutdown" in caplog.text


def test_a_reply_rank_that_is_not_there_is_refused(executor):
    with pytest.raises(ConfigError, match="reply_rank is 1"):
        executor.collective_rpc("who", reply_rank=1)


def test_bytes_are_passed_as_they_are(executor):
    sent = b"x" * 100
    assert executor.collective_rpc("identity", args=(sent,), reply_rank=0) is sent


def thread_of(worker):
    return threading.get_ident()
