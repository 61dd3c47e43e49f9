"""Channels against sockets that the test itself answers, so that order and time are its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import msgspec
import pytest

from fourfold.errors import EngineError, ExecutorClosed, ExecutorFailed, RpcTimeout, WorkerError
from fourfold.rpc.call import Call
from fourfold.rpc.channels import Channels
from fourfold.rpc.frames import Frame, FrameReader, Kind, send_frame
from fourfold.rpc_call import ErrorReport

DEADLINE = 10.0


class Ranks:
    """Channels to two ranks, and the ranks' ends."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.streams = [theirs for _, theirs in pairs]
        self.broken: list[BaseException] = []
        self.channels = Channels(
            {rank: ours for rank, (ours, _) in enumerate(pairs)},
            describe=lambda rank: f"rank {rank}",
            on_broken=self.broken.append,
        )
        self._readers = [FrameReader(stream) for stream in self.streams]
        for stream in self.streams:
            stream.settimeout(DEADLINE)

    def send(self, name: str = "method", payload: bytes = b"", timeout: float = DEADLINE) -> Call:
        return self.channels.send(name, payload, timeout=timeout, shape=list)

    def receive(self, rank: int) -> Frame:
        while not (frames := self._readers[rank].read()):
            pass
        (frame,) = frames
        return frame

    def answer(self, rank: int, call: Call, payload: bytes = b"", kind: Kind = Kind.REPLY) -> None:
        send_frame(self.streams[rank], Frame(kind, call.number, payload))

    def fail(self, rank: int, call: Call, message: str) -> None:
        report = msgspec.msgpack.encode(ErrorReport(call.name, "ValueError", message, "its traceback"))
        self.answer(rank, call, report, Kind.ERROR)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.channels.close()
    for stream in ranks.streams:
        stream.close()


def test_a_call_is_over_when_all_have_answered(ranks: Ranks) -> None:
    call = ranks.send("who", b"question")
    assert [ranks.receive(rank) for rank in range(2)] == [Frame(Kind.CALL, call.number, b"question")] * 2
    ranks.answer(1, call, b"one")
    ranks.answer(0, call, kind=Kind.DONE)
    assert call.future.result(DEADLINE) == [None, b"one"]


def test_both_sides_may_be_full(ranks: Ranks) -> None:
    """Ranks that send large replies and read nothing meanwhile do not meet a sender that waits for room."""
    large = bytes(4 << 20)
    calls = [ranks.send("large", large) for _ in range(2)]
    for rank in range(2):
        ranks.answer(rank, calls[0], large)
    assert calls[0].future.result(DEADLINE) == [large, large]
    for rank in range(2):
        assert ranks.receive(rank).payload == large
        assert ranks.receive(rank).payload == large
        ranks.answer(rank, calls[1])
    calls[1].future.result(DEADLINE)


def test_an_error_of_one_rank_does_not_wait_for_the_others(ranks: Ranks) -> None:
    call = ranks.send("step")
    started = time.monotonic()
    ranks.fail(1, call, "boom")
    with pytest.raises(WorkerError, match="rank 1 failed in step: ValueError: boom") as caught:
        call.future.result(DEADLINE)
    assert caught.value.traceback == "its traceback"
    assert time.monotonic() - started < 1.0


def test_the_first_error_is_the_one() -> None:
    call = Call(0, "step", ranks=2, timeout=DEADLINE, notice=5.0, now=0.0, shape=list)
    for rank, message in ((1, "cause"), (0, "echo")):
        report = msgspec.msgpack.encode(ErrorReport("step", "ValueError", message, ""))
        call.take(rank, Frame(Kind.ERROR, 0, report), 1.0)
    assert call.settled
    assert str(call.error) == "rank 1 failed in step: ValueError: cause"


