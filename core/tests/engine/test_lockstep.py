"""Engines that step together: real loops and a real coordinator, cores whose steps meet at a barrier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
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
from fourfold.messages import AddRequest, CallUtility, EngineStats, FinishReason, RequestOutput
from fourfold.sampling_params import SamplingParams

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
        self._engine = engine
        self._meeting = meeting

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.left), num_steps=self.steps)

    def add(self, request: AddRequest) -> RequestOutput | None:
        self.left[request.request_id] = len(request.prompt_token_ids)
        return None

    def step(self) -> Mapping[int, list[RequestOutput]]:
        raise AssertionError("a step without the others")

    def step_together(self, vote: StepVote) -> tuple[Mapping[int, list[RequestOutput]], StepVote]:
        assert vote.has_work == self.has_work
        reduced = self._meeting.reduce(self._engine, vote)
        self.steps += 1
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

    def wait_for(self, *names: str) -> None:
        missing = set(names)
        while missing:
            assert self.client.poll(int(1000 * DEADLINE)), f"nothing came of {missing}"
            message = msgspec.msgpack.decode(self.client.recv())
            missing -= {output["request_id"] for output in message.get("outputs", [])}

    def wait_until_all_sleep(self) -> None:
        deadline, pause = time.monotonic() + DEADLINE, threading.Event()
        while not self._all_sleep():
            assert time.monotonic() < deadline, "a wave goes on"
            pause.wait(0.01)

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


def test_an_engine_that_serves_others_does_not_sleep(deployment: Deployment) -> None:
    call = CallUtility(client=0, call_id=1, method="sleep", arguments={"level": 1})
    deployment.senders[1].send(msgspec.msgpack.encode(call))
    reply: dict[str, Any] = {}
    while "call_id" not in reply:
        assert deployment.client.poll(int(1000 * DEADLINE))
        reply = msgspec.msgpack.decode(deployment.client.recv())
    assert reply["error_status"] == 400
    assert "neither sleep nor change" in reply["error"]


def test_a_new_coordinator_hears_of_work_that_the_last_one_has_lost(deployment: Deployment) -> None:
    deployment.run(0, "before", 2)
    deployment.wait_for("before")
    deployment.end_coordinator()
    deployment.run(1, "meanwhile", 2)
    deployment.coordinator = deployment.start_coordinator()
    deployment.wait_for("meanwhile")
