from __future__ import annotations

from fourfold.testing.communicator import CommunicatorConformance


class TestShm(CommunicatorConformance):
    name = "shm"


class TestShmOfFour(CommunicatorConformance):
    name = "shm"
    world_size = 4


class TestGloo(CommunicatorConformance):
    name = "gloo"
