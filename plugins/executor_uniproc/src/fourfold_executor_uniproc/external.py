"""One rank of an engine whose ranks a launcher started: every rank runs the same program, and so the same calls.

No rank leads. Every call compares what the ranks are about to do, runs the method of the own worker, and exchanges the
replies, so that each program sees what it would see of any other executor.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final, Literal

import msgspec

from fourfold.distributed.launched_store import open_launched_store, worker_store
from fourfold.distributed.store import host_identity
from fourfold.entries import ExecutorContext, WorkerContext
from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RpcTimeout
from fourfold.executor_shell import ExecutorShell
from fourfold.manifest import Fingerprint, compare_all, fingerprint
from fourfold.nodes.addresses import address_towards
from fourfold.plugins import load_plugins
from fourfold.rpc_call import RpcCall, read_error, report_error, run_call
from fourfold_executor_uniproc.launcher import LaunchedRank, read_launcher
from fourfold_executor_uniproc.meeting import Meeting
from fourfold_executor_uniproc.peers import PeerWatch

logger = logging.getLogger(__name__)

STEP: Final = "execute_model"
"""The call of every step, whose place is named by the number of the step."""
_DISCOVERY: Final = "plugin discovery"
_CONSTRUCTION: Final = "worker construction"
_PARTING: Final = 5.0
"""Seconds that the rank that hosts the store waits for the others' goodbye."""
_FAILED_PARTING: Final = 2.0
"""The same after a failure, which some of them may never hear."""
_SETTLE: Final = 0.5
"""Seconds that the loss of the meeting place waits for the watch: it may be the echo of its host's death."""


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What a rank puts down in a round."""

    kind: Literal["announce", "reply", "done", "error", "gone", "left"]
    name: str
    digest: bytes
    payload: bytes = b""


class _Introduction(msgspec.Struct, frozen=True, array_like=True):
    """The payload of the first note."""

    fingerprint: Fingerprint
    host: str
    """Whose processes see each other."""
    pid: int


class ExternalExecutor(ExecutorShell):
    """See ``fourfold.contracts.executor.Executor``; a call must be made by every rank, in the same order.

    The worker lives on a thread of its own, so that a rank that waits in a collective still hears that another failed.
    """

    max_in_flight = 1

    def __init__(self, context: ExecutorContext, launched: LaunchedRank | None = None) -> None:
        """Meet the other ranks and build this rank's worker. ``launched`` is by default what the environment says.

        Raises ConfigError and PluginError for ranks that do not fit together, WorkerError for a worker that cannot be
        built on some rank, RpcTimeout naming ranks that did not come within --startup-timeout.
        """
        self._launched = launched or read_launcher(os.environ)
        super().__init__(context)
        if self._launched.world_size != self.world_size:
            raise ConfigError(
                f"WORLD_SIZE is {self._launched.world_size}, and {context.layout} makes {self.world_size} ranks; "
                "start as many as there are"
            )
        self._compares_all = context.config.parallel.debug_collectives
        self._compared: set[str] = set()
        self._steps = itertools.count()
        self._rounds = itertools.count()
        self._round = 0
        """The last one that this rank took part in."""
        self._at = ""
        """The name of the call in progress."""
        self._peers: PeerWatch | None = None
        self._lost = threading.Event()
        self._calls = threading.Lock()  # held by the call in progress
        self._worker: Any = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        rank, startup = self._launched.rank, self._timeouts.startup_timeout
        store = open_launched_store(rank=rank, world_size=self.world_size, timeout=startup)
        self._meeting = Meeting(store, rank=rank, world_size=self.world_size, hosts_store=self._launched.hosts_store)
        self._thread = threading.Thread(target=self._work, name="external-worker", daemon=True)
        self._thread.start()
        try:
            self._introduce(context, startup)
            self._run(_CONSTRUCTION, b"", partial(self._build_worker, context, store), None, startup)
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[dict[str, Any]]:
        """None: a launcher has started the ranks, and their engines with them."""
        return []

    def shutdown(self) -> None:
        """Let the worker go, after the call in progress; idempotent. The other ranks hear that this one has left."""
        if not self._close():
            return
        failed = self._failure is not None
        if self._peers is not None:
            self._peers.close()
        self._tasks.put(self._end_worker)
        self._tasks.put(None)
        if self._calls.acquire(timeout=_PARTING):
            try:
                if not failed:
                    self._leave()
            finally:
                self._calls.release()
        self._thread.join(_FAILED_PARTING if failed else _PARTING)
        if self._thread.is_alive():
            logger.warning("rank %d is still in a call; it is left to the end of the process", self._launched.rank)
        self._meeting.part(_FAILED_PARTING if failed else _PARTING)

    # --- a call --------------------------------------------------------------------------------------------------

    def _call(self, call: RpcCall) -> Any:
        content = call.encoded()
        deadline = time.monotonic() + call.timeout
        if not self._calls.acquire(timeout=call.timeout):
            raise RpcTimeout(call.name, call.timeout, [self._launched.rank])
        try:
            self._check_open(call.name)
            step = next(self._steps) if call.name == STEP else None
            work = partial(self._answer, content)
            replies = self._run(call.name, content, work, step, call.timeout, deadline=deadline)
        finally:
            self._at = ""
            self._calls.release()
        return call.result(replies)

    def _run(
        self,
        name: str,
        content: bytes,
        work: Callable[[], bytes | None],
        step: int | None,
        timeout: float,
        *,
        deadline: float | None = None,
    ) -> list[bytes | None]:
        """``work`` on the worker's thread, and every rank's reply; None for ranks that were not asked for one."""
        until = time.monotonic() + timeout if deadline is None else deadline
        self._at = name
        digest = hashlib.blake2b(content, digest_size=8).digest()
        if self._compares_all or name not in self._compared:
            # Before the first collective that ranks with different input might run differently.
            note = _Note("announce", name, digest)
            self._exchange(note, step, timeout, until)
            self._compared.add(name)
        number = self._next_round()
        self._tasks.put(partial(self._give_outcome, number, name, digest, work))
        notes = self._take(number, name, timeout, until)
        self._check_alike(notes, name, step)
        self._raise_first_error(notes, name)
        if len(notes) < self.world_size:
            raise RpcTimeout(name, timeout, [rank for rank in range(self.world_size) if rank not in notes])
        return [notes[rank].payload or None for rank in range(self.world_size)]

    def _exchange(self, note: _Note, step: int | None, timeout: float, until: float) -> dict[int, _Note]:
        """A round of its own, which the worker has no part in."""
        number = self._next_round()
        try:
            self._meeting.give(number, msgspec.msgpack.encode(note))
        except RuntimeError as error:
            raise self._fail_without_meeting(note.name, error) from error
        notes = self._take(number, note.name, timeout, until)
        self._check_alike(notes, note.name, step)
        if len(notes) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in notes]
            raise self._fail(RpcTimeout(note.name, timeout, missing))  # rounds no longer fit together
        return notes

    def _take(self, number: int, name: str, timeout: float, until: float) -> dict[int, _Note]:
        try:
            taken = self._meeting.take(number, max(0.0, until - time.monotonic()))
            lost = "" if len(taken) == self.world_size else self._meeting.reason_to_give_up()
        except RuntimeError as error:
            raise self._fail_without_meeting(name, error) from error
        if lost or self._lost.is_set():
            raise super()._fail(ExecutorFailed(lost))  # without a goodbye, which would wait for the lost one
        return {rank: msgspec.msgpack.decode(note, type=_Note) for rank, note in taken.items()}

    def _next_round(self) -> int:
        self._round = next(self._rounds)
        return self._round

    def _fail_without_meeting(self, name: str, error: RuntimeError) -> EngineError:
        self._lost.wait(_SETTLE)
        return self._fail(ExecutorFailed(f"the ranks have lost the place where they meet, in {name}: {error}"))

    def _lose(self, rank: int, how: str) -> None:
        """On the thread of the watch: a rank of this host has ended or stands still."""
        try:
            if self._meeting.has_parted(rank):
                return
        except RuntimeError as error:
            logger.debug("the meeting place has gone with rank %d: %s", rank, error)
        failure = ExecutorFailed(f"rank {rank} {how} {f'during {self._at}' if self._at else 'while idle'}", rank=rank)
        if super()._fail(failure) is not failure:
            return
        logger.error("%s", failure)
        self._lost.set()
        try:
            self._meeting.abandon(self._round, str(failure))
        except RuntimeError as error:
            logger.debug("the others cannot be told: %s", error)

    def _check_alike(self, notes: Mapping[int, _Note], name: str, step: int | None) -> None:
        """Fail for good when ranks are not about the same thing."""
        for rank, note in notes.items():
            if note.kind == "left":
                failure = ExecutorFailed(f"rank {rank} was shut down while the others call {name!r}", rank=rank)
                raise self._fail(failure)
        seen = {rank: (note.kind == "announce", note.name, note.digest) for rank, note in notes.items()}
        counted = Counter(seen[rank] for rank in sorted(seen)).most_common()
        if len(counted) < 2:
            return
        expected = counted[0][0]
        odd = [rank for rank in sorted(seen) if seen[rank] != expected]
        place = f"in {name}" if step is None else f"at step {step}"
        failure = ExecutorFailed(
            f"rank {', '.join(map(str, odd))} diverged {place}; give every rank the same prompts, parameters and "
            "options, in the same order",
            rank=odd[0],
        )
        raise self._fail(failure)

    def _raise_first_error(self, notes: Mapping[int, _Note], name: str) -> None:
        for rank in sorted(notes):
            note = notes[rank]
            if note.kind == "gone":
                left = f"rank {rank} left with exit code {note.payload.decode()} in {name}"
                raise self._fail(ExecutorFailed(left, rank=rank))
        for rank in sorted(notes):
            if notes[rank].kind == "error":
                raise read_error(notes[rank].payload, rank=rank)

    def _introduce(self, context: ExecutorContext, timeout: float) -> None:
        """Compare what the ranks are, and watch those that this one can see."""
        host = host_identity()
        mine = fingerprint(context.config, load_plugins().manifest, rank=self._launched.rank)
        introduction = msgspec.msgpack.encode(_Introduction(mine, host, os.getpid()))
        notes = self._exchange(
            _Note("announce", _DISCOVERY, b"", introduction), None, timeout, time.monotonic() + timeout
        )
        ranks = {rank: msgspec.msgpack.decode(notes[rank].payload, type=_Introduction) for rank in sorted(notes)}
        compare_all([one.fingerprint for one in ranks.values()])
        pids = {rank: one.pid for rank, one in ranks.items() if one.host == host and one.pid != os.getpid()}
        self._peers = PeerWatch(pids, stall_timeout=self._timeouts.stall_timeout, on_lost=self._lose)

    def _fail(self, failure: EngineError, *, first: Callable[[], None] | None = None) -> EngineError:
        found = super()._fail(failure, first=first)
        self._meeting.part(_FAILED_PARTING)
        return found

    def _leave(self) -> None:
        note = msgspec.msgpack.encode(_Note("left", "shutdown", b""))
        try:
            self._meeting.give(next(self._rounds), note, ends=True)
        except RuntimeError:
            logger.debug("the others have left before rank %d", self._launched.rank)

    # --- on the worker's thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("rank %d could not tell the others how a call ended", self._launched.rank)

    def _give_outcome(self, number: int, name: str, digest: bytes, work: Callable[[], bytes | None]) -> None:
        try:
            reply = work()
            note = _Note("done", name, digest) if reply is None else _Note("reply", name, digest, reply)
        except SystemExit as error:  # what would end a worker process ends this worker
            note = _Note("gone", name, digest, str(error.code).encode())
        except Exception as error:
            note = _Note("error", name, digest, report_error(error, name))
        self._meeting.give(number, msgspec.msgpack.encode(note), ends=note.kind in ("gone", "error"))

    def _answer(self, content: bytes) -> bytes | None:
        return run_call(self._worker, content, rank=self._launched.rank)

    def _build_worker(self, context: ExecutorContext, store: Any) -> None:
        launched = self._launched
        several = self.world_size > 1
        self._worker = resolve_name(context.worker)(
            WorkerContext(
                config=context.config,
                layout=context.layout,
                rank=launched.rank,
                local_rank=launched.local_rank,
                local_workers=launched.local_world_size,
                node=launched.node,
                address=address_towards(launched.master_address) if launched.node else "",
                dp_rank=context.dp_rank,
                open_store=partial(worker_store, store) if several else None,
            )
        )

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        end = getattr(worker, "shutdown", None)
        if end is not None and self._failure is None:
            end()
