from __future__ import annotations

from fourfold.testing.communicator import CommunicatorConformance


class TestShm(CommunicatorConformance):
    name = "shm"


class TestShmOfFour(CommunicatorConformance):
    name = "shm"
    world_size = 4


class TestGloo(CommunicatorConformance):
    name = "gloo"


class TestBothOfThree(CommunicatorConformance):
    """Two ranks on one host, one on another."""

    name = "shm-gloo"
    world_size = 3


class TestBothOfFour(CommunicatorConformance):
    name = "shm-gloo"
    world_size = 4
