from __future__ import annotations

from fourfold.testing.stage_transport import StageTransportConformance


class TestShm(StageTransportConformance):
    name = "shm"
    pipeline_parallel_size = 4


class TestShmWithTensorParallelism(StageTransportConformance):
    name = "shm"
    tensor_parallel_size = 2


class TestGloo(StageTransportConformance):
    name = "gloo"
    pipeline_parallel_size = 4


class TestGlooWithTensorParallelism(StageTransportConformance):
    name = "gloo"
    tensor_parallel_size = 2