def test_a_timeout_names_who_is_missing_and_a_late_reply_is_dropped(ranks: Ranks) -> None:
    late = ranks.send("slow", timeout=0.05)
    ranks.answer(0, late, b"0")
    with pytest.raises(RpcTimeout, match=r"'slow' within 0.05 s from rank\(s\) 1"):
        late.wait()
    assert ranks.channels.phase(1) == "slow"
    assert ranks.channels.phase(0) is None
    call = ranks.send("next")
    for rank in (1, 0):
        ranks.answer(rank, late, b"late")
        ranks.answer(rank, call, b"new")
    assert call.future.result(DEADLINE) == [b"new", b"new"]
    assert ranks.channels.phase(1) is None


def test_a_cancelled_future_changes_nothing_for_the_next(ranks: Ranks) -> None:
    cancelled, call = ranks.send(), ranks.send()
    assert cancelled.future.cancel()
    for rank in range(2):
        ranks.answer(rank, cancelled, b"old")
        ranks.answer(rank, call, b"new")
    assert call.future.result(DEADLINE) == [b"new", b"new"]
    with pytest.raises(CancelledError):
        cancelled.future.result(0)


def test_a_fold_that_fails_is_the_callers_error(ranks: Ranks) -> None:
    def shape(replies: list[Any]) -> Any:
        raise ZeroDivisionError("in the fold")

    call = ranks.channels.send("fold", b"", timeout=DEADLINE, shape=shape)
    for rank in range(2):
        ranks.answer(rank, call)
    with pytest.raises(ZeroDivisionError, match="in the fold"):
        call.future.result(DEADLINE)


def test_stop_ends_calls_and_refuses_more(ranks: Ranks) -> None:
    call = ranks.send("open")
    assert ranks.channels.stop(ExecutorClosed, lambda call: ExecutorFailed(f"{call.name} is lost"))
    with pytest.raises(ExecutorFailed, match="open is lost"):
        call.future.result(0)
    with pytest.raises(ExecutorClosed, match="another"):
        ranks.send("another")
    assert not ranks.channels.stop(ExecutorClosed, lambda call: ExecutorFailed(call.name))


def test_an_interrupt_between_two_ranks_ends_all_calls(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(frame: Frame) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks.channels._ways[1].writer, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.send("torn")
    with pytest.raises(EngineError, match="'next' was called, but an earlier call was torn by KeyboardInterrupt"):
        ranks.send("next")
    seen = threading.Event()
    ranks.channels.post(seen.set)
    assert seen.wait(DEADLINE)
    assert [type(error) for error in ranks.broken] == [KeyboardInterrupt]


def test_a_call_that_takes_long_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("fourfold.rpc.channels.NOTICE_SECONDS", 0.05)
    ranks: Ranks = request.getfixturevalue("ranks")
    caplog.set_level(logging.INFO)
    call = ranks.send("load", timeout=0.2)
    ranks.answer(0, call)
    with pytest.raises(RpcTimeout):
        call.wait()
    assert "load: waiting for rank 1, 0 s of 0 s" in caplog.text


def test_the_thread_sleeps_while_nothing_happens(ranks: Ranks) -> None:
    def switches() -> int:
        with open(f"/proc/self/task/{ranks.channels._thread.native_id}/status") as lines:
            (line,) = [line for line in lines if line.startswith("voluntary")]
        return int(line.split()[1])

    call = ranks.send()
    for rank in range(2):
        ranks.answer(rank, call)
    call.wait()
    before = switches()
    threading.Event().wait(0.3)
    assert switches() - before <= 2


def test_the_end_of_a_rank_is_taken_once(ranks: Ranks) -> None:
    """Whoever hears of it first, its sentinel or its socket, in one and the same round of events."""
    done = threading.Event()

    def drain_twice() -> None:
        way = ranks.channels._ways[0]
        ranks.channels.drain(0)
        ranks.channels._serve(way, 1)
        done.set()

    ranks.channels.post(lambda: (ranks.streams[0].close(), drain_twice()))  # type: ignore[func-returns-value]
    assert done.wait(DEADLINE)
    call = ranks.send()
    assert ranks.receive(1).number == call.number
    assert ranks.broken == []
