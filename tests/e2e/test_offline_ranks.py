"""``LLM`` with several ranks in processes of their own: from a script, from a prompt, saved and loaded again."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold import LLM, SamplingParams
from fourfold.errors import ConfigError, ExecutorClosed, ExecutorFailed, WorkerError
from fourfold.testing.workers import frozen_objects

from .conftest import ONE_THREAD

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
Build = Callable[..., LLM]

FROM_A_PROMPT = """
from fourfold import LLM, SamplingParams
llm = LLM({model!r}, load_format="dummy", dtype="float32", tensor_parallel_size=2, seed=1)
print(llm.generate("a b", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0].token_ids)
import os, psutil, signal, threading
assert len(psutil.Process().children(recursive=True)) == 2
llm.close()
assert psutil.Process().children(recursive=True) == []
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)

    def build(model: Path, **options: Any) -> LLM:
        return LLM(str(model), dtype="float32", kv_cache_memory=4 << 20, **options)

    return build


@pytest.fixture
def nine_heads(tiny_model: Path, tmp_path: Path) -> Path:
    """Heads that two and three ranks share unevenly, and evenly."""
    folder = tmp_path / "nine-heads"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps({**config, **heads}))
    return folder


def ids(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(["a b c", "The capital"], PARAMS)]


def run(code: str, *, cwd: Path, as_file: bool) -> subprocess.CompletedProcess[str]:
    command = ["-c", code]
    if as_file:  # a script without a guard: ranks must not run it
        (cwd / "script.py").write_text(code)
        command = ["script.py"]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("as_file", [False, True], ids=["prompt", "script"])
def test_it_needs_no_main_module_and_leaves_nothing(tiny_model: Path, tmp_path: Path, as_file: bool) -> None:
    memory = set(os.listdir("/dev/shm"))
    ended = run(FROM_A_PROMPT.format(model=str(tiny_model)), cwd=tmp_path, as_file=as_file)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 4
    assert set(os.listdir("/dev/shm")) <= memory


def test_a_saved_state_gives_the_same_ids_at_every_cut(build: Build, nine_heads: Path, tmp_path: Path) -> None:
    with build(nine_heads, load_format="dummy", seed=5, tensor_parallel_size=2) as llm:
        expected = ids(llm)
        llm.save_sharded_state(tmp_path / "two")
        with pytest.raises(WorkerError, match="is not empty; name a new folder"):
            llm.save_sharded_state(tmp_path / "two")
    with build(tmp_path / "two") as llm:
        assert ids(llm) == expected
        llm.save_sharded_state(tmp_path / "one")
    with build(tmp_path / "two", tensor_parallel_size=3) as llm:
        assert ids(llm) == expected
    index = json.loads((tmp_path / "two" / "sharded.index.json").read_text())
    assert index["num_ranks"] == 2
    sizes = [path.stat().st_size for path in (tmp_path / "two" / "shards").iterdir()]
    (whole,) = [path.stat().st_size for path in (tmp_path / "one" / "shards").iterdir()]
    assert max(sizes) < 0.6 * whole
    with build(tmp_path / "one", tensor_parallel_size=2) as llm:
        assert ids(llm) == expected


def test_profiles_of_every_rank(build: Build, tiny_model: Path, tmp_path: Path) -> None:
    with build(tiny_model, load_format="dummy", tensor_parallel_size=2) as llm:
        with pytest.raises(WorkerError, match="no profile is running; start one first"):
            llm.stop_profile()
        llm.start_profile(tmp_path / "traces")
        with pytest.raises(WorkerError, match="a profile is running already; stop it first"):
            llm.start_profile(tmp_path / "traces")
        ids(llm)
        paths = llm.stop_profile()
        with pytest.raises(WorkerError, match="no profile is running"):
            llm.stop_profile()
    assert [path.name for path in paths] == ["rank-0.json", "rank-1.json"]
    for path in paths:
        assert any(event["name"].startswith("aten::") for event in json.loads(path.read_text())["traceEvents"])
    with pytest.raises(ExecutorClosed, match="this LLM is closed"):
        llm.stop_profile()


def test_one_rank_shows_progress_and_all_spare_the_collector(
    build: Build, tiny_model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # which the ranks take on
    with build(tiny_model, load_format="dummy", tensor_parallel_size=2) as llm:
        frozen = llm._client._executor.collective_rpc(frozen_objects)
    assert all(count > 10_000 for count in frozen), frozen
    shown = [line for line in capfd.readouterr().err.splitlines() if line.endswith(": started")]
    assert shown
    assert all("TP0" in line for line in shown), shown


def test_a_killed_rank_ends_generate_with_its_name(build: Build, tiny_model: Path) -> None:
    with build(tiny_model, load_format="dummy", tensor_parallel_size=2) as llm:
        pids = {row["label"]: row["pid"] for row in llm._client.processes()}
        ranks = [psutil.Process(pid) for pid in pids.values()]
        killer = threading.Timer(0.3, os.kill, (pids["DP0.PP0.TP1"], signal.SIGKILL))
        killer.start()
        endless = SamplingParams(max_tokens=8000, temperature=0, ignore_eos=True)
        with pytest.raises(ExecutorFailed, match=r"rank 1 was killed by signal 9 \(SIGKILL\) during execute_model"):
            llm.generate(["a"] * 8, endless)
        killer.join()
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


def test_more_ranks_than_heads_are_refused_at_once(build: Build, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 3, .*from 1 to 2"):
        build(tiny_model, load_format="dummy", tensor_parallel_size=3)
