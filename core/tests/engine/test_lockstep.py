"""Engines that step together: real loops and a real coordinator, cores whose steps meet at a barrier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fourfold.addresses import engine_address
from fourfold.contracts.step_part import StepVote
from fourfold.coordinator.coordinator_loop import CoordinatorLoop
from fourfold.coordinator.waves import WaveState
from fourfold.engine.engine_loop import EngineLoop
from fourfold.engine.operations import wake_calls
from fourfold.messages import AddRequest, CallUtility, EngineStats, FinishReason, RequestOutput
from fourfold.process_messages import ForgetClient
from fourfold.sampling_params import SamplingParams
from fourfold.supervision.deployment_state import DeploymentState, write_state

NUM_ENGINES = 3
DEADLINE = 20.0


class Meeting:
    """Where the votes of one step are reduced; it breaks when an engine does not come."""

    def __init__(self) -> None:
        self._votes: list[StepVote | None] = [None] * NUM_ENGINES
        self._barrier = threading.Barrier(NUM_ENGINES, timeout=DEADLINE)

    def reduce(self, engine: int, vote: StepVote) -> StepVote:
        self._votes[engine] = vote
        self._barrier.wait()
        reduced = StepVote(has_work=False, may_pause=True)
        for one in self._votes:
            assert one is not None
            reduced = reduced.reduce(one)
        self._barrier.wait()
        return reduced


class Core:
    """A request takes as many steps as its prompt has tokens."""

    def __init__(self, engine: int, meeting: Meeting) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.mode: str | None = None
        self.paused = False
        self.operations: list[str] = []
        self._engine = engine
        self._meeting = meeting

    @property
    def has_work(self) -> bool:
        return bool(self.left) and self.mode != "keep"

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.left), num_steps=self.steps, paused=self.paused)

    def pause(self, mode: str) -> Mapping[int, list[RequestOutput]]:
        self.mode = mode
        return {}

    def confirm_pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.mode, self.paused = None, False

    def settle(self) -> Iterator[Mapping[int, list[RequestOutput]]]:
        return iter(())

    def abort_client(self, client: int, died: float) -> None:
        self.left.clear()

    def sleep(self, level: int) -> None:
        assert self.paused
        self.operations.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        assert self.paused
        self.operations.append("wake_up")

    def add(self, request: AddRequest) -> RequestOutput | None:
        self.left[request.request_id] = len(request.prompt_token_ids)
        return None

    def step(self) -> Mapping[int, list[RequestOutput]]:
        raise AssertionError("a step without the others")

    def step_together(self, vote: StepVote) -> tuple[Mapping[int, list[RequestOutput]], StepVote]:
        assert vote.has_work or not self.has_work
        reduced = self._meeting.reduce(self._engine, vote)
        self.steps += 1
        if self.mode == "keep":
            return {}, reduced
        ended = [name for name, left in self.left.items() if left == 1]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return {0: [RequestOutput(request_id=name, finish_reason=FinishReason.LENGTH) for name in ended]}, reduced

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the loop uses {name}")

    def prefix_marks(self) -> bytes:
        return b""


class Deployment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meeting = Meeting()
        self.cores = [Core(engine, meeting) for engine in range(NUM_ENGINES)]
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client = self.context.socket(zmq.PULL)
        self.client.bind(f"ipc://{folder}/api-0")
        self.senders = [self.context.socket(zmq.PUSH) for _ in range(NUM_ENGINES)]
        for engine, sender in enumerate(self.senders):
            sender.connect(engine_address(folder, engine, 1))
        self.loops = [
            EngineLoop(
                core,
                run_directory=folder,
                engine=engine,
                incarnation=1,
                num_api_servers=1,
                coordinated=True,
                lockstep=True,
            )
            for engine, core in enumerate(self.cores)
        ]
        self.coordinator = self.start_coordinator()
        self.threads = [threading.Thread(target=loop.run, daemon=True) for loop in self.loops]
        for thread in self.threads:
            thread.start()

    def start_coordinator(self) -> tuple[CoordinatorLoop, threading.Thread]:
        loop = CoordinatorLoop(self.folder, num_engines=NUM_ENGINES, num_clients=1)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        return loop, thread

    def end_coordinator(self) -> None:
        loop, thread = self.coordinator
        loop.stop()
        thread.join(DEADLINE)
        loop.close()

    def run(self, engine: int, name: str, steps: int) -> None:
        message = AddRequest(request_id=name, client=0, prompt_token_ids=[1] * steps, sampling=SamplingParams())
        self.senders[engine].send(msgspec.msgpack.encode(message))

    def call(self, engine: int, method: str, **arguments: Any) -> None:
        message = CallUtility(client=0, call_id=engine, method=method, arguments=arguments)
        self.senders[engine].send(msgspec.msgpack.encode(message))

    def answers(self, count: int) -> list[dict[str, Any]]:
        """Of calls; outputs meanwhile are dropped."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            assert self.client.poll(int(1000 * DEADLINE)), f"nobody answered beyond {found}"
            message = msgspec.msgpack.decode(self.client.recv())
            if "call_id" in message:
                found.append(message)
        return found

    def resume(self) -> None:
        for engine in range(NUM_ENGINES):
            self.call(engine, "resume")
        self.answers(NUM_ENGINES)

    def wait_for(self, *names: str) -> None:
        missing = set(names)
        while missing:
            assert self.client.poll(int(1000 * DEADLINE)), f"nothing came of {missing}"
            message = msgspec.msgpack.decode(self.client.recv())
            missing -= {output["request_id"] for output in message.get("outputs", [])}

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + DEADLINE, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}"
            pause.wait(0.001)

    def wait_until_all_sleep(self) -> None:
        self.wait_until(self._all_sleep, "the end of a wave")

    def _all_sleep(self) -> bool:
        idle = self.coordinator[0]._waves.state is WaveState.IDLE
        waves = [loop._wave for loop in self.loops]
        return idle and not any(core.has_work for core in self.cores) and all(w and w.epoch is None for w in waves)

    def close(self) -> None:
        self.wait_until_all_sleep()
        for loop in self.loops:
            loop.stop()
        for thread in self.threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        self.end_coordinator()
        for loop in self.loops:
            loop.close()
        self.context.destroy(linger=0)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.close()


