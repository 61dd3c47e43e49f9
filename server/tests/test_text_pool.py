from __future__ import annotations

import asyncio
import threading

import pytest

from fourfold.errors import RequestError
from fourfold_server import text_pool
from fourfold_server.text_pool import TextPool


def test_work_runs_in_threads_of_the_pool() -> None:
    async def scenario() -> str:
        pool = TextPool()
        try:
            return await pool.run(lambda prefix: prefix + threading.current_thread().name, "in ")
        finally:
            pool.close()
            pool.close()

    assert asyncio.run(scenario()).startswith("in text_")
    assert not any(thread.name.startswith("text_") for thread in threading.enumerate())


def test_too_much_work_is_refused_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "MAX_WAITING", 3)

    async def scenario() -> None:
        pool = TextPool()
        gate = threading.Event()
        jobs = [asyncio.create_task(pool.run(gate.wait, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="3 requests wait to be tokenized") as caught:
            await pool.run(gate.wait, 10)
        assert caught.value.status == 503
        gate.set()
        assert await asyncio.gather(*jobs) == [True] * 3
        assert await pool.run(gate.wait, 10)
        pool.close()

    asyncio.run(scenario())


def test_an_error_of_the_work_is_the_callers() -> None:
    async def scenario() -> None:
        pool = TextPool()
        try:
            await pool.run(int, "a")
        finally:
            pool.close()

    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(scenario())
