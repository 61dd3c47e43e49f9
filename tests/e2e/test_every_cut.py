"""Whatever a mixture is cut into and whatever carries its tokens, it says what the dense model says: every combination
of replicas, tensor-parallel ranks, stages, spread experts, all-to-alls and microbatches that this machine can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from fourfold.config.engine_config import EngineConfig
from fourfold.plugins import load_plugins
from fourfold.selection import suitability

from .conftest import Start
from .running_server import Server, wait_until
from .test_golden import COMPLETIONS
from .test_tensor_parallel import IDS

MICROBATCHES = ("--enable-dbo", "--dbo-decode-tokens", "2", "--dbo-prefill-tokens", "2")
ALL_TO_ALLS = sorted(
    name for name, entry in load_plugins().all_to_alls().items() if suitability(entry, EngineConfig()).score > 0
)


def cuts() -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """A name, the options, and whether there is anything to overlap where the options ask for it."""
    for dp, tp, pp, experts, dbo in product((1, 2), (1, 2), (1, 2), (False, True), (False, True)):
        sizes = zip(("data", "tensor", "pipeline"), (dp, tp, pp))
        options = tuple(word for cut, size in sizes for word in (f"--{cut}-parallel-size", str(size)))
        options += ("--enable-expert-parallel",) * experts + MICROBATCHES * dbo
        name = f"dp{dp}-tp{tp}-pp{pp}" + "-ep" * experts + "-dbo" * dbo
        spread = experts and dp * tp > 1
        yield name, options, spread or tp > 1 or not dbo
        if spread:
            for carrier in ALL_TO_ALLS:
                yield f"{name}-{carrier}", (*options, "--all-to-all", carrier), True


POSSIBLE = {name: options for name, options, possible in cuts() if possible}
IMPOSSIBLE = {name: options for name, options, possible in cuts() if not possible}


def ids(server: Server, prompt: str, max_tokens: int, replica: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with server.client() as client:
        headers = {"X-Data-Parallel-Rank": str(replica)}
        more = {"model": "tiny", "return_token_ids": True}
        reply = client.post("/v1/completions", json={**body, **more}, headers=headers)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("cut", POSSIBLE)
def test_the_ids_are_those_of_the_dense_model(cut: str, start: Start, upcycled: Path) -> None:
    server = start(*POSSIBLE[cut], "--max-model-len", "1000", "--num-blocks", "200", model=upcycled, load_format="auto")
    replicas = 2 if "dp2" in cut else 1
    jobs = [(prompt, most, number % replicas) for number, (prompt, _, most, _) in enumerate(COMPLETIONS.values())]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(lambda job: ids(server, *job), jobs)) == IDS
        # Layers are asked for their figures every 32 steps.
        list(pool.map(lambda replica: ids(server, "Once upon a time", 40, replica), range(replicas)))

    def overlapped() -> list[float]:
        return [server.metric_of("fourfold_overlapped_steps", engine=str(engine)) for engine in range(replicas)]

    if "-dbo" in cut:
        wait_until(lambda: all(overlapped()), 10, f"steps in two halves in every engine: {overlapped()}")
    else:
        assert not any(overlapped())


@pytest.mark.long
@pytest.mark.parametrize("cut", IMPOSSIBLE)
def test_microbatches_that_have_nothing_to_overlap_are_refused(cut: str, start: Start) -> None:
    server = start(*IMPOSSIBLE[cut], ready=False)
    assert server.wait(30) == 2
    assert "--enable-dbo" in server.log
