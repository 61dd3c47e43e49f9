from __future__ import annotations

from dataclasses import dataclass

from fourfold.config.engine_config import EngineConfig
from fourfold.engine.policies import FirstComeFirstServed, PriorityFirst
from fourfold.entries import SchedulerContext

CONTEXT = SchedulerContext(config=EngineConfig())


@dataclass
class Asked:
    priority: int
    arrival_time: float
    request_id: str = "r"


def test_first_come_ignores_priority() -> None:
    policy = FirstComeFirstServed(CONTEXT)
    assert policy.key(Asked(9, 1.0)) < policy.key(Asked(0, 2.0))


def test_priority_goes_before_arrival() -> None:
    policy = PriorityFirst(CONTEXT)
    assert policy.key(Asked(0, 2.0)) < policy.key(Asked(1, 1.0))
    assert policy.key(Asked(1, 1.0)) < policy.key(Asked(1, 2.0))
