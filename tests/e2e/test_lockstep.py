"""Replicas that share experts step together: whoever has requests, all have taken the same steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams
from fourfold.errors import EngineError

from .conftest import ONE_THREAD, Start
from .running_server import Server, Stream, wait_until
from .test_lifecycle import completion
from .test_offline_replicas import children
from .test_operations import post, save_other_weights, text_of
from .test_replicas import SEEDED, processes, replicas

TOGETHER = ["--data-parallel-size", "2", "--enable-expert-parallel", "--num-blocks", "2000"]


def complete(server: Server, engine: int | None, prompt: str, *, tokens: int = 3) -> str:
    headers = {} if engine is None else {"X-Data-Parallel-Rank": str(engine)}
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    with server.client() as client:
        reply = client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def steps(server: Server) -> list[float]:
    """Of each engine."""
    return [server.metric_of("fourfold_steps_total", engine=str(engine)) for engine in range(2)]


@pytest.mark.parametrize("rounds", [10, pytest.param(250, marks=pytest.mark.long)])
def test_engines_take_the_same_steps_whoever_has_the_requests(start: Start, tiny_mixture: Path, rounds: int) -> None:
    alone = start(model=tiny_mixture)
    prompts = ["Once upon a time", "The capital of France is"]
    expected = [complete(alone, None, prompt) for prompt in prompts]
    alone.kill()
    server = start(*TOGETHER, model=tiny_mixture)
    for _ in range(3):
        assert complete(server, 0, prompts[0]) == expected[0]
    for _ in range(3):
        assert complete(server, 1, prompts[1]) == expected[1]
    for _ in range(rounds):
        for engine, prompt in enumerate(prompts):
            assert complete(server, engine, prompt) == expected[engine]
    wait_until(lambda: len(set(steps(server))) == 1, 10, f"equal steps, not {steps(server)}")
    assert steps(server)[0] >= 3 * 2 * (rounds + 3)


def test_the_engines_restart_together_and_the_request_goes_on(start: Start, tiny_mixture: Path) -> None:
    server = start(*TOGETHER, model=tiny_mixture)
    expected = complete(server, 0, "Once upon a time", tokens=200)
    before = {name: state["pid"] for name, state in server.states().items() if name.startswith("engine_core DP")}
    assert len(before) == 2
    with (
        server.client() as client,
        client.stream(
            "POST",
            "/v1/completions",
            json={
                "model": "tiny",
                "prompt": "Once upon a time",
                "temperature": 0,
                "max_tokens": 200,
                "ignore_eos": True,
                "stream": True,
            },
            headers={"X-Data-Parallel-Rank": "0"},
        ) as reply,
    ):
        text = ""
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not text:
                os.kill(before["engine_core DP1"], signal.SIGKILL)
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == expected
    after = {name: state["pid"] for name, state in server.states().items() if name.startswith("engine_core DP")}
    assert not set(before.values()) & set(after.values())
    assert complete(server, 1, "Once upon a time", tokens=200) == expected


VICTIMS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "an engine": ((), "engine_core", "DP1"),
    "a worker": (("--tensor-parallel-size", "2"), "worker", "DP0.PP0.TP1"),
}


@pytest.mark.long
@pytest.mark.parametrize("victim", VICTIMS)
def test_no_stream_ends_with_a_rank(start: Start, tiny_mixture: Path, victim: str) -> None:
    options, role, label = VICTIMS[victim]
    server = start(*TOGETHER, *options, model=tiny_mixture)
    bodies = [completion(150, **{**SEEDED, "seed": seed}) for seed in range(16)]

    def open_all() -> list[Stream]:
        return [Stream(server, "/v1/completions", body) for body in bodies]

    undisturbed = open_all()
    for opened in undisturbed:
        opened.join()
    streams = open_all()
    for opened in streams:
        opened.wait_for_events(5)
    os.kill(processes(server, role)[label], signal.SIGKILL)
    for opened, reference in zip(streams, undisturbed):
        opened.join()
        assert (opened.error, opened.text) == (None, reference.text)
    wait_until(lambda: replicas(server) == ["running"] * 2, 60, "both replicas")
    wait_until(lambda: server.metric("fourfold_kv_cache_usage") == 0, 5, "all blocks free")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--tensor-parallel-size", "2")], ids=["tp 1", "tp 2"])
def test_the_engines_sleep_and_take_other_weights_together(
    start: Start, tiny_mixture: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    other = save_other_weights(tiny_mixture, tmp_path / "other")
    alone = start(model=other, load_format="auto")
    new = text_of(alone, 0)
    alone.kill()
    moving = ["--moe-ep-redundant-experts", "1", "--moe-ep-rebalance-interval", "8", "--moe-ep-rebalance-gain", "0"]
    server = start(*TOGETHER, *moving, *options, model=tiny_mixture)
    body = completion(150, **SEEDED)
    reference = Stream(server, "/v1/completions", body)
    reference.join()
    old = [text_of(server, engine) for engine in range(2)]
    streams = [Stream(server, "/v1/completions", body) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(3)
    for level in (1, 2):
        assert post(server, f"/admin/sleep?level={level}")["is_sleeping"]
        assert server.metric("fourfold_num_requests_waiting") == len(streams)
        assert post(server, "/admin/wake_up?tags=kv_cache")["is_sleeping"]
        assert not post(server, "/admin/wake_up")["is_sleeping"]
        assert not post(server, "/admin/wake_up")["is_sleeping"]  # by somebody who has lost the first answer
    assert post(server, "/admin/pause")["is_paused"]
    assert not post(server, "/admin/resume")["is_paused"]
    for opened in streams:
        opened.join()
        assert (opened.error, opened.text) == (None, reference.text)
    assert [text_of(server, engine) for engine in range(2)] == old
    waiting = Stream(server, "/v1/completions", body)
    waiting.wait_for_events(3)
    post(server, "/admin/update_weights", {"model": str(other)})
    waiting.join()
    assert waiting.error is None
    for _ in range(3):
        assert [text_of(server, engine) for engine in range(2)] == [new, new]
    os.kill(server.states()["engine_core DP0"]["pid"], signal.SIGKILL)
    assert text_of(server, 1) == new != old[1]
    wait_until(lambda: server.metric("fourfold_kv_cache_usage") == 0, 5, "all blocks free")


LAYOUTS = {
    "tp 2": ["--tensor-parallel-size", "2"],
    "pp 2": ["--pipeline-parallel-size", "2", "--all-to-all", "all_to_all_single"],
    "pp 2, measured": ["--pipeline-parallel-size", "2", "--pipeline-partition", "auto:measure"],
    "tp 2, pp 2": ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"],
    "over tcp": ["--comm", "gloo"],
    "microbatches": ["--enable-dbo", "--dbo-decode-tokens", "2", "--dbo-prefill-tokens", "2"],
    "three replicas": ["--data-parallel-size", "3", "--all-to-all", "allgather_reducescatter"],
    "experts that move": ["--moe-ep-redundant-experts", "1", "--moe-ep-rebalance-interval", "4"],
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_answers_alike(start: Start, tiny_mixture: Path, layout: str) -> None:
    alone = start(model=tiny_mixture)
    prompts = [f"Once upon a time there were {count}" for count in range(6)]
    expected = [complete(alone, None, prompt, tokens=20) for prompt in prompts]
    alone.kill()
    server = start(*TOGETHER, *LAYOUTS[layout], model=tiny_mixture)
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: complete(server, None, prompt, tokens=20), prompts)) == expected
    if layout == "experts that move":
        with server.client() as client:
            rows = client.get("/topology").json()["layers"]
        assert [(row["engine"], row["stage"]) for row in rows] == [(0, 0), (1, 0)], server.log
        assert all(row["experts"]["layers"] == [0, 1] for row in rows)
        assert all(sum(map(sum, row["experts"]["load"])) > 0 for row in rows)


@pytest.mark.long
def test_a_last_stage_without_experts_steps_with_the_others(start: Start, tiny_mixture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dense-end"
    shutil.copytree(tiny_mixture, folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    alone = start(model=folder)
    prompts = ["Once upon a time", "The capital of France is"]
    expected = [complete(alone, None, prompt) for prompt in prompts]
    alone.kill()
    stages = ("--pipeline-parallel-size", "2", "--pipeline-partition", "1,1")
    server = start(*TOGETHER, *stages, *LAYOUTS["experts that move"], model=folder)
    for _ in range(3):
        assert [complete(server, engine, prompt) for engine, prompt in enumerate(prompts)] == expected
    assert complete(server, 0, prompts[0]) == expected[0]

    def stages_that_move() -> list[str]:
        return [series for series, moves in server.series("fourfold_expert_moves") if moves > 0]

    complete(server, 0, prompts[0], tokens=100)
    wait_until(stages_that_move, 5, "experts of the first stage to be seen moving")
    assert all('stage="0"' in series for series in stages_that_move())
    with server.client() as client:
        rows = client.get("/topology").json()["layers"]
    assert [(row["engine"], row["stage"], row["experts"]["layers"]) for row in rows] == [(0, 0, [0]), (1, 0, [0])]


@pytest.mark.long
def test_offline_replicas_share_experts_too(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    others = children()
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_blocks": 600}
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=5)
    prompts = ["Once upon a time", "The capital of France is", "a b c"] * 2

    def ids(llm: LLM) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]

    with LLM(str(tiny_mixture), **options) as llm:
        expected = ids(llm)
    with LLM(str(tiny_mixture), **options, data_parallel_size=2, enable_expert_parallel=True) as llm:
        assert ids(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert ids(llm) == expected
        engines = [child for child in children() - others if "engine_core" in " ".join(child.cmdline())]
        assert len(engines) == 2
        engines[0].kill()
        with pytest.raises(EngineError, match=r"DP0.* was killed by signal 9|no engine is ready"):
            ids(llm)
    assert children() == others
