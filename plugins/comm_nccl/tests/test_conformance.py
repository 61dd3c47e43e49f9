from __future__ import annotations

import pytest

from fourfold.testing.communicator import CommunicatorConformance


@pytest.mark.multi_gpu
class TestNccl(CommunicatorConformance):
    name = "nccl"
    device = "cuda"