def test_an_idle_engine_steps_as_long_as_another_has_work(deployment: Deployment) -> None:
    for number in range(30):
        deployment.run(number % 2, str(number), 3)
        deployment.wait_for(str(number))
    deployment.run(2, "late", 50)
    deployment.run(0, "short", 5)
    deployment.wait_for("late", "short")
    assert deployment.cores[2].steps >= 30 * 3 + 50


def test_steps_are_equal_once_all_sleep(deployment: Deployment) -> None:
    for number in range(20):
        deployment.run(number % NUM_ENGINES, f"first {number}", 1 + number % 4)
    deployment.wait_for(*(f"first {number}" for number in range(20)))
    deployment.wait_until_all_sleep()
    assert len({core.steps for core in deployment.cores}) == 1


def test_engines_sleep_once_all_have_come_to_a_stop(deployment: Deployment) -> None:
    deployment.call(1, "sleep", level=1)
    assert "sleep of engines that step together needs a pause first" in deployment.answers(1)[0]["error"]
    deployment.run(2, "long", 300)
    deployment.wait_until(lambda: deployment.cores[2].steps > 20, "steps")
    deployment.call(0, "pause", mode="keep")
    deployment.call(1, "pause", mode="keep")
    deployment.wait_until(lambda: deployment.cores[2].steps > 60, "the wave to go on until all are asked")
    assert not any(core.paused for core in deployment.cores)
    deployment.call(2, "pause", mode="keep")
    assert [answer["error"] for answer in deployment.answers(3)] == [None] * 3
    assert len({core.steps for core in deployment.cores}) == 1
    left = deployment.cores[2].left["long"]
    for engine in range(NUM_ENGINES):
        deployment.call(engine, "sleep", level=1)
    assert [answer["error"] for answer in deployment.answers(3)] == [None] * 3
    assert [core.operations for core in deployment.cores] == [["sleep 1"]] * 3
    deployment.run(1, "late", 2)
    for engine in range(NUM_ENGINES):
        assert deployment.cores[2].left["long"] == left
        deployment.call(engine, "resume")
    deployment.wait_for("long", "late")


