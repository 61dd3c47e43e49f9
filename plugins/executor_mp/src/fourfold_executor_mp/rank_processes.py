"""The processes of the ranks that one node has of an engine. Knows no call."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from fourfold.layout import ParallelLayout
from fourfold.rpc.rank_executor import ROLE, log_level
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import process_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which ranks a node has, and what it is."""

    layout: ParallelLayout
    dp_rank: int
    ranks: Sequence[int]
    local_start: int
    """The local rank of the first of them."""
    local_workers: int
    """Ranks of all engines on this node; 0: all there are."""
    node: str = ""
    """As messages call it; empty: there is no other."""
    address: str = ""
    """Where other nodes reach it."""

    def label(self, rank: int) -> str:
        """A rank as titles and logs call it."""
        return self.layout.label(self.dp_rank * self.layout.engine_world_size + rank)


class RankProcesses:
    """Starts a fresh interpreter for every rank, and ends all."""

    def __init__(self, part: Part, *, stall_timeout: float) -> None:
        self._part = part
        self._supervisor = ChildSupervisor(stall_timeout=stall_timeout)
        pairs = {rank: socket.socketpair() for rank in part.ranks}
        self.streams = {rank: ours for rank, (ours, _) in pairs.items()}
        """Our ends of the streams to the ranks, for whoever calls them to take over."""
        self._theirs = {rank: theirs for rank, (_, theirs) in pairs.items()}
        self.children: dict[int, ChildProcess] = {}
        """By rank."""

    def start(self, on_exit: Callable[[int, str], None]) -> str:
        """Start them; returns where they meet if no other node has any.

        ``on_exit`` hears, on the supervisor's thread, of a rank that has ended, and how.
        """
        with contextlib.ExitStack() as ours:  # what the ranks inherit is theirs alone afterwards
            for theirs in self._theirs.values():
                ours.enter_context(theirs)
            # Where ranks meet before they can talk: no port, no name, and gone with the last process that holds it.
            rendezvous = os.memfd_create("fourfold-rendezvous")
            ours.callback(os.close, rendezvous)
            for place, (rank, theirs) in enumerate(self._theirs.items()):
                self.children[rank] = self._supervisor.start(
                    self._command(rank, place, theirs.fileno(), rendezvous),
                    on_exit=partial(_tell_exit, on_exit, rank),
                )
        # By its path, so that every rank has an open file of its own: locks belong to open files.
        return f"file:///proc/self/fd/{rendezvous}"

    def rows(self) -> list[dict[str, Any]]:
        """One row of ``/topology`` a rank that runs."""
        rows = []
        for rank, child in self.children.items():
            with contextlib.suppress(ProcessLookupError):
                state = process_state(ROLE, self._part.label(rank), "running", pid=child.pid)
                rows.append(msgspec.to_builtins(msgspec.structs.replace(state, node=self._part.node)))
        return rows

    def pid(self, rank: int) -> int | None:
        """The process of a rank; None for one that is not started here."""
        child = self.children.get(rank)
        return None if child is None else child.pid

    def kill(self) -> None:
        """End all at once, and wait for nothing."""
        for child in self.children.values():
            child.send_signal(signal.SIGKILL)

    def close(self, grace: float) -> None:
        """End all, and wait for their end; they may take ``grace`` seconds. Idempotent."""
        # Ranks ignore SIGTERM, which may come to the whole process group when it is for the server alone.
        self._supervisor.close(grace=grace, terminate=0)

    def _command(self, rank: int, place: int, channel: int, rendezvous: int) -> ChildCommand:
        part, label = self._part, self._part.label(rank)
        arguments = ["--rank", str(rank), "--local-rank", str(part.local_start + place), "--label", label]
        arguments += ["--local-workers", str(part.local_workers), "--node", part.node, "--address", part.address]
        arguments += ["--channel", str(channel), "--log-level", log_level()]
        return ChildCommand(
            module="fourfold_executor_mp.rank",
            label=f"{ROLE} {label}",
            arguments=arguments,
            pass_fds=(channel, rendezvous),
        )


def _tell_exit(on_exit: Callable[[int, str], None], rank: int, child: ChildProcess, how: ChildExit) -> None:
    on_exit(rank, str(how))
