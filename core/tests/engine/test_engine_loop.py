from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fourfold.engine.engine_loop import EngineLoop
from fourfold.engine.operations import OPERATIONS
from fourfold.errors import CheckpointError, ExecutorFailed, RequestError
from fourfold.messages import (
    AbortRequests,
    AddRequest,
    CallUtility,
    EngineInput,
    EngineMessage,
    EngineOutputs,
    EngineReport,
    EngineStats,
    FinishReason,
    RequestOutput,
    UtilityReply,
)
from fourfold.process_messages import DrainEngine, ForgetClient
from fourfold.sampling_params import SamplingParams

DEADLINE_MS = 10_000


class FakeCore:
    """Gives each request one token a step, as many as its prompt has."""

    def __init__(self) -> None:
        self.left: dict[str, tuple[int, int]] = {}
        self.arrivals: dict[str, float] = {}
        self.steps = 0
        self.step_seconds = 0.0
        self.aborted: list[str] = []
        self.step_error: Exception | None = None
        self.caches_reset = 0
        self.paused = False
        self.in_the_air: list[Mapping[int, list[RequestOutput]]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.left), num_steps=self.steps, paused=self.paused)

    def pause(self, mode: str) -> Mapping[int, list[RequestOutput]]:
        if mode not in ("wait", "abort"):
            raise RequestError(f"mode is {mode!r}")
        return {}

    def confirm_pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def add(self, request: AddRequest) -> RequestOutput | None:
        if request.request_id == "breaks":
            raise ValueError("from the core")
        if request.request_id == "refused":
            return RequestOutput(request_id="refused", finish_reason=FinishReason.ERROR, error="no room")
        self.left[request.request_id] = (request.client, len(request.prompt_token_ids))
        self.arrivals[request.request_id] = request.arrival_time
        return None

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def abort_client(self, client: int, died: float) -> None:
        owned = [name for name, (owner, _) in self.left.items() if owner == client]
        self.abort([name for name in owned if self.arrivals[name] <= died])

    def prefix_marks(self) -> bytes:
        return b"%4d" % self.steps

    def step(self) -> Mapping[int, list[RequestOutput]]:
        if self.step_error:
            raise self.step_error
        self.steps += 1
        time.sleep(self.step_seconds)
        outputs: dict[int, list[RequestOutput]] = {}
        for name, (client, left) in list(self.left.items()):
            ended = FinishReason.LENGTH if left == 1 else None
            outputs.setdefault(client, []).append(RequestOutput(request_id=name, token_ids=[left], finish_reason=ended))
            self.left[name] = (client, left - 1)
            if ended:
                del self.left[name]
        return outputs

    def settle(self) -> Iterator[Mapping[int, list[RequestOutput]]]:
        while self.in_the_air:
            yield self.in_the_air.pop(0)

    def wake_up(self, tags: list[str]) -> None:
        if tags:
            raise RequestError(f"no tag {tags[0]!r}")

    def discard_weights(self) -> None:
        raise ExecutorFailed("rank 1 was killed by signal 9", rank=1)

    def check_weights(self, model: str) -> None:
        raise CheckpointError(f"no model called {model!r}")

    def reset_prefix_cache(self, **arguments: Any) -> str:
        if arguments:
            raise TypeError("no arguments")
        self.caches_reset += 1
        return "reset"


class Harness:
    """Two API servers' sockets around a loop on a thread."""

    def __init__(self, folder: Path, *, coordinated: bool = False, absent: int | None = None) -> None:
        self.core = FakeCore()
        self.context = zmq.Context()
        self.receivers = []
        for index in range(2):
            receiver = self.context.socket(zmq.PULL)
            if index != absent:
                receiver.bind(f"ipc://{folder}/api-{index}")
            self.receivers.append(receiver)
        self.loop = EngineLoop(
            self.core, run_directory=folder, engine=0, incarnation=7, num_api_servers=2, coordinated=coordinated
        )
        self.coordinator = self.context.socket(zmq.PULL)
        self.coordinator.bind(f"ipc://{folder}/coordinator")
        self.sender = self.context.socket(zmq.PUSH)
        self.sender.connect(f"ipc://{folder}/engine-0-7")
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.closed = False

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def send(self, message: EngineInput) -> None:
        self.sender.send(msgspec.msgpack.encode(message))

    def receive(self, index: int) -> EngineMessage:
        assert self.receivers[index].poll(DEADLINE_MS), "nothing arrived"
        return msgspec.msgpack.decode(self.receivers[index].recv(), type=EngineMessage)

    def outputs(self, index: int, count: int) -> list[RequestOutput]:
        found: list[RequestOutput] = []
        while len(found) < count:
            message = self.receive(index)
            assert isinstance(message, EngineOutputs)
            assert (message.engine, message.incarnation) == (0, 7)
            found += message.outputs
        return found

    def close(self) -> None:
        if self.thread.ident:
            self.loop.stop()
            self.thread.join(10)
            assert not self.thread.is_alive()
        self.context.destroy(linger=0)
        if not self.closed:
            self.loop.close()
        self.closed = True


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    harness.thread.start()
    yield harness
    harness.close()


