"""No signal is lost between the start of a process and its event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from fourfold_server.end_signals import EndSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_signals_are_heard_whenever_they_come() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells do for what runs behind &
    signals = EndSignals()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)

    async def listen() -> list[str]:
        heard: asyncio.Queue[str] = asyncio.Queue()
        signals.listen(asyncio.get_running_loop(), lambda: heard.put_nowait("end"))
        early = heard.qsize()
        signal.raise_signal(signal.SIGHUP)
        return [await asyncio.wait_for(heard.get(), 5) for _ in range(early + 1)]

    assert asyncio.run(listen()) == ["end"] * 3


def test_whoever_ignores_the_loss_of_a_terminal_goes_on_doing_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    EndSignals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
