"""Core's moe layer passes the kit that others are held to, over the communicators of this host."""

from __future__ import annotations

from fourfold.testing.moe import MoEConformance


class TestTensorParallel(MoEConformance):
    name = "tp"
    comm = "shm"


class TestTensorParallelOverGloo(MoEConformance):
    name = "tp"
    comm = "gloo"
    world_sizes = (2,)
