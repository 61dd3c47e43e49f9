"""Pipes of rotating buffers, over sends and receives that the test makes."""

from __future__ import annotations

import pytest
import torch

from fourfold.distributed.buffered_pipe import BufferedReceiver, BufferedSender


class Line:
    """Carries messages from a sender to receives that were posted; the sender may go."""

    def __init__(self) -> None:
        self.messages: list[torch.Tensor] = []
        self.num_posted = 0
        self.gone = False

    def send(self, tensor: torch.Tensor) -> Line:
        self.messages.append(tensor.clone())
        return self

    def receive(self, tensor: torch.Tensor) -> Taken:
        if self.gone:
            raise RuntimeError("connection closed by peer")
        self.num_posted += 1
        return Taken(self, self.num_posted - 1, tensor)

    def wait(self, timeout: float | None = None) -> None:
        pass


class Taken:
    def __init__(self, line: Line, number: int, tensor: torch.Tensor) -> None:
        self.line, self.number, self.tensor = line, number, tensor

    def wait(self, timeout: float | None = None) -> None:
        message = self.line.messages[self.number]
        self.tensor[: len(message)] = message


def test_what_a_sender_sent_before_it_went_is_still_taken() -> None:
    line = Line()
    sender = BufferedSender(line.send, nbytes=4, depth=2)
    receiver = BufferedReceiver(line.receive, nbytes=4, depth=2)
    for value in range(2):
        sender.send([torch.full((4,), value, dtype=torch.uint8)])
    line.gone = True
    part = torch.zeros(4, dtype=torch.uint8)
    for value in range(2):
        assert receiver.receive([part]) == 4
        assert part.tolist() == [value] * 4
    with pytest.raises(RuntimeError, match="closed by peer"):
        receiver.receive([part])