def request(name: str, tokens: int = 1, client: int = 0, *, arrival_time: float = 0.0) -> AddRequest:
    return AddRequest(
        request_id=name,
        client=client,
        prompt_token_ids=[1] * tokens,
        sampling=SamplingParams(),
        arrival_time=arrival_time,
    )


def test_outputs_go_to_the_server_that_asked(harness: Harness) -> None:
    harness.send(request("a", 3, client=0))
    harness.send(request("b", 2, client=1))
    assert [(o.request_id, o.token_ids) for o in harness.outputs(0, 3)] == [("a", [3]), ("a", [2]), ("a", [1])]
    assert [(o.request_id, o.finish_reason) for o in harness.outputs(1, 2)] == [("b", None), ("b", "length")]


def test_a_step_is_one_message(harness: Harness) -> None:
    message = harness.receive(0)  # stats of the idle engine
    assert isinstance(message, EngineOutputs)
    assert message.outputs == []
    harness.core.left = {str(number): (0, 2) for number in range(5)}
    harness.send(request("one more", 2))
    sizes = []
    while sum(sizes) < 12:
        message = harness.receive(0)
        assert isinstance(message, EngineOutputs)
        sizes.append(len(message.outputs))
    assert sizes == [6, 6]


def test_an_abort_reaches_the_core_and_the_stats_the_servers(harness: Harness) -> None:
    harness.send(request("endless", 1_000_000))
    harness.outputs(0, 2)
    harness.send(AbortRequests(request_ids=["endless", "unknown"]))
    for index in range(2):
        message = harness.receive(index)
        while message.stats.num_running or not message.stats.num_steps:  # type: ignore[union-attr]
            message = harness.receive(index)
    assert harness.core.aborted == ["endless", "unknown"]


def test_a_refused_request_hears_at_once_and_a_broken_one_hurts_nobody(harness: Harness) -> None:
    harness.send(request("refused"))
    harness.send(request("breaks"))
    harness.send(request("fine"))
    texts = {output.request_id: output.error for output in harness.outputs(0, 3)}
    assert texts == {"refused": "no room", "breaks": "the engine cannot take this request: from the core", "fine": None}


def test_unreadable_inputs_are_dropped(harness: Harness) -> None:
    harness.sender.send(b"\xc1nonsense")
    harness.send(request("elsewhere", client=2))
    harness.send(request("fine"))
    assert [output.request_id for output in harness.outputs(0, 1)] == ["fine"]


@pytest.mark.parametrize(
    ("method", "arguments", "result", "error", "status"),
    [
        ("reset_prefix_cache", {}, "reset", None, 500),
        ("reset_prefix_cache", {"x": 1}, None, "TypeError: no arguments", 500),
        ("wake_up", {"tags": []}, None, None, 500),
        ("wake_up", {"tags": ["x"]}, None, "no tag 'x'", 400),
        ("check_weights", {"model": "x"}, None, "no model called 'x'", 400),
        ("shutdown", {}, None, f"no utility called 'shutdown'; there are: {', '.join(sorted(OPERATIONS))}", 500),
    ],
)
def test_utilities_are_answered(
    harness: Harness, method: str, arguments: dict[str, Any], result: Any, error: str | None, status: int
) -> None:
    harness.send(CallUtility(client=1, call_id=5, method=method, arguments=arguments))
    message = harness.receive(1)
    while isinstance(message, EngineOutputs):
        message = harness.receive(1)
    assert message == UtilityReply(engine=0, incarnation=7, call_id=5, result=result, error=error, error_status=status)


