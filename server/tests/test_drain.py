from __future__ import annotations

import asyncio
from typing import Any

from fourfold_server.drain import ActiveRequests


def test_a_drain_waits_for_the_requests_of_its_moment() -> None:
    async def scenario() -> None:
        gates: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("first", "later")}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await gates[scope["path"]].wait()

        requests = ActiveRequests(app)

        def begin(name: str) -> asyncio.Task[None]:
            return asyncio.ensure_future(requests({"type": "http", "path": name}, None, None))  # type: ignore[arg-type]

        assert await requests.wait(0.01) == 0
        first = begin("first")
        await asyncio.sleep(0)
        assert len(requests) == 1
        waiting = asyncio.create_task(requests.wait(10))
        await asyncio.sleep(0)
        later = begin("later")
        await asyncio.sleep(0)
        gates["first"].set()
        assert await waiting == 0
        assert await requests.wait(0.01) == 1
        gates["later"].set()
        await asyncio.gather(first, later)
        assert len(requests) == 0

    asyncio.run(scenario())


def test_a_failing_or_cancelled_request_has_ended() -> None:
    async def scenario() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "fails":
                raise ValueError("boom")
            await asyncio.Event().wait()

        requests = ActiveRequests(app)
        tasks = [
            asyncio.ensure_future(requests({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]
            for path in ("fails", "hangs")
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert await requests.wait(10) == 0
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ValueError, asyncio.CancelledError]
        assert len(requests) == 0

    asyncio.run(scenario())


def test_what_is_no_request_passes() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(ActiveRequests(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
