"""Ranks of ``external`` in processes of their own, which nobody but they themselves looks after."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).parent / "lost_rank_program.py"
RANKS = 3
PROMPTLY = 2.0
Start = Callable[[str], list[subprocess.Popen[str]]]


@pytest.fixture
def start(agent_store: dist.TCPStore) -> Iterator[Start]:
    with ExitStack() as processes:

        def start(moment: str) -> list[subprocess.Popen[str]]:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
            if moment == "hosting":
                with socket.create_server(("127.0.0.1", 0)) as free:
                    environment["MASTER_PORT"] = str(free.getsockname()[1])
            else:
                environment |= {"MASTER_PORT": str(agent_store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            ranks = []
            for rank in range(RANKS):
                places = {"RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}", "LOCAL_RANK": f"{rank}"}
                command = [sys.executable, str(PROGRAM), f"{rank}", f"{RANKS}", moment]
                pipe = subprocess.PIPE
                process = subprocess.Popen(command, env=environment | places, stdout=pipe, stderr=pipe, text=True)
                ranks.append(processes.enter_context(process))
                processes.callback(process.kill)
            for process in ranks:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            return ranks

        yield start


CASES: dict[str, Any] = {
    "killed in a call": ("working", 1, signal.SIGKILL, "rank 1 has ended during wait", 0.0),
    "killed between calls": ("idle", 1, signal.SIGKILL, "rank 1 has ended while idle", 0.0),
    "stopped in a call": ("working", 1, signal.SIGSTOP, "rank 1 was stopped by a signal for 1 s during wait", 1.5),
    "killed with the store": ("hosting", 0, signal.SIGKILL, "rank 0 has ended during wait", 0.0),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if "between" in case else ()) for case in CASES]
)
def test_a_lost_rank_is_named_by_all_others(start: Start, case: str) -> None:
    moment, victim, signum, text, seconds = CASES[case]
    ranks = start(moment)
    os.kill(ranks[victim].pid, signum)
    began = time.monotonic()
    for rank, process in enumerate(ranks):
        if rank == victim:
            continue
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if (moment, rank) == ("hosting", RANKS - 1):  # what told the ranks of other hosts has gone with rank 0
            assert line.startswith("ExecutorFailed: the ranks have lost the place where they meet, in wait")
        elif (moment, rank) == ("idle", RANKS - 1):  # hears of it at its next call
            assert line == f"ExecutorFailed: {text}"
        else:
            assert line.removeprefix("ExecutorFailed: ").endswith(text), line
            assert time.monotonic() - began < seconds + PROMPTLY