def test_an_operation_waits_for_the_steps_in_the_air(harness: Harness) -> None:
    harness.core.in_the_air = [{0: [RequestOutput(request_id=name, token_ids=[1])]} for name in "ab"]
    harness.send(CallUtility(client=0, call_id=5, method="wake_up", arguments={"tags": []}))
    assert [output.request_id for output in harness.outputs(0, 2)] == ["a", "b"]
    message = harness.receive(0)
    while isinstance(message, EngineOutputs):
        message = harness.receive(0)
    assert isinstance(message, UtilityReply)


def test_every_server_hears_of_an_operation_before_its_reply(tmp_path: Path) -> None:
    harness = Harness(tmp_path, coordinated=True)  # so that servers hear nothing else unasked
    harness.thread.start()
    try:
        harness.send(CallUtility(client=0, call_id=5, method="wake_up", arguments={"tags": []}))
        while not isinstance(harness.receive(0), UtilityReply):
            pass
        assert isinstance(harness.receive(1), EngineOutputs)
    finally:
        harness.close()


def test_workers_that_die_in_an_operation_end_the_engine(harness: Harness) -> None:
    harness.send(CallUtility(client=0, call_id=5, method="discard_weights", arguments={}))
    harness.thread.join(10)
    assert str(harness.error) == "rank 1 was killed by signal 9"


def test_an_error_of_a_step_comes_out(harness: Harness) -> None:
    harness.core.step_error = ValueError("the executor broke")
    harness.send(request("a"))
    harness.thread.join(10)
    assert str(harness.error) == "the executor broke"


def test_a_failure_ends_a_loop_that_has_nothing_to_do(harness: Harness) -> None:
    harness.outputs(0, 0)
    harness.loop.fail(ValueError("a rank was killed"))
    harness.thread.join(10)
    assert str(harness.error) == "a rank was killed"


def test_a_failure_after_the_end_is_harmless(harness: Harness) -> None:
    harness.close()
    harness.loop.fail(ValueError("too late"))


def test_a_server_that_reads_nothing_loses_its_requests_and_no_one_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.engine.engine_loop._MAX_QUEUED_OUTPUTS", 10)
    harness = Harness(tmp_path, absent=1)
    try:
        harness.receivers[1].set_hwm(10)
        harness.thread.start()
        harness.send(request("slow", 1_000_000, client=1))
        deadline = time.monotonic() + 10
        while "slow" not in harness.core.aborted:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        harness.send(request("other", 2, client=0))
        assert [output.request_id for output in harness.outputs(0, 2)] == ["other", "other"]
        harness.receivers[1].bind(f"ipc://{tmp_path}/api-1")
        last = harness.outputs(1, 1)[-1]
        while last.error is None:
            last = harness.outputs(1, 1)[-1]
        assert (last.request_id, last.error) == ("slow", "the API server was too slow to take the outputs")
    finally:
        harness.close()


def test_an_idle_loop_sleeps(harness: Harness) -> None:
    harness.outputs(0, 0)
    harness.send(request("a"))
    harness.outputs(0, 1)
    switches = Path(f"/proc/self/task/{harness.thread.native_id}/status")

    def wakeups() -> int:
        (line,) = [line for line in switches.read_text().splitlines() if line.startswith("voluntary")]
        return int(line.split()[1])

    before = wakeups()
    threading.Event().wait(0.5)
    assert wakeups() - before <= 2, f"woke up {wakeups() - before} times in 0.5 s, pid {os.getpid()}"


def test_a_drain_finishes_what_is_there_and_what_still_comes(harness: Harness) -> None:
    harness.send(request("running", 200))
    harness.outputs(0, 1)
    harness.loop.order(DrainEngine())
    harness.send(request("late", 3))
    found = harness.outputs(0, 202)
    assert sorted(output.request_id for output in found if output.finish_reason) == ["late", "running"]
    harness.thread.join(10)
    assert not harness.thread.is_alive()
    assert harness.error is None


