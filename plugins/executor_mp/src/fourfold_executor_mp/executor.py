"""Gives every rank of one engine a fresh interpreter on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from fourfold.entries import ExecutorContext
from fourfold.rpc.rank_executor import ROLE, RankExecutor, log_level
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import process_state


class MpExecutor(RankExecutor):
    """A process per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Start all ranks at once and wait until each has built its worker.

        Raises WorkerError or ExecutorFailed for a rank that cannot, PluginError and ConfigError for ranks that differ,
        RpcTimeout past --startup-timeout; no process is left then.
        """
        super().__init__(context)
        started = time.monotonic()
        self._children: list[ChildProcess] = []
        streams = [socket.socketpair() for _ in range(self.world_size)]
        self._connect({rank: ours for rank, (ours, _) in enumerate(streams)})
        self._supervisor = ChildSupervisor(stall_timeout=self._timeouts.stall_timeout)
        try:
            rendezvous = self._start_ranks([theirs for _, theirs in streams])
            self._start_workers(context, rendezvous=rendezvous, started=started)
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs."""
        rows = []
        for rank, child in enumerate(self._children):
            with contextlib.suppress(ProcessLookupError):
                rows.append(msgspec.to_builtins(process_state(ROLE, self._label(rank), "running", pid=child.pid)))
        return rows

    def _start_ranks(self, streams: Sequence[socket.socket]) -> str:
        """Start them; returns where they meet."""
        with contextlib.ExitStack() as ours:  # what the ranks inherit is theirs alone afterwards
            for stream in streams:
                ours.enter_context(stream)
            # Where ranks meet before they can talk: no port, no name, and gone with the last process that holds it.
            rendezvous = os.memfd_create("fourfold-rendezvous")
            ours.callback(os.close, rendezvous)
            for rank, stream in enumerate(streams):
                self._children.append(
                    self._supervisor.start(
                        self._command(rank, stream.fileno(), rendezvous),
                        on_exit=partial(self._note_exit, rank),
                    )
                )
        # By its path, so that every rank has an open file of its own: locks belong to open files.
        return f"file:///proc/self/fd/{rendezvous}"

    def _note_exit(self, rank: int, child: ChildProcess, how: ChildExit) -> None:
        """On the supervisor's thread, which must not wait."""
        self._open_channels.post(partial(self._lose, rank, str(how)))

    def _command(self, rank: int, channel: int, rendezvous: int) -> ChildCommand:
        label = self._label(rank)
        # Every replica is taken to be on this host, as its devices and cores are shared out.
        arguments = ["--rank", str(rank), "--local-rank", str(self._global(rank)), "--label", label]
        arguments += ["--channel", str(channel), "--log-level", log_level()]
        return ChildCommand(
            module="fourfold_executor_mp.rank",
            label=f"{ROLE} {label}",
            arguments=arguments,
            pass_fds=(channel, rendezvous),
        )

    def _end_ranks(self, grace: float) -> None:
        # Ranks ignore SIGTERM, which may come to the whole process group when it is for the server alone.
        self._supervisor.close(grace=grace, terminate=0)

    def _kill_ranks(self) -> None:
        for child in self._children:
            child.send_signal(signal.SIGKILL)

    def _describe(self, rank: int) -> str:
        pid = f", pid {self._children[rank].pid}" if rank < len(self._children) else ""
        return f"rank {rank} ({self._label(rank)}{pid})"
