"""Experts that move after every step of a stream, each time to where a random map has them, change no token of it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams

from .conftest import Start
from .running_server import Server, wait_until

RESTLESS = (
    *("--enable-expert-parallel", "--parallel-layer", "moe=restless"),
    *("--moe-ep-rebalance-interval", "1000000", "--moe-ep-redundant-experts", "1"),
)
PROMPTS = ["Once upon a time", "The capital of France is"]
PATIENCE = 600.0
"""Seconds: all experts of the real model are half a gigabyte, which moves a hundred times."""
TOKENS = 140
"""Layers are asked for their figures every 32 steps: 128 of them are seen, in 100 of which experts move."""


def generated(model: str, **options: Any) -> list[list[int]]:
    """By one process."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM(model, dtype="float32", max_model_len=500, num_blocks=100, **options) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]


def streamed(server: Server, replica: int) -> list[int]:
    body = {"model": "tiny", "prompt": PROMPTS[replica], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"X-Data-Parallel-Rank": str(replica if server.metric_of("fourfold_engine_up", engine="1") else 0)}
    with server.client() as client:
        body |= {"return_token_ids": True}
        reply = client.post("/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def moves_while_it_streams(server: Server, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda replica: streamed(server, replica), range(len(PROMPTS)))) == expected
    wait_until(lambda: server.metric_of("fourfold_random_maps", engine="0") == 100, 10, "a hundred maps")
    assert server.metric_of("fourfold_expert_moves", engine="0") > 100
    assert server.metric_of("fourfold_expert_move_failures", engine="0") == 0


def environment(faults: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])])}


CUTS = {
    "sums": ("--tensor-parallel-size", "2"),
    "peer memory": ("--tensor-parallel-size", "2", "--all-to-all", "shm", "--expert-placement", "round-robin"),
    "replicas": ("--data-parallel-size", "2"),
}


@pytest.mark.parametrize("cut", ["sums", *(pytest.param(cut, marks=pytest.mark.long) for cut in list(CUTS)[1:])])
def test_a_hundred_random_maps_in_a_stream(start: Start, tiny_mixture: Path, faults: Path, cut: str) -> None:
    expected = generated(str(tiny_mixture), load_format="dummy")
    server = start(*CUTS[cut], *RESTLESS, model=tiny_mixture, environment=environment(faults))
    moves_while_it_streams(server, expected)


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("cut", CUTS)
def test_a_hundred_random_maps_of_the_real_model(start: Start, upcycled: Path, faults: Path, cut: str) -> None:
    expected = generated("smollm2")
    small = ("--max-model-len", "500", "--num-blocks", "100")
    options = (*CUTS[cut], *RESTLESS, *small)
    server = start(*options, model=upcycled, load_format="auto", environment=environment(faults))
    moves_while_it_streams(server, expected)
