"""The embedded model cut by depth, and by width too, says what it says uncut; what a pipeline shows, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold import LLM, SamplingParams
from fourfold.errors import ConfigError, ExecutorFailed
from fourfold.testing.processes import still_runs

from .conftest import ONE_THREAD, Start
from .running_server import Server, Stream, wait_until
from .test_tensor_parallel import IDS, answers, expected

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
CUTS = {(pp, tp) for pp in (2, 3, 4) for tp in (1, 2, 3)}
COVERING = {(2, 3), (3, 2), (4, 1)}
"""Every number of stages and every width; one stage is in test_tensor_parallel."""


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of several ranks that wait for each other on few cores take many times as long."""
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def six_layers(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "six-layers"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    return folder


# --- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "tp"),
    [*sorted(COVERING), *(pytest.param(*cut, marks=pytest.mark.long) for cut in sorted(CUTS - COVERING))],
)
def test_golden_cases(pp: int, tp: int) -> None:
    with LLM("smollm2", dtype="float32", pipeline_parallel_size=pp, tensor_parallel_size=tp) as llm:
        found = answers(llm)
    assert [text for text, _ in found] == expected()
    assert [ids for _, ids in found][: len(IDS)] == IDS


@pytest.mark.parametrize("partition", ["19,11", "auto:measure"])
def test_recorded_steps_agree_in_bfloat16(partition: str) -> None:
    """Up to the first small margin: these prompts have none."""
    with LLM("smollm2", dtype="bfloat16", pipeline_parallel_size=2, pipeline_partition=partition) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        results = llm.generate(["The capital of France is", "1, 2, 3, 4, 5,"], params)
    assert [result.outputs[0].text for result in results] == [" Paris.\n\n", " 6, "]


MIX = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=45, temperature=1.0, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=18, temperature=0.8, seed=1, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=2, presence_penalty=0.7, frequency_penalty=0.4, min_tokens=12),
    SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=42, temperature=0, ignore_eos=True, logit_bias={500: 2.0}),
]


def mixed(model: Path, **options: Any) -> tuple[list[Any], Any]:
    """Ids of requests that differ in everything, and the engine's counts; prompts share a beginning and are cut up."""
    shared = "one two three four five six seven eight nine ten eleven twelve " * 4
    small = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_blocks": 11, "block_size": 16, "max_model_len": 160}
    with LLM(str(model), load_format="dummy", dtype="float32", seed=3, **small, **options) as llm:
        prompts = [shared + str(number) if number % 2 else f"{number} alone" for number in range(18)]
        params = [MIX[number % len(MIX)] for number in range(18)]
        results = [*llm.generate(prompts, params), *llm.generate(prompts[:4], params[:4])]
        stats = llm._core.stats  # type: ignore[union-attr]
        return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in results], stats


@pytest.mark.parametrize(
    "cut", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}]
)
def test_everything_that_a_request_may_ask_for(six_layers: Path, cut: dict[str, int]) -> None:
    """Seeds, penalties, log probabilities, chunked prompts, shared prefixes and preemption change nothing."""
    expected, _ = mixed(six_layers)
    found, stats = mixed(six_layers, **cut)
    assert found == expected
    assert stats.preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert len(stats.stage_busy_seconds) == cut["pipeline_parallel_size"]
    assert all(0 <= share <= 1 for share in stats.stage_bubble_shares)


def test_a_saved_pipeline_loads_at_every_cut(six_layers: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    common = {"dtype": "float32", "kv_cache_memory": 16 << 20}
    with LLM(str(six_layers), load_format="dummy", seed=5, pipeline_parallel_size=3, **common) as llm:
        expected = llm.generate(["a b c"], params)[0].outputs[0].token_ids
        llm.save_sharded_state(tmp_path / "saved")
    for cut in ({}, {"pipeline_parallel_size": 2}):
        with LLM(str(tmp_path / "saved"), **cut, **common) as llm:
            assert llm.generate(["a b c"], params)[0].outputs[0].token_ids == expected


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 31}, "--pipeline-parallel-size is 31, but the model has 30 layers; from 1 to 30"),
        (
            {"pipeline_parallel_size": 3, "pipeline_partition": "10,10,9"},
            "--pipeline-partition is '10,10,9', which sums to 29, and the model has 30 layers; 10,10,10 would do",
        ),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 16}, "--tensor-parallel-size is 16, .*from 1 to 9"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    others = psutil.Process().children()  # servers of other tests
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2", **options)
    assert psutil.Process().children() == others


# --- what it shows, and how it ends ----------------------------------------------------------------------------------


def completion(server: Server, **more: Any) -> str:
    with server.client() as client:
        reply = client.post("/v1/completions", json={**LONG, "max_tokens": 12, **more})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_a_pipeline_shows_its_stages_and_drains(start: Start, six_layers: Path) -> None:
    server = start("--pipeline-parallel-size", "2", "--pipeline-partition", "4,2", model=six_layers)
    text = completion(server)
    stream = Stream(server, "/v1/completions", {**LONG, "max_tokens": 400})
    abandoned = Stream(server, "/v1/completions", LONG)
    abandoned.wait_for_events(3)
    abandoned.close()
    stream.wait_for_events(200)

    def busy() -> list[dict[str, Any]]:
        with server.client() as client:
            rows: list[dict[str, Any]] = client.get("/topology").json()["stages"]
        return rows if all(row["busy_share"] is not None for row in rows) else []

    rows = wait_until(busy, 20, "busy shares")
    assert [(row["engine"], row["stage"], row["layers"], row["ranks"]) for row in rows] == [
        (0, 0, [0, 3], [0]),
        (0, 1, [4, 5], [1]),
    ]
    assert all(0 < row["busy_share"] <= 1 for row in rows)
    with server.client() as client:
        metrics = client.get("/metrics").text
    for stage in ("0", "1"):
        assert f'fourfold_stage_busy_seconds_total{{engine="0",model_name="tiny",stage="{stage}"}}' in metrics
        assert f'fourfold_stage_bubble_share{{engine="0",model_name="tiny",stage="{stage}"}}' in metrics
    assert completion(server) == text, "an abandoned request leaves nothing behind"
    server.signal(signal.SIGTERM)
    stream.join(60)
    assert (stream.done, stream.error) == (True, None)
    assert server.wait(20) == 0


def test_a_killed_stage_is_named_to_everyone(start: Start) -> None:
    server = start("--pipeline-parallel-size", "2", "--on-failure", "exit")
    children = server.descendants()
    with server.client() as client:
        processes = client.get("/topology").json()["processes"]
    (victim,) = [row["pid"] for row in processes if row["label"] == "DP0.PP0.TP0"]
    stream = Stream(server, "/v1/completions", LONG)
    stream.wait_for_events(2)
    os.kill(victim, signal.SIGKILL)
    stream.join(3)
    assert stream.error is not None
    assert "rank 0 was killed by signal 9 (SIGKILL)" in stream.error["message"]
    assert server.wait(5) == 1
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not [process for process in alive if still_runs(process)]


def test_a_stage_that_is_killed_while_others_wait_for_it_ends_generate(six_layers: Path) -> None:
    options = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 16 << 20}
    with LLM(str(six_layers), pipeline_parallel_size=3, **options) as llm:
        pids = {row["label"]: row["pid"] for row in llm._client.processes()}
        os.kill(pids["DP0.PP1.TP0"], signal.SIGSTOP)  # its neighbours wait in the middle of a step
        os.kill(pids["DP0.PP1.TP0"], signal.SIGKILL)
        with pytest.raises(ExecutorFailed, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
            llm.generate(["a"] * 4, SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True))
