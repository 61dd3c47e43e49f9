"""Messages between two ranks: sends and receives that go on while anyone waits for any of them.

A message is its length, eight bytes, then its bytes; between two ranks messages stay in order.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

import torch

from fourfold.errors import EngineError

if TYPE_CHECKING:
    from fourfold_comm_cpu.channel import Channel, Membership

_LONGEST_WAIT: Final = 0.05
"""Seconds at a bell before looking at the deadline."""
Direction = Literal["to", "from"]


class Transfer:
    """One send or receive in the air; see ``fourfold.contracts.communicator.Handle``."""

    def __init__(self, mailbox: Mailbox, direction: Direction, peer: int, tensor: torch.Tensor) -> None:
        self.direction = direction
        self.peer = peer
        self.tensor = tensor  # must stay until done
        self._mailbox = mailbox
        self._payload = tensor.view(-1).view(torch.uint8)
        length = self._payload.numel() if direction == "to" else -1
        self._length = torch.tensor([length], dtype=torch.int64)
        self._left = [self._length.view(torch.uint8), self._payload]
        self.failure: EngineError | None = None

    @property
    def done(self) -> bool:
        """Whether all bytes have gone or come."""
        return not self._left

    def wait(self, timeout: float | None = None) -> None:
        """See Handle."""
        self._mailbox.finish(self, timeout)

    def advance(self, channel: Channel) -> bool:
        """Move what can be moved; whether anything did."""
        move = channel.push if self.direction == "to" else channel.pull
        moved = False
        while self._left:
            part = self._left[0]
            count = move(self.peer, part) if part.numel() else 0
            if count < part.numel():
                self._left[0] = part[count:]
                return moved or count > 0
            self._left.pop(0)
            moved = True
            if len(self._left) == 1 and int(self._length) != self._payload.numel():
                self.failure = EngineError(
                    f"a message of {int(self._length)} bytes came where one of {self._payload.numel()} was expected"
                )
                self._left.clear()
        return moved


class Mailbox:
    """All messages of one rank in one channel; used by one thread at a time."""

    def __init__(self, channel: Channel, member: Membership) -> None:
        self._channel = channel
        self._member = member
        self._queues: dict[tuple[Direction, int], deque[Transfer]] = {}

    def start(self, direction: Direction, peer: int, tensor: torch.Tensor) -> Transfer:
        """Begin to send to, or to receive from, ``peer``."""
        transfer = Transfer(self, direction, peer, tensor)
        self._queues.setdefault((direction, peer), deque()).append(transfer)
        self._advance()
        return transfer

    def finish(self, transfer: Transfer, timeout: float | None) -> None:
        """Return when it is done; others go on meanwhile. Raises RpcTimeout naming its peer."""
        limit = self._member.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not transfer.done:
            if self._advance():
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                verb = "sending to" if transfer.direction == "to" else "receiving from"
                raise self._member.missing(f"{verb} rank {self._member.ranks[transfer.peer]}", [transfer.peer])
            sources = [peer for (direction, peer), queue in self._queues.items() if direction == "from" and queue]
            destinations = [peer for (direction, peer), queue in self._queues.items() if direction == "to" and queue]
            self._channel.wait_for_message(sources, destinations, min(left, _LONGEST_WAIT))
        if transfer.failure is not None:
            raise transfer.failure

    def _advance(self) -> bool:
        moved = False
        for queue in self._queues.values():
            while queue and queue[0].advance(self._channel):
                moved = True
                if queue[0].done:
                    queue.popleft()
        return moved