def test_the_requests_of_a_dead_server_end_and_its_successor_hears_nothing_of_them(harness: Harness) -> None:
    harness.send(request("dead", 1_000_000, client=0))
    harness.send(request("other", 1_000_000, client=1))
    harness.outputs(0, 2)
    harness.outputs(1, 2)
    harness.loop.order(ForgetClient(client=0, died=1.0))
    deadline = time.monotonic() + 10
    while harness.core.aborted != ["dead"]:
        assert time.monotonic() < deadline
    harness.outputs(1, 2)
    harness.send(request("new", 1, client=0))
    while (output := harness.outputs(0, 1)[-1]).request_id != "new":
        assert output.request_id == "dead"
    assert output.finish_reason is not None


def test_what_a_successor_asks_while_a_long_step_keeps_the_order_waiting_is_its_own(harness: Harness) -> None:
    """Its requests go on, and it hears what the engine refuses."""
    harness.send(request("dead", 1_000_000, client=0, arrival_time=5.0))
    harness.outputs(0, 1)
    stepping, go_on = threading.Event(), threading.Event()
    step = harness.core.step

    def long_step() -> Mapping[int, list[RequestOutput]]:
        harness.core.step = step  # type: ignore[method-assign]
        stepping.set()
        assert go_on.wait(10)
        return step()

    harness.core.step = long_step  # type: ignore[method-assign]
    assert stepping.wait(10)
    harness.loop.order(ForgetClient(client=0, died=6.0))
    harness.send(CallUtility(client=0, call_id=5 * 10**9, method="pause", arguments={"mode": "wait"}))
    harness.send(CallUtility(client=0, call_id=7 * 10**9, method="pause", arguments={"mode": "wait"}))
    harness.send(request("new", 2, client=0, arrival_time=7.0))
    harness.send(request("refused", client=0, arrival_time=7.0))
    assert harness.loop._inputs.poll(DEADLINE_MS)
    go_on.set()
    ended, replies = set(), []
    while ended != {"new", "refused"} or not replies:
        message = harness.receive(0)
        if isinstance(message, EngineOutputs):
            ended |= {output.request_id for output in message.outputs if output.finish_reason}
        else:
            replies.append(message)
    assert [(reply.call_id, reply.error) for reply in replies] == [(7 * 10**9, None)]
    assert harness.core.aborted == ["dead"]


def test_a_coordinator_that_takes_the_place_of_another_hears_how_an_idle_engine_stands(tmp_path: Path) -> None:
    harness = Harness(tmp_path, coordinated=True)
    harness.coordinator.close(0)
    harness.core.step_seconds = 0.06  # a report a step, and more of them than may wait
    harness.thread.start()
    try:
        harness.send(request("long", 25))
        harness.outputs(0, 25)
        harness.coordinator = harness.context.socket(zmq.PULL)
        harness.coordinator.bind(f"ipc://{tmp_path}/coordinator")
        running, deadline = 1, time.monotonic() + 10
        while running:
            assert time.monotonic() < deadline, "it is told of work that has ended"
            if harness.coordinator.poll(100):
                report = msgspec.msgpack.decode(harness.coordinator.recv(), type=EngineReport)
                running = report.stats.num_running + (report.stats.num_steps < 25)
    finally:
        harness.close()


def test_a_coordinator_hears_how_things_stand_and_servers_only_what_they_asked_for(tmp_path: Path) -> None:
    harness = Harness(tmp_path, coordinated=True)
    harness.thread.start()
    try:
        reports = []

        def report() -> EngineReport:
            assert harness.coordinator.poll(DEADLINE_MS)
            reports.append(msgspec.msgpack.decode(harness.coordinator.recv(), type=EngineReport))
            return reports[-1]

        assert (report().incarnation, reports[0].stats.prefix_marks) == (7, b"   0")
        harness.core.step_seconds = 0.005
        harness.send(request("long", 1_000_000))
        before = time.monotonic()
        while time.monotonic() - before < 1.5:
            assert report().engine == 0
        assert 5 <= len(reports) <= 40
        marked = [one.stats.prefix_marks for one in reports if one.stats.prefix_marks is not None]
        assert 2 <= len(marked) <= 4
        harness.send(AbortRequests(request_ids=["long"]))
        while report().stats.num_running:
            pass
        assert not harness.receivers[1].poll(0)
    finally:
        harness.close()
