"""Replicas on two devices that share experts say what one device says, whichever of them has the requests."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .running_server import Server

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
VOCABULARY = 2048
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "eos_token_id": 2,
}
OPTIONS = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512", "--num-blocks", "400"]
OPTIONS += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--served-model-name", "mixture"]
TOGETHER = ["--data-parallel-size", "2", "--enable-expert-parallel", "--all-to-all", "peer"]
LAYOUTS = {
    "peer": TOGETHER,
    "microbatches": [*TOGETHER, "--enable-dbo", "--dbo-decode-tokens", "2", "--dbo-prefill-tokens", "16"],
}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """The shape of a mixture, and a tokenizer that has a word for each token."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = {f"t{index}": index for index in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def answers(server: Server) -> list[str]:
    """To requests that all come at once."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 200))] for _ in range(12)]

    def complete(prompt: list[int]) -> str:
        body = {"model": "mixture", "prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        with server.client() as client:
            reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


def test_replicas_say_what_one_device_says(mixture: Path, tmp_path: Path) -> None:
    found = {}
    for name, layout in {"alone": [], **LAYOUTS}.items():
        server = Server([str(mixture), *OPTIONS, *layout], tmp_path / name)
        try:
            server.wait_until_ready()
            found[name] = answers(server)
        finally:
            server.kill()
    assert len(set(found["alone"])) > 1
    for name in LAYOUTS:
        assert found[name] == found["alone"], name
