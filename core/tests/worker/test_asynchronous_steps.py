"""Whole engines on a device that withholds values, against the same on one that does not; nobody may tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.scheduler_config import SchedulerConfig
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup
from fourfold.engine.engine_core import EngineCore
from fourfold.engine.policies import FirstComeFirstServed
from fourfold.entries import SchedulerContext
from fourfold.messages import AddRequest, NewRequest, RequestOutput, ScheduledRequest, StepMessage, StepOutput
from fourfold.sampling_params import SamplingParams
from fourfold.testing.deferring_device import DeferringDevice
from fourfold.worker.cpu_device import CpuDevice
from fourfold.worker.launched_step import LaunchedStep
from fourfold.worker.model_runner import ModelRunner

VOCABULARY = 97
EOS = (11, 12)


class Reply:
    def __init__(self, launched: LaunchedStep) -> None:
        self._launched = launched

    def result(self, timeout: float | None = None) -> StepOutput:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._launched.result()), type=StepOutput)


class Client:
    """Stands where the executor's client stands."""

    def __init__(self, runner: ModelRunner, depth: int) -> None:
        self.max_in_flight = depth
        self._runner = runner
        self.on_failure: Callable[[Any], None] = lambda callback: None
        self.shutdown: Callable[[], None] = lambda: None

    def execute_model(self, message: StepMessage) -> Reply | Future[StepOutput]:
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StepMessage)
        return Reply(self._runner.launch(travelled))


