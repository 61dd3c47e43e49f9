"""Cuts over two devices say what one device says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from fourfold import SamplingParams

from .test_engine import every_feature, some_prompts, told

pytestmark = pytest.mark.multi_gpu
Opened = Callable[..., AbstractContextManager[Any]]


@pytest.mark.parametrize("cut", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("eager", [False, True])
def test_two_devices_say_what_one_says(opened: Opened, cut: str, eager: bool) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two CUDA devices")
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts, features = some_prompts(), every_feature()
    with opened(enforce_eager=True) as llm:
        expected = told(llm, prompts, greedy), told(llm, prompts, features)
    with opened(enforce_eager=eager, executor="mp", comm="nccl", **{cut: 2}) as llm:
        assert told(llm, prompts, greedy) == expected[0]
        assert told(llm, prompts, features) == expected[1]
