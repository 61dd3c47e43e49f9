"""The typed client, over a small executor that answers in bytes."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from fourfold.checkpoints.sharded_index import ShardedTensor, ShardPiece, read_index
from fourfold.checkpoints.tensor_region import TensorRegion
from fourfold.config.options import build_engine_config
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.engine.executor_client import ExecutorClient
from fourfold.errors import ConfigError, WorkerError
from fourfold.messages import InitializeCache, StepMessage, StepOutput, WorkerInfo

SPEC = KVCacheSpec(block_size=16, bytes_per_block=64)
CACHE = KVCacheConfig(groups=(KVCacheGroup(spec=SPEC, layers=(0,)),), num_blocks=8)


class FakeExecutor:
    world_size = 2
    output_rank = 1
    max_in_flight = 2

    def __init__(self):
        self.calls = []
        self.step = Future()
        self.rows = []

    def collective_rpc(self, method, *, args=(), timeout=None, reply_rank=None, non_block=False):
        self.calls.append((method, timeout, reply_rank))
        match method:
            case "load":
                return [msgspec.msgpack.encode(info(rank)) for rank in range(self.world_size)]
            case "initialize_cache":
                assert msgspec.msgpack.decode(args[0], type=InitializeCache).cache == CACHE
            case "execute_model":
                assert msgspec.msgpack.decode(args[0], type=StepMessage).step == 7
                assert non_block
                return self.step
            case "save_sharded_state":
                return [self.saved(rank, args[0]) for rank in range(self.world_size)]
            case "layer_report":
                return [msgspec.msgpack.encode({"rank": rank}) for rank in range(self.world_size)]
            case "stop_profile":
                return ["/traces/rank-0.json", "/traces/rank-1.json"]
        return [None] * self.world_size

    @staticmethod
    def saved(rank, folder):
        Path(folder).mkdir(exist_ok=True)
        piece = ShardPiece(file=f"{rank}", key="a#0", region=TensorRegion((rank,), (1,)))
        return msgspec.msgpack.encode({"a": ShardedTensor(shape=(2,), pieces=[piece])})

    def processes(self):
        return self.rows

    def on_failure(self, callback):
        self.calls.append(("on_failure", callback, None))

    def shutdown(self):
        self.calls.append(("shutdown", None, None))


def info(rank):
    return WorkerInfo(
        rank=rank, device="cpu", dtype="float32", available_bytes=1, kv_cache_specs={0: SPEC}, backends={"a": "b"}
    )


@pytest.fixture
def executor():
    return FakeExecutor()


@pytest.fixture
def client(executor):
    config = build_engine_config(startup_timeout=9, rpc_timeout=3)
    return ExecutorClient(executor, config, started=time.monotonic() - 4)


def test_calls_carry_typed_messages_and_their_deadlines(client, executor):
    assert client.load() == [info(0), info(1)]
    client.initialize_cache(CACHE)
    client.warm_up()
    client.check_health(0.5)
    client.on_failure(print)
    client.shutdown()
    assert executor.calls == [
        ("load", pytest.approx(5, abs=1), None),
        ("initialize_cache", pytest.approx(5, abs=1), None),
        ("warm_up", pytest.approx(5, abs=1), None),
        ("check_health", 0.5, None),
        ("on_failure", print, None),
        ("shutdown", None, None),
    ]


def test_ranks_settle_where_their_processes_are_their_own(client, executor):
    executor.rows = [{"pid": 1}, {"pid": 2}]
    client.warm_up()
    assert [method for method, _, _ in executor.calls] == ["warm_up", "settle"]


def test_a_step_is_answered_by_the_output_rank(client, executor):
    reply = client.execute_model(StepMessage(step=7))
    assert executor.calls == [("execute_model", 3, 1)]
    with pytest.raises(TimeoutError):
        reply.result(0)
    executor.step.set_result(msgspec.msgpack.encode(StepOutput(step=7, token_ids=[1, 2])))
    assert reply.result(0).token_ids == [1, 2]


def test_errors_of_a_step_reach_its_reply(client, executor):
    reply = client.execute_model(StepMessage(step=7))
    executor.step.set_exception(WorkerError(1, "execute_model", "ValueError", "bad"))
    with pytest.raises(WorkerError, match="rank 1 failed in execute_model: ValueError: bad"):
        reply.result(0)


def test_a_reply_that_is_no_step_output_is_an_error(client, executor):
    reply = client.execute_model(StepMessage(step=7))
    executor.step.set_result(b"\xc1")
    with pytest.raises(msgspec.DecodeError):
        reply.result(0)


def test_a_sharded_state_gets_an_index_of_all_ranks(client, executor, tmp_path):
    client.save_sharded_state(tmp_path / "new")
    assert executor.calls == [("save_sharded_state", 9, None)]
    index = read_index(tmp_path / "new")
    assert index.num_ranks == 2
    assert [(piece.file, piece.region.start) for piece in index.tensors["a"].pieces] == [("0", (0,)), ("1", (1,))]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sharded.index.json"]


def test_profiles(client, executor, tmp_path):
    client.start_profile(tmp_path)
    assert client.stop_profile() == [Path("/traces/rank-0.json"), Path("/traces/rank-1.json")]
    assert executor.calls == [("start_profile", None, None), ("stop_profile", 9, None)]


@pytest.mark.parametrize(
    ("asynchronous", "options", "steps"),
    [
        (False, {}, 1),
        (True, {}, 2),
        (True, {"max_in_flight": 1}, 1),
        (False, {"max_in_flight": 2}, 2),
        (False, {"pipeline_parallel_size": 2}, 2),
        (True, {"pipeline_parallel_size": 2}, 2),  # three, if the executor took them
    ],
)
def test_steps_in_flight(executor, monkeypatch, asynchronous, options, steps):
    workers = [msgspec.structs.replace(info(rank), asynchronous=asynchronous) for rank in range(2)]
    monkeypatch.setattr(executor, "collective_rpc", lambda *args, **kwargs: list(map(msgspec.msgpack.encode, workers)))
    client = ExecutorClient(executor, build_engine_config(**options))
    client.load()
    assert client.max_in_flight == steps


def test_more_steps_in_flight_than_the_executor_takes_are_refused(executor):
    with pytest.raises(ConfigError, match="--max-in-flight is 3, and executor 'auto' takes 2 at most"):
        ExecutorClient(executor, build_engine_config(max_in_flight=3))


@pytest.mark.parametrize(("option", "expected"), [("tensor", [{"rank": 0}]), ("pipeline", [{"rank": 0}, {"rank": 1}])])
def test_the_first_rank_of_each_stage_reports_on_its_layers(option, expected):
    client = ExecutorClient(FakeExecutor(), build_engine_config(**{f"{option}_parallel_size": 2}))
    assert client.layer_report() == expected
