"""Replicas that share experts step together: whoever has requests, all have taken the same steps."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Start
from .running_server import Server, wait_until

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


LAYOUTS = {
    "tp 2": ["--tensor-parallel-size", "2"],
    "pp 2": ["--pipeline-parallel-size", "2", "--all-to-all", "all_to_all_single"],
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
        assert [(row["engine"], row["stage"]) for row in rows] == [(0, 0), (1, 0)]
        assert all(row["experts"]["layers"] == [0, 1] for row in rows)
        assert all(sum(map(sum, row["experts"]["load"])) > 0 for row in rows)
