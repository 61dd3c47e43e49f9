"""Two hosts on this machine: network namespaces joined by a cable that can be slow, lossy, narrow, and cut.

For root on Linux with iproute2. What runs on a host shares files, cores and memory with all others, and no address.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from fourfold.testing.namespaces import END_SECONDS, end_all, own_names, pids_in, start_keeper, sweep

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
INTERFACE: Final = "cable"
_MTU: Final = 9000
"""Of a slow cable, whose frames pass through a program: fewer and larger ones."""
_JOIN_SECONDS: Final = 30.0
_ROUND_TRIP: Final = """
import socket, statistics, sys, time
found = []
for _ in range(11):
    start = time.perf_counter()
    try:
        socket.create_connection((sys.argv[1], 9), 10).close()
    except ConnectionRefusedError:  # its answer is one round trip away
        found.append(time.perf_counter() - start)
    except OSError:
        break
if found:
    print(statistics.median(found))
"""


class NoHosts(Exception):
    """This user or this kernel cannot make them."""


class Hosts:
    """Host 0 and host 1, which end with the ``with`` block, as does all that runs on them; with this process at last,
    even if it is killed. One pair a process at a time.
    """

    def __init__(self, *, delay: float = 0.0, loss: float = 0.0, rate: str = "") -> None:
        """``delay``: seconds that a frame takes, each way; ``loss``: share of frames that get lost; ``rate``: bits a
        second as ``tc`` takes them, such as ``1gbit``. Raises NoHosts with the reason.
        """
        self._names = own_names()
        self._keeper: subprocess.Popen[str] | None = None
        self._relay: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[str]] = []
        try:
            sweep()
            self._keeper = start_keeper(self._names)
            for name in self._names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            if delay or loss:
                self._join_slowly(delay, loss)
            else:
                ends = ("link", "add", INTERFACE, "type", "veth", "peer", INTERFACE, "netns", self._names[1])
                _ip("-n", self._names[0], *ends)
            for name, address in zip(self._names, ADDRESSES):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "up")
                if rate:
                    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
                    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limit)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NoHosts(f"this user cannot make hosts of network namespaces: {why}") from error

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self, host: int, *command: object, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process on a host, with more variables; ``log`` takes what it says on standard error."""
        with contextlib.ExitStack() as files:
            errors = None if log is None else files.enter_context(log.open("w"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *map(str, command)],
                env={**_without_proxies(os.environ), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def round_trip(self) -> float:
        """Seconds from host 0 to host 1 and back, the median of a few. Raises ConnectionError if nothing comes back."""
        process = self.start(0, sys.executable, "-c", _ROUND_TRIP, ADDRESSES[1])
        found = process.communicate(timeout=120)[0]
        if not found:
            raise ConnectionError(f"nothing comes back from {ADDRESSES[1]}")
        return float(found)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self._names[1], "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip("-n", self._names[1], "link", "set", INTERFACE, "up")

    def kill(self, host: int) -> None:
        """End all that runs on a host at once, as the loss of its power does."""
        end_all(self._names[host])

    def processes(self, host: int) -> list[int]:
        """What runs on a host."""
        return pids_in(self._names[host])

    def close(self) -> None:
        """Idempotent. Raises TimeoutExpired, with the command, for what does not end."""
        keeper, self._keeper = self._keeper, None
        relay, self._relay = self._relay, None
        ended, self._processes = self._processes, []
        if keeper is not None:
            keeper.communicate(timeout=3 * END_SECONDS)
        for process in ended:
            process.communicate(timeout=END_SECONDS)
        if relay is not None:
            relay.communicate(timeout=END_SECONDS)

    def _join_slowly(self, delay: float, loss: float) -> None:
        """The interfaces are made here and moved: their other ends stay with the program that carries frames."""
        ends = [f"ff{os.getpid()}-{number}" for number in (0, 1)]
        self._relay = subprocess.Popen(
            [sys.executable, "-P", "-m", "fourfold.testing.cable", *ends, f"--delay={delay}", f"--loss={loss}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not _says_ready(self._relay):
            self._relay.kill()
            _, errors = self._relay.communicate(timeout=END_SECONDS)
            raise OSError(f"no TAP interfaces within {_JOIN_SECONDS:g} s: {errors.strip().splitlines()[-1:]}")
        for end, name in zip(ends, self._names):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "mtu", _MTU)


def _says_ready(process: subprocess.Popen[str]) -> bool:
    if process.stdout is None or not select.select([process.stdout], [], [], _JOIN_SECONDS)[0]:
        return False
    return process.stdout.readline() == "ready\n"


def _without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """What reaches a proxy of this machine reaches nothing from a host."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}


def _ip(*arguments: object) -> None:
    _run("ip", *map(str, arguments))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
