"""A step on the engine's side: what was sent, and whose it is."""

from __future__ import annotations

from fourfold.engine.request import Request
from fourfold.messages import StepMessage


class Batch:
    """A step that is or was in the air: its message, and the request of each of its ``scheduled`` entries."""

    __slots__ = ("message", "requests")

    def __init__(self, message: StepMessage, requests: list[Request]) -> None:
        self.message = message
        self.requests = requests
