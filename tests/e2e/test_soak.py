"""Two replicas under random kills, hang-ups and bad requests: nothing is lost, nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from .conftest import Start
from .running_server import Server, wait_until
from .test_lifecycle import completion
from .test_replicas import processes, replicas

WORKERS = 6
VICTIMS = (("engine_core", "DP0"), ("engine_core", "DP1"), ("api_server", "1"), ("coordinator", ""))
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": [10**9]},
    {"model": "nobody"},
    {"temperature": -1},
    {"max_tokens": "many"},
    {"stop": 5},
    {"prompt": "a " * 20_000},
)


@dataclass
class Tally:
    """What became of requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    server_deaths: list[float] = field(default_factory=list)
    """When an API server was killed: connections to it break."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, unexpected: str = "") -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if unexpected:
                self.unexpected.append(unexpected)


class Load(threading.Thread):
    """One client after another."""

    def __init__(self, url: str, expected: dict[int, str], tally: Tally, stop: threading.Event, seed: int) -> None:
        super().__init__()
        self._url, self._expected, self._tally, self._stopping = url, expected, tally, stop
        self._random = random.Random(seed)

    def run(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            kind = self._random.choice(("whole", "whole", "stream", "hang-up", "bad"))
            try:
                with httpx.Client(base_url=self._url, timeout=60, verify=False) as client:
                    getattr(self, f"_{kind.replace('-', '_')}")(client)
            except httpx.HTTPError as error:
                broken = any(started - 1 <= death <= time.monotonic() for death in self._tally.server_deaths)
                self._tally.note("broken", "" if broken else f"{kind}: {error!r}")

    def _whole(self, client: httpx.Client) -> None:
        number = self._random.choice(list(self._expected))
        reply = client.post("/v1/completions", json=request(number))
        if reply.status_code == 200:
            self._compare("whole", number, reply.json()["choices"][0]["text"])
        else:
            self._tally.note("whole", f"whole: {reply.status_code} {reply.text}")

    def _stream(self, client: httpx.Client) -> None:
        number = self._random.choice(list(self._expected))
        text, done = "", False
        with client.stream("POST", "/v1/completions", json={**request(number), "stream": True}) as reply:
            for event in map(parse, reply.iter_lines()):
                if event is None:
                    done = True
                elif "error" in event:
                    self._tally.note("stream", f"stream: {event}")
                    return
                elif event:
                    text += event["choices"][0]["text"]
        if done:
            self._compare("stream", number, text)
        else:
            self._tally.note("stream", "a stream that ends in the middle")

    def _hang_up(self, client: httpx.Client) -> None:
        with client.stream("POST", "/v1/completions", json={**completion(4000), "stream": True}) as reply:
            for number, _ in enumerate(reply.iter_lines()):
                if number >= self._random.randint(0, 20):
                    break
        self._tally.note("hang-up")

    def _bad(self, client: httpx.Client) -> None:
        reply = client.post("/v1/completions", json={**request(0), **self._random.choice(BAD)})
        expected = 400 <= reply.status_code < 500
        self._tally.note("bad", "" if expected else f"bad: {reply.status_code} {reply.text}")

    def _compare(self, kind: str, number: int, text: str) -> None:
        expected = self._expected[number]
        self._tally.note(kind, "" if text == expected else f"{kind} {number}: {text!r} in place of {expected!r}")


def request(number: int) -> dict[str, Any]:
    return completion(20 + 15 * number, prompt=f"number {number}", temperature=0.9, seed=number)


def parse(line: str) -> dict[str, Any] | None:
    """An event, ``{}`` for a line that is none, None for the end."""
    if not line.startswith("data: "):
        return {}
    if line == "data: [DONE]":
        return None
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return event


def footprint(server: Server) -> tuple[int, int, float]:
    """Descriptors, threads and megabytes of the process that lives through it all."""
    process = server.parent
    return process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6


def kill_one(server: Server, tally: Tally, role: str, label: str) -> None:
    """Kill a process and wait until another has its place."""
    victim = processes(server, role)[label]
    if role == "api_server":
        tally.server_deaths.append(time.monotonic())
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: processes(server, role).get(label, victim) != victim and all_running(server), 60, f"{role} {label}"
    )


def all_running(server: Server) -> bool:
    states = [state["state"] for name, state in server.states().items() if " " in name]
    return len(states) == 5 and set(states) == {"running"}


def settled(server: Server) -> bool:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    gauges = ("fourfold_num_requests_running", "fourfold_num_requests_waiting", "fourfold_kv_cache_usage")
    return all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines if line.startswith(gauges))


@pytest.mark.parametrize("seconds", [60.0, pytest.param(1800.0, marks=[pytest.mark.long, pytest.mark.timeout(2400)])])
def test_kills_hang_ups_and_bad_requests(start: Start, seconds: float) -> None:
    server = start("--data-parallel-size", "2", "--num-blocks", "1500", "--max-num-seqs", "8")
    with server.client() as client:
        expected = {
            number: client.post("/v1/completions", json=request(number)).json()["choices"][0]["text"]
            for number in range(8)
        }
    tally, stop = Tally(), threading.Event()
    draw = random.Random(4)
    loads = [Load(server.url, expected, tally, stop, seed) for seed in range(WORKERS)]
    for load in loads:
        load.start()
    try:
        kill_one(server, tally, *VICTIMS[0])  # what is made once is made now
        before = footprint(server)
        end, kills = time.monotonic() + seconds, 1
        while time.monotonic() < end:
            kill_one(server, tally, *VICTIMS[kills % len(VICTIMS)])
            kills += 1
            stop.wait(draw.uniform(0.2, 2.0))
    finally:
        stop.set()
        for load in loads:
            load.join(90)
    assert not any(load.is_alive() for load in loads), "a request without an end"
    assert tally.unexpected == []
    assert min(tally.outcomes[kind] for kind in ("whole", "stream", "hang-up", "bad")) > 0
    wait_until(lambda: settled(server), 10, "no request, no block in use")
    assert replicas(server) == ["running", "running"]
    assert len(server.descendants()) == 4
    wait_until(lambda: footprint(server)[0] <= before[0] + 2, 10, f"{before[0]} descriptors")
    _, threads, megabytes = footprint(server)
    assert threads <= before[1] + 1
    assert megabytes < before[2] + 30
    everything = [server.parent, *server.descendants()]
    server.signal(signal.SIGTERM)
    assert server.wait(30) == 0
    assert not [process for process in everything if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert list(server.root.iterdir()) == []
