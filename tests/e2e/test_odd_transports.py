"""A pipeline over transports that are late, slow or without buffers says what one stage says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ONE_THREAD

SCRIPT = """
import json, sys
from fourfold import LLM, SamplingParams
options = json.loads(sys.argv[2])
greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
seeded = SamplingParams(max_tokens=9, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
prompts = [f"{number} " + "one two three four " * (number % 4) for number in range(8)]
small = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory": 4 << 20, "max_model_len": 160, "seed": 3}
with LLM(sys.argv[1], load_format="dummy", dtype="float32", **small, **options) as llm:
    results = llm.generate(prompts, [greedy, seeded] * 4)
print(json.dumps([[[one.token_id, one.logprob] for one in result.outputs[0].logprobs] for result in results]))
"""


@pytest.fixture(scope="module")
def four_layers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "four-layers"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    return folder


Answers = list[list[list[float]]]


def answers(model: Path, faults: Path, options: dict[str, object]) -> Answers:
    """[request][token] (id, log probability)."""
    path = os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(options)],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found: Answers = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def alone(four_layers: Path, faults: Path) -> Answers:
    return answers(four_layers, faults, {})


@pytest.mark.parametrize(("name", "stages"), [("delayed", 2), ("slow", 3), ("unbuffered", 4)])
def test_output_is_that_of_one_stage(four_layers: Path, faults: Path, alone: Answers, name: str, stages: int) -> None:
    found = answers(four_layers, faults, {"pipeline_parallel_size": stages, "comm": f"pp={name}"})
    for mine, theirs in zip(found, alone, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        # The model is a random one, whose ids need not change with its states; its log probabilities do.
        assert [logprob for _, logprob in mine] == pytest.approx([logprob for _, logprob in theirs], abs=1e-5)
