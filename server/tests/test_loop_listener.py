from __future__ import annotations

import asyncio
import threading
from socket import socket

from fourfold.process_messages import EngineDead, EngineNotice, EngineStarting
from fourfold_server.loop_listener import LoopListener
from fourfold_server.supervised_process import Failure


class Target:
    def __init__(self) -> None:
        self.heard: list[object] = []
        self.thread = threading.get_ident()

    def engine_changed(self, notice: EngineNotice) -> None:
        assert threading.get_ident() == self.thread
        self.heard.append(notice)

    def server_ready(self) -> None:
        self.heard.append("server")

    def take_connection(self, connection: socket) -> None:
        self.heard.append(connection)

    def gave_up(self, failure: Failure) -> None:
        self.heard.append(failure)

    def end_requested(self) -> None:
        self.heard.append("end")


def test_everything_is_heard_in_order_also_what_came_before_the_target() -> None:
    failure = Failure(message="f", status=1)
    starting = EngineStarting(engine=0, incarnation=1)
    dead = EngineDead(engine=0, incarnation=1, reason="late")

    async def scenario() -> list[object]:
        listener = LoopListener(asyncio.get_running_loop())
        target = Target()
        early = threading.Thread(target=listener.engine_changed, args=(starting,))
        early.start()
        early.join()
        await asyncio.sleep(0)
        listener.server_ready()
        listener.set_target(target)
        listener.engine_changed(dead)
        listener.gave_up(failure)
        listener.end_requested()
        deadline = asyncio.get_running_loop().time() + 10
        while len(target.heard) < 5:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0)
        return target.heard

    assert asyncio.run(scenario()) == [starting, "server", dead, failure, "end"]


def test_a_closed_loop_hears_nothing() -> None:
    loop = asyncio.new_event_loop()
    listener = LoopListener(loop)
    loop.close()
    listener.server_ready()
