from __future__ import annotations

import asyncio
import threading

from fourfold.messages import EngineReady
from fourfold_server.loop_listener import LoopListener
from fourfold_server.supervisor import Failure


class Target:
    def __init__(self) -> None:
        self.heard: list[object] = []
        self.thread = threading.get_ident()

    def engine_starting(self, engine: int, incarnation: int) -> None:
        assert threading.get_ident() == self.thread
        self.heard.append((engine, incarnation))

    def engine_ready(self, ready: EngineReady) -> None:
        self.heard.append(ready)

    def engine_dead(self, engine: int, reason: str) -> None:
        self.heard.append(reason)

    def gave_up(self, failure: Failure) -> None:
        self.heard.append(failure)

    def end_requested(self) -> None:
        self.heard.append("end")


def test_everything_is_heard_in_order_also_what_came_before_the_target() -> None:
    failure = Failure(message="f", status=1)

    async def scenario() -> list[object]:
        listener = LoopListener(asyncio.get_running_loop())
        target = Target()
        early = threading.Thread(target=listener.engine_starting, args=(0, 1))
        early.start()
        early.join()
        await asyncio.sleep(0)
        listener.engine_dead(0, "early")
        listener.set_target(target)
        listener.engine_starting(0, 2)
        listener.gave_up(failure)
        listener.end_requested()
        deadline = asyncio.get_running_loop().time() + 10
        while len(target.heard) < 5:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0)
        return target.heard

    assert asyncio.run(scenario()) == [(0, 1), "early", (0, 2), failure, "end"]


def test_a_closed_loop_hears_nothing() -> None:
    loop = asyncio.new_event_loop()
    listener = LoopListener(loop)
    loop.close()
    listener.engine_dead(0, "late")
