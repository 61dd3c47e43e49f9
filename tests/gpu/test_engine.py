"""The engine on a device says what it says on a CPU, recorded or not, however many steps are in the air."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from fourfold import SamplingParams
from fourfold.errors import ConfigError
from fourfold.testing.small_shapes import VOCABULARY

pytestmark = pytest.mark.gpu
Opened = Callable[..., AbstractContextManager[Any]]

ON_A_CPU = """
import json, sys
from fourfold import LLM, SamplingParams
prompts = json.loads(sys.argv[2])
with LLM(sys.argv[1], dtype="float32", max_model_len=512, kv_cache_memory=64 << 20) as llm:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    print("IDS", json.dumps([result.outputs[0].token_ids for result in llm.generate(prompts, params)]))
"""


def some_prompts(count: int = 12) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 200))] for _ in range(count)]


def every_feature() -> list[SamplingParams]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.7, "top_k": 40},
        {"seed": 3, "top_p": 0.8},
        {"seed": 4, "top_p": 0.9, "min_p": 0.02, "top_k": 1500},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"seed": 5, "repetition_penalty": 1.4},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 0.0, "logit_bias": {100: 5.0, 200: -5.0}},
        {"seed": 6, "min_tokens": 12, "stop_token_ids": tuple(range(3, 400))},
        {"temperature": 0.0, "stop": ("t7", "t9")},
    ]
    return [SamplingParams(max_tokens=24, **setting) for setting in settings]


def told(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    return [
        (result.outputs[0].token_ids, result.outputs[0].text, result.outputs[0].finish_reason)
        for result in llm.generate(prompts, params)
    ]


def test_greedy_ids_equal_those_of_a_cpu(opened: Opened, checkpoint: Path) -> None:
    prompts = some_prompts()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ON_A_CPU, str(checkpoint), json.dumps(prompts)]
    reply = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=200)
    assert reply.returncode == 0, reply.stderr[-3000:]
    [line] = [line for line in reply.stdout.splitlines() if line.startswith("IDS ")]
    expected = json.loads(line.removeprefix("IDS "))
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with opened() as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    same = sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    assert same == len(prompts), [(mine, theirs) for mine, theirs in zip(found, expected) if mine != theirs]


def test_recorded_asynchronous_steps_equal_plain_ones(opened: Opened) -> None:
    prompts, params = some_prompts(), every_feature()
    with opened(max_in_flight=1, enforce_eager=True) as llm:
        expected = told(llm, prompts, params)
        logprobs = llm.generate(prompts[7], params[7])[0].outputs[0].logprobs
    assert len({str(one) for one in expected}) == len(prompts)
    for options in ({}, {"enforce_eager": True}, {"max_in_flight": 1}, {"max_num_seqs": 3, "kv_cache_memory": 3 << 20}):
        with opened(**options) as llm:
            found = told(llm, prompts, params)
            for mine, theirs, setting in zip(found, expected, params, strict=True):
                assert mine == theirs, (options, setting)
            again = llm.generate(prompts[7], params[7])[0].outputs[0].logprobs
        for mine, theirs in zip(again, logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_steps_are_recorded(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fourfold.worker.decode_graphs"), opened():
        pass
    assert "sizes of decode steps recorded in" in caplog.text


def test_no_step_waits_for_the_device(opened: Opened) -> None:
    """Greedy and drawn requests, and every feature but penalties, whose counts need what was sampled before."""
    import torch

    plain = [params for params in every_feature() if params.repetition_penalty == 1 and not params.presence_penalty]
    with opened(dtype="bfloat16") as llm:
        prompts = some_prompts(len(plain))
        expected = told(llm, prompts, plain)
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert told(llm, prompts, plain) == expected
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_says_what_to_lower(opened: Opened) -> None:
    with (
        pytest.raises(ConfigError, match=r"KV cache .* lower --kv-cache-memory or --num-blocks"),
        opened(kv_cache_memory=1 << 40),
    ):
        pass
    import torch

    total = torch.cuda.mem_get_info()[1]
    held = torch.empty(int(total * 0.5), dtype=torch.uint8, device="cuda")
    with (
        pytest.raises(ConfigError, match=r"KV cache takes .* lower --kv-cache-memory by at least \d+%"),
        opened(kv_cache_memory=int(total * 0.7)),
    ):
        pass
    del held


def test_logits_agree_with_transformers(opened: Opened, checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    prompts = some_prompts(4)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda().eval()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with opened(dtype="bfloat16") as llm:
        results = llm.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([prompt], device="cuda")).logits[0].float(), -1)
        for position, entry in enumerate(result.prompt_logprobs[1:]):
            expected = float(rows[position, prompt[position + 1]])
            assert entry.logprob == pytest.approx(expected, abs=0.15)
