from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.rpc.frames import Frame, FrameReader, FrameWriter, Kind, send_frame

frames = st.lists(
    st.builds(
        Frame,
        st.sampled_from(list(Kind)),
        st.integers(0, 2**64 - 1),
        st.one_of(st.binary(max_size=100), st.integers(60_000, 70_000).map(bytes)),
    ),
    max_size=8,
)


def wire(sent: list[Frame]) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for frame in sent:
            send_frame(ours, frame)
        ours.close()
        data = b""
        while part := theirs.recv(1 << 20):
            data += part
    return data


class SlowStream:
    """A socket that gives what it holds in pieces of its own choice."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes = data, sizes

    def _next(self, limit: int) -> bytes:
        size = min(limit, self.sizes.pop() if self.sizes else limit)
        part, self.data = self.data[:size], self.data[size:]
        return part

    def recv(self, limit: int) -> bytes:
        return self._next(limit)

    def recv_into(self, target: memoryview) -> int:
        part = self._next(len(target))
        target[: len(part)] = part
        return len(part)


@settings(max_examples=50, deadline=None)
@given(frames, st.lists(st.integers(1, 200), max_size=300))
def test_frames_arrive_however_the_stream_is_cut(sent: list[Frame], sizes: list[int]) -> None:
    small = [frame for frame in sent if len(frame.payload) < 1000][:3] if len(sent) > 3 else sent
    reader = FrameReader(SlowStream(wire(small), sizes))  # type: ignore[arg-type]
    found: list[Frame] = []
    while len(found) < len(small):
        found += reader.read()
    assert found == small
    with pytest.raises(EOFError):
        reader.read()


def test_what_finds_no_room_waits_and_nothing_blocks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        writer, reader = FrameWriter(ours), FrameReader(theirs)
        sent = [Frame(Kind.CALL, number, bytes([number]) * 300_000) for number in range(3)]
        assert [writer.put(frame) for frame in sent] == [False] * 3
        found: list[Frame] = []
        while len(found) < 3:
            writer.flush()
            found += reader.read()
        assert found == sent
        assert writer.flush()


def test_nothing_is_kept_for_one_who_has_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        theirs.close()
        assert FrameWriter(ours).put(Frame(Kind.CALL, 0, bytes(1 << 20)))
