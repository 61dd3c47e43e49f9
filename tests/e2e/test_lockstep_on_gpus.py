"""Replicas on two devices that share experts say what one device says, whichever of them has the requests."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fourfold.testing.small_shapes import MIXTURE, VOCABULARY, write_shape

from .running_server import START_TIMEOUT, TIMEOUT, Server, wait_until

OVERLAPPED = "fourfold_overlapped_steps"
OPTIONS = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512", "--num-blocks", "400"]
OPTIONS += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--served-model-name", "mixture"]
TOGETHER = ["--data-parallel-size", "2", "--enable-expert-parallel", "--all-to-all", "peer"]
LAYOUTS = {
    "peer": TOGETHER,
    "microbatches": [*TOGETHER, "--enable-dbo", "--dbo-decode-tokens", "2", "--dbo-prefill-tokens", "16"],
}

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
    # Each server may have all kernels to compile.
    pytest.mark.timeout((1 + len(LAYOUTS)) * (START_TIMEOUT + 3 * TIMEOUT)),
]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """The shape of a mixture, for dummy weights."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    write_shape(folder, MIXTURE)
    return folder


def answers(server: Server) -> list[str]:
    """To requests that all come at once, of more steps than lie between two looks at what the layers count."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 200))] for _ in range(12)]

    def complete(prompt: list[int]) -> str:
        body = {"model": "mixture", "prompt": prompt, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        with server.client() as client:
            reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


def wait_for_halves(server: Server) -> None:
    """Steps of two microbatches in every replica."""

    def everywhere() -> bool:
        return all(server.metric_of(OVERLAPPED, engine=engine) for engine in "01")

    wait_until(everywhere, TIMEOUT, "steps in two halves in both replicas")


def test_replicas_say_what_one_device_says(mixture: Path, tmp_path: Path) -> None:
    found = {}
    for name, layout in {"alone": [], **LAYOUTS}.items():
        server = Server([str(mixture), *OPTIONS, *layout], tmp_path / name)
        try:
            server.wait_until_ready()
            found[name] = answers(server)
            if "--enable-dbo" in layout:
                wait_for_halves(server)
        finally:
            server.kill()
            print(f"{name}:\n{server.log}")  # shown where the test fails, at its time limit too
    assert len(set(found["alone"])) > 1
    for name in LAYOUTS:
        assert found[name] == found["alone"], name
