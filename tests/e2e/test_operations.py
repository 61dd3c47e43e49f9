"""What operators do to running replicas: sleep and other weights, while streams run and replicas die."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold import LLM, SamplingParams
from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.errors import ConfigError, EngineError
from fourfold.plugins import load_plugins
from fourfold.testing.lora_adapter import write_adapter

from .conftest import Start
from .running_server import Server, Stream, wait_until
from .test_lifecycle import completion, wait_until_gone
from .test_replicas import SEEDED, TWO, processes, replicas


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with server.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(server: Server, rank: int) -> str:
    with server.client() as client:
        reply = client.post("/v1/completions", json=completion(20), headers={"x-data-parallel-rank": str(rank)})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def kill(server: Server, label: str, state: str) -> None:
    """Kill a replica and wait until another one in its place is in this state."""
    victim = processes(server, "engine_core")[label]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: processes(server, "engine_core").get(label, victim) != victim, 30, f"another {label}")
    wait_until(lambda: replicas(server) == [state] * 2, 60, f"both replicas {state}")


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(["a", "b c"], params)]


def save_other_weights(tiny_model: Path, folder: Path, *, seed: int = 5) -> Path:
    """The tiny model with other random weights."""
    with LLM(str(tiny_model), load_format="dummy", dtype="float32", seed=seed, num_blocks=600) as llm:
        llm.save_sharded_state(folder)
    return folder


def test_replicas_sleep_and_take_other_weights_together(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    server = start(*TWO)
    body = completion(400, **SEEDED)
    reference = Stream(server, "/v1/completions", body)
    reference.join()
    old = text_of(server, 0)

    streams = [Stream(server, "/v1/completions", body) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(3)
    assert post(server, "/admin/sleep?level=2")["is_sleeping"]
    wait_until(lambda: all(server.status("/readyz") == 503 for _ in range(4)), 5, "every API server to know")
    count = [len(opened.events) for opened in streams]
    kill(server, "DP0", "asleep")  # which is asleep again when it is back, and its streams are still there
    assert [len(opened.events) for opened in streams] == count
    assert post(server, "/admin/wake_up?tags=weights")["is_sleeping"]
    assert not post(server, "/admin/wake_up")["is_sleeping"]
    for opened in streams:
        opened.join()
        assert (opened.error, opened.text) == (None, reference.text)

    with server.client() as client:
        refused = client.post("/admin/update_weights", json={"model": str(tmp_path)})
    assert (refused.status_code, str(tmp_path) in refused.text) == (400, True)
    assert text_of(server, 1) == old
    other = save_other_weights(tiny_model, tmp_path / "other")
    post(server, "/admin/update_weights", {"model": str(other)})
    new = text_of(server, 0)
    assert new != old
    assert text_of(server, 1) == new
    kill(server, "DP1", "running")
    assert text_of(server, 1) == new
    wait_until(lambda: server.metric("fourfold_kv_cache_usage") == 0, 5, "all blocks free")


@pytest.mark.long
def test_other_weights_are_the_way_out_for_a_replica_whose_weights_are_gone(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    first, second = (save_other_weights(tiny_model, tmp_path / name, seed=seed) for seed, name in ((5, "x"), (6, "y")))
    server = start(*TWO)
    post(server, "/admin/update_weights", {"model": str(first)})
    shutil.rmtree(first)
    os.kill(processes(server, "engine_core")["DP0"], signal.SIGKILL)
    wait_until(lambda: replicas(server)[0] == "failing", 60, "DP0 to fail")

    def shown(path: str) -> dict[str, Any]:
        with server.client() as client:
            reply = client.get(path)
        assert reply.status_code == 200
        answer: dict[str, Any] = reply.json()
        return answer

    for _ in range(2):  # by each API server
        error = shown("/topology")["replicas"][0]["error"]
        assert str(first) in error
        assert shown("/readyz")["failing"] == [{"rank": 0, "error": error}]
    text_of(server, 1)
    for attempt in range(3):  # whatever DP0 is at, sleep and waking are done
        assert post(server, "/admin/sleep")["is_sleeping"], attempt
        assert not post(server, "/admin/wake_up")["is_sleeping"]
    post(server, "/admin/update_weights", {"model": str(second)})
    wait_until(lambda: replicas(server) == ["running"] * 2, 60, "both replicas")
    assert text_of(server, 0) == text_of(server, 1)
    assert "failing" not in shown("/readyz")


@pytest.mark.parametrize("cut", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_all_ranks_sleep_and_take_other_weights(
    cut: dict[str, int], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    other = save_other_weights(tiny_model, tmp_path / "other")
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 600}
    with LLM(str(other), **options) as llm:
        expected = generate(llm)
    with LLM(str(tiny_model), load_format="dummy", **options, **cut) as llm:
        before = generate(llm)
        llm.sleep(level=2)
        with pytest.raises(EngineError, match="the engine is asleep"):
            generate(llm)
        llm.wake_up()
        llm.reset_prefix_cache()
        assert generate(llm) == before
        with pytest.raises(ConfigError, match=r"rank [01]: there is no file or folder '/nowhere'"):
            llm.update_weights("/nowhere")
        llm.update_weights(other)
        assert generate(llm) == expected != before


def test_a_sleeping_server_lets_go_of_clients_and_ends(start: Start) -> None:
    server = start(*TWO, "--drain-timeout", "300")
    streams = [Stream(server, "/v1/completions", completion(2000, **SEEDED)) for _ in range(4)]
    for opened in streams:
        opened.wait_for_events(2)
    post(server, "/admin/sleep")
    waiting = "fourfold_num_requests_waiting"
    wait_until(lambda: server.metric(waiting) == 4, 5, "all requests to wait")
    streams[0].hang_up()
    wait_until(lambda: server.metric(waiting) == 3, 5, "the request of the lost client to end")
    everything = [server.parent, *server.descendants()]
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    wait_until_gone(everything, 5)
    for opened in streams[1:]:
        opened.join()
        assert opened.error is not None
        assert "shutting down" in opened.error["message"]
    assert any("requests are ended as the replicas sleep" in line for line in server.lines)


def test_adapters_are_models_on_all_replicas(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    base = save_other_weights(tiny_model, tmp_path / "base")
    checkpoint = resolve_checkpoint(ModelConfig(model=str(base)), load_plugins(), NoProgress())
    folders = [write_adapter(checkpoint, tmp_path / name, seed=ord(name), alpha=40) for name in "ab"]
    arguments = ("--enable-lora", "--lora-modules", f"a={folders[0]}")
    server = start(*TWO, *arguments, model=base, load_format="auto")

    def ask(model: str, rank: int, prompt: str = "once") -> str:
        body = completion(24, model=model, prompt=prompt)
        with server.client() as client:
            reply = client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": str(rank)})
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    with server.client() as client:
        reply = client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folders[1])})
        assert reply.status_code == 200, reply.text
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": str(base)})
        assert (refused.status_code, "is no LoRA adapter" in refused.text) == (400, True)
    names = ["tiny", "a", "b"]
    alone = {name: ask(name, 0) for name in names}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(12) as pool:  # mixed in the batches of both replicas
        mixed = list(pool.map(lambda number: (names[number % 3], ask(names[number % 3], number % 2)), range(12)))
    assert all(alone[name] == text for name, text in mixed)
    kill(server, "DP1", "running")
    assert {name: ask(name, 1) for name in names} == alone
    with server.client() as client:
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "b"]
        assert client.post("/v1/completions", json=completion(2, model="a")).status_code == 404
    assert ask("b", 0) == alone["b"]
