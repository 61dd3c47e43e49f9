"""A `fourfold serve` in a process of its own, and streams of its answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT = 180.0
TIMEOUT = 60.0


def wait_until(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """The first true value of ``condition``; fails the test after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        threading.Event().wait(0.02)
    return value


class Server:
    """One `fourfold serve` and its log."""

    def __init__(self, arguments: Sequence[str], runtime_directory: Path, **environment: str) -> None:
        runtime_directory.mkdir(exist_ok=True)
        self.root = runtime_directory / "fourfold"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fourfold_server.cli", "serve", "--port", "0", *arguments],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_directory), **environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.api_key: str | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def states(self) -> dict[str, dict[str, Any]]:
        """The state files of the run directory, by role."""
        found = {}
        for file in self.root.glob("*/*.state"):
            with contextlib.suppress(FileNotFoundError):
                state = json.loads(file.read_bytes())
                found[state["role"]] = found[f"{state['role']} {state['label']}"] = state
        return found

    def wait_for_state(self, role: str, *states: str) -> dict[str, Any]:
        def check() -> dict[str, Any] | None:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            # With several API servers the first speaks for the deployment.
            shown = self.states()
            state = shown.get(f"{role} 0", shown.get(role))
            return state if state is not None and state["state"] in states else None

        state: dict[str, Any] = wait_until(check, START_TIMEOUT, f"{role} {states}; the log:\n{self.log}")
        return state

    def wait_until_ready(self) -> None:
        self.wait_for_state("api_server", "running")

    @property
    def url(self) -> str:
        url: str = self.wait_for_state("api_server", "starting", "running", "draining")["detail"]
        return url

    @property
    def engine_pid(self) -> int:
        pid: int = self.wait_for_state("engine_core", "starting", "running")["pid"]
        return pid

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Without verify=False each client reads all certificates of the system, which takes longer than many answers.
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT, verify=False)

    def status(self, path: str) -> int:
        with self.client() as client:
            return client.get(path).status_code

    def health(self) -> dict[str, Any]:
        """What /health says of the engine."""
        with self.client() as client:
            engine: dict[str, Any] = client.get("/health").json()["engines"][0]
        return engine

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = self.series(name)
        assert found, f"no metric {name}"
        return sum(value for _, value in found)

    def metric_of(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(value for series, value in self.series(name) if all(label in series for label in wanted))

    def series(self, name: str) -> list[tuple[str, float]]:
        """Labels and value of each series of a metric, as one API server knows them.

        Another API server may not have heard yet: figures to be compared come from one call.
        """
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if re.split(r"[{ ]", line, maxsplit=1)[0] == name]
        return [(series, float(value)) for series, value in found]

    @property
    def parent(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, signum: signal.Signals, *, group: bool = False) -> None:
        if group:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)

    def wait(self, timeout: float) -> int:
        """The exit status; the log is then complete."""
        status = self.process.wait(timeout)
        self._reader.join(TIMEOUT)
        return status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait(TIMEOUT)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


class Stream:
    """A streamed answer, read by a thread of its own."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.done = False
        self.status: int | None = None
        self.failure: Exception | None = None
        self._client = server.client()
        self._reply: httpx.Response | None = None
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(path, {**body, "stream": True}))
        self._thread.start()

    def _run(self, path: str, body: dict[str, Any]) -> None:
        try:
            with self._client, self._client.stream("POST", path, json=body) as reply:
                self._reply = reply
                self.status = reply.status_code
                for line in reply.iter_lines():
                    if self._close.is_set():
                        return
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.failure = error

    def wait_for_events(self, count: int, timeout: float = TIMEOUT) -> None:
        wait_until(lambda: len(self.events) >= count, timeout, f"{count} events; there are {self.events}")

    def close(self) -> None:
        """Hang up after the next event."""
        self._close.set()
        self.join()

    def hang_up(self) -> None:
        """Close the connection now, whether or not anything comes."""
        if self._reply is None:
            raise RuntimeError("the stream has not begun")
        stream = self._reply.extensions["network_stream"]
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.join()

    def join(self, timeout: float = TIMEOUT) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the stream goes on after {timeout:g} s"

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices
        )

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that ended it."""
        error: dict[str, Any] | None = next((event["error"] for event in self.events if "error" in event), None)
        return error
