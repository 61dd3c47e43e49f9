"""Random storms against a plain loop: whatever is scheduled, shared, preempted or aborted, texts do not change."""

from __future__ import annotations

import random
from typing import Any

import pytest

LAYOUTS: list[dict[str, Any]] = [
    {"num_blocks": 64},
    {"num_blocks": 17, "max_num_seqs": 8},
    {"num_blocks": 17, "max_num_seqs": 8, "policy": "priority"},
    {"num_blocks": 17, "max_num_seqs": 8, "prefix_caching": False},
    {"num_blocks": 17, "windows": (0, 12)},
    {"num_blocks": 6, "windows": (9,), "max_num_seqs": 6},
    {"num_blocks": 9, "windows": (20, 9, 1), "policy": "priority"},
    {"num_blocks": 17, "max_num_seqs": 8, "pipeline_parallel_size": 2},
    {"num_blocks": 17, "max_num_seqs": 8, "pipeline_parallel_size": 3, "policy": "priority"},
    {"num_blocks": 64, "max_num_seqs": 12, "pipeline_parallel_size": 4},
    {"num_blocks": 9, "windows": (20, 9, 1), "pipeline_parallel_size": 2},
]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_storm_equals_plain_loop(toy_engine: Any, layout: dict[str, Any], depth: int) -> None:
    for seed in range(3):
        _storm(toy_engine, layout, depth, seed)


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_many_storms_equal_plain_loop(toy_engine: Any, layout: dict[str, Any], depth: int) -> None:
    for seed in range(3, 40):
        _storm(toy_engine, layout, depth, seed)


def _storm(toy_engine: Any, layout: dict[str, Any], depth: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = toy_engine(depth=depth, seed=seed, **layout)
    prefixes = [[rng.randrange(40) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    aborted: set[str] = set()
    failed: set[str] = set()
    for _ in range(60):
        if rng.random() < 0.6:
            name = _add(engine, rng, prefixes)
            if rng.random() < 0.05:
                engine.client.failing[name] = "boom"
                failed.add(name)
        alive = [name for name, outputs in engine.outputs.items() if not _is_over(outputs) and name not in aborted]
        if alive and rng.random() < 0.15:
            names = rng.sample(alive, 1)
            aborted.update(names)
            engine.core.abort([*names, "unknown"])
        if rng.random() < 0.02:
            engine.core.reset_prefix_cache()
        for _ in range(rng.randrange(3)):
            if engine.core.has_work:
                engine.step()
    engine.run()
    for name in engine.requests:
        if name in aborted:
            tokens = engine.tokens(name)
            assert tokens == engine.expected(name)[0][: len(tokens)]
        elif name in failed:
            assert engine.outputs[name][-1].error == "boom"
        else:
            engine.check_finished(name)
    engine.check_idle()


def _is_over(outputs: list[Any]) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None


def _add(engine: Any, rng: random.Random, prefixes: list[list[int]]) -> str:
    prompt = list(rng.choice(prefixes)) if rng.random() < 0.7 else []
    prompt += [rng.randrange(40) for _ in range(rng.randrange(1, 30))]
    max_tokens = rng.choice([1, 2, 7, 30, None])
    name: str = engine.add(
        prompt,
        salt=rng.choice(["", "", "a", "b"]),
        priority=rng.randrange(3),
        client=rng.randrange(2),
        max_tokens=max_tokens,
        min_tokens=rng.randrange(max_tokens or 9),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(rng.randrange(40),),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )
    return name