def test_engines_that_are_awake_can_be_woken(deployment: Deployment) -> None:
    deployment.run(1, "long", 200)
    for method, arguments in wake_calls(()):
        for engine in range(NUM_ENGINES):
            deployment.call(engine, method, **arguments)
        assert [answer["error"] for answer in deployment.answers(3)] == [None] * 3
    deployment.wait_for("long")


def test_a_pause_waits_for_all_requests_and_is_reached_by_those_without_any(deployment: Deployment) -> None:
    deployment.run(0, "short", 40)
    deployment.wait_until(lambda: deployment.cores[0].steps > 3, "steps")
    for engine in range(NUM_ENGINES):
        deployment.call(engine, "pause", mode="wait")
    assert [answer["error"] for answer in deployment.answers(3)] == [None] * 3
    assert deployment.cores[0].left == {}
    deployment.resume()


def test_what_one_pause_keeps_another_waits_for(deployment: Deployment) -> None:
    deployment.run(1, "kept", 300)
    deployment.wait_until(lambda: deployment.cores[1].steps > 3, "steps")
    for mode, left in (("keep", 1), ("wait", 0), ("wait", 0)):
        for engine in range(NUM_ENGINES):
            deployment.call(engine, "pause", mode=mode)
        assert [answer["error"] for answer in deployment.answers(3)] == [None] * 3
        assert len(deployment.cores[1].left) == left
    assert len({core.steps for core in deployment.cores}) == 1
    deployment.resume()


def test_a_pause_is_given_up_with_the_server_that_wanted_it(deployment: Deployment) -> None:
    for engine in range(2):
        deployment.call(engine, "pause", mode="keep")
    deployment.wait_until(lambda: deployment.cores[0].mode == deployment.cores[1].mode == "keep", "both to know")
    for loop in deployment.loops:
        loop.order(ForgetClient(client=0, died=time.time()))
    deployment.wait_until(lambda: all(core.mode is None for core in deployment.cores), "both to give up")
    deployment.run(0, "after", 3)
    deployment.wait_until(lambda: deployment.cores[0].steps > 3 and not deployment.cores[0].left, "the request")


@pytest.mark.parametrize("noted", [False, True])
def test_a_stop_that_nobody_has_noted_ends_with_its_server(
    deployment: Deployment, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in range(NUM_ENGINES):
        deployment.call(engine, "pause", mode="wait")
    deployment.answers(3)
    if noted:
        write_state(deployment.folder, DeploymentState(paused=True))
    heard: list[int] = []

    def forget(loop: EngineLoop, client: int, died: float) -> None:
        EngineLoop._forget_pauses(loop, client, died)
        heard.append(client)

    for loop in deployment.loops:
        monkeypatch.setattr(loop, "_forget_pauses", partial(forget, loop))
        loop.order(ForgetClient(client=0, died=time.time()))
    deployment.wait_until(lambda: heard == [0] * NUM_ENGINES, "all to hear of it")
    assert [core.paused for core in deployment.cores] == [noted] * NUM_ENGINES
    if noted:
        deployment.resume()
    deployment.run(0, "after", 3)
    deployment.wait_for("after")


def test_a_pause_that_not_all_reach_is_given_up_in_words(deployment: Deployment) -> None:
    deployment.call(0, "pause", mode="keep")
    deployment.call(0, "resume")
    answers = deployment.answers(2)
    assert {answer["error"] for answer in answers} == {None, "the engine went on before it had come to a stop"}


def test_a_new_coordinator_hears_of_work_that_the_last_one_has_lost(deployment: Deployment) -> None:
    deployment.run(0, "before", 2)
    deployment.wait_for("before")
    deployment.end_coordinator()
    deployment.run(1, "meanwhile", 2)
    deployment.coordinator = deployment.start_coordinator()
    deployment.wait_for("meanwhile")