@dataclass
class Story:
    """What became of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    reason: str | None = None
    error: str | None = None

    def take(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.reason = self.reason or output.finish_reason
        self.error = self.error or output.error


def engine(model: Any, device: CpuDevice, depth: int, **sizes: int) -> EngineCore:
    specs = model.kv_cache_specs()
    num_blocks = sizes.pop("num_blocks", 65)
    cache = KVCacheConfig(groups=(KVCacheGroup(spec=specs[0], layers=(0, 1)),), num_blocks=num_blocks)
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24)
    config = EngineConfig(scheduler=scheduler, cache=CacheConfig(prefix_caching=False))
    runner = ModelRunner(model, device, cache=cache, scheduler=scheduler, max_model_len=64, vocabulary_size=VOCABULARY)
    runner.warm_up()
    return EngineCore(
        config,
        Client(runner, depth),  # type: ignore[arg-type]
        kv_cache=cache,
        max_model_len=64,
        vocabulary_size=VOCABULARY,
        policy=FirstComeFirstServed(SchedulerContext(config=config)),
    )


def some_params(draw: random.Random) -> SamplingParams:
    features: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": draw.randrange(1000), "temperature": 1.3},
        {"seed": draw.randrange(1000), "top_k": 20, "top_p": 0.9},
        {"seed": draw.randrange(1000), "top_p": 0.6, "min_p": 0.01},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.4},
        {"seed": draw.randrange(1000), "repetition_penalty": 1.6},
        {"temperature": 0.0, "logprobs": draw.randrange(4)},
        {"seed": draw.randrange(1000), "logprobs": 2, "prompt_logprobs": 1, "logit_bias": {5: 4.0, 6: -9.0}},
        {"temperature": 0.0, "prompt_logprobs": 0, "frequency_penalty": 1.0, "logprobs": 1},
    ]
    min_tokens = draw.choice([0, 0, 5])
    return SamplingParams(
        **draw.choice(features),
        max_tokens=draw.choice([1, 3, 20, 35]) + min_tokens,
        min_tokens=min_tokens,
        stop_token_ids=draw.choice([(), (draw.randrange(VOCABULARY), draw.randrange(VOCABULARY))]),
        ignore_eos=draw.random() < 0.3,
    )


def run(core: EngineCore, *, requests: int, seed: int) -> dict[str, Story]:
    """Requests come while others run; some are aborted when they have so many tokens, as by a stop string."""
    draw = random.Random(seed)
    stories: dict[str, Story] = {}
    stopping: dict[str, int] = {}
    for number in range(requests):
        name = f"r{number}"
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 30))]
        stories[name] = Story()
        if draw.random() < 0.25:
            stopping[name] = draw.randrange(1, 6)
        add = AddRequest(
            request_id=name, client=0, prompt_token_ids=prompt, sampling=some_params(draw), eos_token_ids=EOS
        )
        assert core.add(add) is None
        for _ in range(draw.randrange(3)):
            _step(core, stories, stopping)
    while core.has_work:
        _step(core, stories, stopping)
    for name, count in stopping.items():
        assert len(stories[name].token_ids) <= count
    return stories


def _step(core: EngineCore, stories: dict[str, Story], stopping: dict[str, int]) -> None:
    for output in core.step().get(0, []):
        story = stories[output.request_id]
        story.take(output)
        if story.reason is None and len(story.token_ids) == stopping.get(output.request_id):
            story.reason = "stopped"
            core.abort([output.request_id])


@pytest.mark.parametrize("num_blocks", [65, 9], ids=["roomy", "preempting"])
@pytest.mark.parametrize("records", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("depth", [2, 3])
def test_nobody_can_tell_the_device_apart(history_model, recording_operators, num_blocks, records, depth) -> None:
    def model() -> Any:
        return history_model(operators=recording_operators((1, 2, 4, 6)) if records else None)

    preemptions = 0
    for seed in range(2):
        plain = engine(history_model(), CpuDevice(dtype=torch.float32), 1, num_blocks=num_blocks)
        expected = run(plain, requests=20, seed=seed)
        deferring = engine(model(), DeferringDevice(), depth, num_blocks=num_blocks)
        assert run(deferring, requests=20, seed=seed) == expected
        preemptions += deferring.stats.preemptions
        assert {"stop", "length", "stopped"} <= {story.reason for story in expected.values()}
    assert (preemptions > 0) == (num_blocks == 9), "this must be about preemptions too"


def test_a_plain_step_waits_for_nothing(history_model, recording_operators) -> None:
    """Greedy and seeded requests: the host looks at no value before it is asked for the reply."""
    device = DeferringDevice()
    groups = (KVCacheGroup(spec=history_model().kv_cache_specs()[0], layers=(0, 1)),)
    runner = ModelRunner(
        history_model(operators=recording_operators((1, 2))),
        device,
        cache=KVCacheConfig(groups=groups, num_blocks=9),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
        max_model_len=32,
        vocabulary_size=VOCABULARY,
    )
    runner.warm_up()
    waits = device.waits
    new = [
        NewRequest("a", 0, [1, 2], SamplingParams(temperature=0.0), ()),
        NewRequest("b", 1, [3], SamplingParams(seed=4, temperature=2.0), ()),
    ]
    first = [ScheduledRequest(0, 2, 0, [[1]], reset_blocks=True), ScheduledRequest(1, 1, 0, [[2]], reset_blocks=True)]
    launched = [runner.launch(StepMessage(step=0, new=new, scheduled=first))]
    for step in range(1, 5):
        scheduled = [ScheduledRequest(0, 1, 1 + step, [[]]), ScheduledRequest(1, 1, step, [[]])]
        launched.append(runner.launch(StepMessage(step=step, scheduled=scheduled)))
    assert device.waits == waits
    assert [len(step.result().token_ids) for step in launched] == [2] * 5


def test_a_request_that_fails_late_fails_alone(history_model, greedy_reference) -> None:
    model = history_model()
    expected = greedy_reference([5, 6], 8)
    core = engine(model, DeferringDevice(), 2)
    model.poison = expected[3]
    stories = {"bad": Story(), "good": Story()}
    for name, prompt in (("bad", [5, 6]), ("good", [50, 60])):
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        core.add(AddRequest(request_id=name, client=0, prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        _step(core, stories, {})
    assert stories["bad"].token_ids == expected[:4]
    assert "not finite" in str(stories["bad"].error)
    assert stories["good"].token_ids == greedy_reference([50, 60], 8)
