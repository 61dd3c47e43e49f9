from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fourfold.coordinator.coordinator_loop import INTERVAL, CoordinatorLoop
from fourfold.messages import EngineReport, EngineStats, JoinReports, LoadReports


class Harness:
    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clients = [self.context.socket(zmq.PULL) for _ in range(2)]
        for index, client in enumerate(self.clients):
            client.bind(f"ipc://{folder}/api-{index}")
        self.loop = CoordinatorLoop(folder, num_engines=2, num_clients=2)
        self.sender = self.context.socket(zmq.PUSH)
        self.sender.connect(f"ipc://{folder}/coordinator")
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def send(self, message: EngineReport | JoinReports) -> None:
        self.sender.send(msgspec.msgpack.encode(message))

    def hear(self, client: int) -> list[tuple[int, int]]:
        assert self.clients[client].poll(10_000)
        message = msgspec.msgpack.decode(self.clients[client].recv(), type=LoadReports)
        return [(one.engine, one.stats.num_steps) for one in message.reports]

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.loop.close()
        self.loop.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def report(engine: int, steps: int) -> EngineReport:
    return EngineReport(engine=engine, incarnation=1, stats=EngineStats(num_steps=steps))


def test_every_client_hears_what_is_new_ten_times_a_second(harness: Harness) -> None:
    started = time.monotonic()
    sent = 0
    heard = [harness.hear(0)] if harness.send(report(0, 0)) else []
    while time.monotonic() - started < 5.5 * INTERVAL:
        sent += 1
        harness.send(report(0, sent))
        time.sleep(0.002)
    while not heard or heard[-1] != [(0, sent)]:
        heard.append(harness.hear(0))
    assert 3 <= len(heard) <= 8
    assert harness.hear(1)[0][0] == 0
    assert not harness.clients[0].poll(int(2000 * INTERVAL)), "nothing is new"


def test_a_newcomer_hears_how_things_stand(harness: Harness) -> None:
    harness.send(report(1, 3))
    assert harness.hear(0) == [(1, 3)]
    harness.send(JoinReports(client=0))
    assert harness.hear(0) == [(1, 3)]


def test_nonsense_is_dropped(harness: Harness) -> None:
    harness.sender.send(b"nonsense")
    harness.send(report(7, 1))
    harness.send(JoinReports(client=9))
    harness.send(report(0, 1))
    assert harness.hear(1) == [(0, 1)]
