"""An ``LLM`` of several replicas."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold import LLM, SamplingParams
from fourfold.errors import ConfigError, EngineError, RequestError, Unsupported

from .running_server import wait_until

PROMPTS = ["The capital of France is", "Once upon a time", [1, 2, 3]] * 4
OPTIONS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_blocks": 2000}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def children() -> set[psutil.Process]:
    """Of this process; servers of other tests may be among them."""
    return set(psutil.Process().children(recursive=True))


def test_replicas_answer_like_one_engine_and_go_on_when_one_dies(tiny_model: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.8, seed=5)
    handler, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    others = children()
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
    with LLM(str(tiny_model), **OPTIONS, data_parallel_size=2) as llm:
        engines = sorted(children() - others, key=psutil.Process.create_time)
        assert len(engines) == 2
        assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)] == expected
        used = [sum(engine.cpu_times()[:2]) for engine in engines]
        assert min(used) > 0
        with pytest.raises(RequestError, match="outside the vocabulary"):
            llm.generate([[10**6]], params)
        with pytest.raises(Unsupported, match="several replicas"):
            llm.save_sharded_state(tmp_path / "shards")
        threading.Timer(0.2, os.kill, (engines[0].pid, signal.SIGKILL)).start()
        assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)] == expected
        wait_until(lambda: not engines[0].is_running(), 10, "the end of DP0")
        engines[1].kill()
        with pytest.raises(EngineError, match=r"all engines have failed|no engine is ready"):
            llm.generate(PROMPTS, params)
    assert children() == others
    assert (signal.getsignal(signal.SIGINT), threading.active_count()) == (handler, threads)


def test_replicas_that_cannot_start_leave_nothing(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).symlink_to(file)
    others = children()
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(broken), dtype="float32", load_format="safetensors", data_parallel_size=2)
    assert children() == others
