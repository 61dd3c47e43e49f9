"""Ranks that torchrun started, each with an engine and a worker of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams

from .conftest import ONE_THREAD, Start

PROGRAM = Path(__file__).parent / "launched_program.py"


STANDALONE = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    model: Path,
    out: Path,
    *prompts: str,
    timeout: float = 120,
    cut: str = "tensor_parallel_size",
    options: Sequence[str] = STANDALONE,
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    return subprocess.run(
        [*launcher, str(PROGRAM), str(model), str(out), *prompts],
        env={**os.environ, **ONE_THREAD, "CUT": cut},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.parametrize("cut", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_both_ranks_give_the_ids_of_one(tiny_model: Path, tmp_path: Path, cut: str) -> None:
    ended = torchrun(tiny_model, tmp_path / "ids", "a b c d e", cut=cut)
    assert ended.returncode == 0, ended.stderr
    assert_ids_of_one(tiny_model, tmp_path)


def test_two_nodes_of_a_launcher_give_the_ids_of_one(tiny_model: Path, tmp_path: Path) -> None:
    port = 20_000 + os.getpid() % 10_000  # of the launchers' own store, which they agree on beforehand
    shared = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        options = (*shared, "--node-rank", str(rank))
        return torchrun(tiny_model, tmp_path / "ids", "a b c d e", cut="pipeline_parallel_size", options=options)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(node, range(2)))
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert_ids_of_one(tiny_model, tmp_path)
    found = [json.loads((tmp_path / f"ids.{rank}").read_text()) for rank in range(2)]
    assert [one["comm"] for one in found] == ["gloo", "gloo"]


def assert_ids_of_one(tiny_model: Path, folder: Path) -> None:
    """Both ranks have found the ids of one process."""
    found = [json.loads((folder / f"ids.{rank}").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    with LLM(str(tiny_model), load_format="dummy", dtype="float32", seed=3, kv_cache_memory=4 << 20) as llm:
        greedy = llm.generate(["a b c d e", "b c"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        drawn = llm.generate(["a b c d e"], SamplingParams(max_tokens=8, temperature=1, ignore_eos=True))
    ids: list[Any] = [result.outputs[0].token_ids for result in [*greedy, *drawn]]
    assert found[0]["ids"] == ids


def test_a_rank_with_another_prompt_is_named_and_all_end(tiny_model: Path, tmp_path: Path) -> None:
    ended = torchrun(tiny_model, tmp_path / "ids", "a b c d e", "x y z", timeout=90)
    assert ended.returncode != 0
    # Both ranks say so, unless torchrun ends the second one before it could: it ends all when the first one fails.
    assert "ExecutorFailed: rank 1 diverged at step 0; give every rank the same prompts" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_refuses_it(start: Start) -> None:
    server = start("--executor", "external", ready=False)
    assert server.wait(60) == 2
    refusal = "Error: --executor external is for the offline LLM alone: every rank runs the same program"
    assert server.lines[-1].startswith(refusal)
