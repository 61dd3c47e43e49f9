"""Ranks as actors of a Ray cluster: Ray places them and tells of their end, calls go to them directly."""

from __future__ import annotations

import logging
import queue
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RpcTimeout
from fourfold.rpc.rank_executor import RankExecutor, log_level
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import is_running
from fourfold_executor_ray.door import Door
from fourfold_executor_ray.messages import (
    Arrival,
    End,
    Invitation,
    Joined,
    Lost,
    News,
    Order,
    Placed,
    Plan,
    Refused,
    Waiting,
)
from fourfold_executor_ray.session import end_process, kill_session
from fourfold_executor_ray.settings import given_cluster, settings_of

logger = logging.getLogger(__name__)

_GOODBYE: Final = 5.0
"""Seconds for the driver to give back what it holds of a cluster that goes on."""
_CAUSE_SECONDS: Final = 1.0
"""How long a rank that has hung up waits for Ray to say why."""
_QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


class RayExecutor(RankExecutor):
    """An actor per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Place all ranks and wait until each has built its worker.

        Raises ConfigError for a cluster that cannot be joined or is too small, WorkerError or ExecutorFailed for a rank
        that cannot start, PluginError and ConfigError for ranks that differ, RpcTimeout past --startup-timeout.
        """
        super().__init__(context)
        self._started = time.monotonic()
        settings = settings_of(context.config)
        self._address, where = given_cluster(settings)
        if self._address:
            logger.info("the ranks run in the Ray cluster %s (%s)", self._address, where)
        self._folder = Path(tempfile.mkdtemp(prefix="fourfold-ray-"))
        self._news: queue.SimpleQueue[News | ChildExit | tuple[Arrival, socket.socket]] = queue.SimpleQueue()
        self._arrived: dict[int, tuple[Arrival, socket.socket]] = {}
        self._causes: dict[int, str] = {}
        self._nodes: tuple[str, ...] = ()
        self._ending = False
        self._door: Door | None = None
        self._driver: ChildProcess | None = None
        self._supervisor = ChildSupervisor()
        try:
            self._door = Door(self._folder / "door", lambda arrival, stream: self._news.put((arrival, stream)))
            self._driver = self._supervisor.start(
                self._command(), on_report=self._hear, on_exit=lambda child, how: self._note_exit(how)
            )
            self._order(self._plan(settings.placement, settings.placement_group))
            self._gather()
            streams = [self._arrived[rank][1] for rank in range(self.world_size)]
            self._connect(streams, on_end=self._note_hangup)
            self._start_workers(context, rendezvous=f"file://{self._folder}/meeting", started=self._started)
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs, as far as can be seen from here."""
        if self._ending:
            return []
        rows = [self._arrived[rank][0].process for rank in sorted(self._arrived)]
        return [msgspec.to_builtins(row) for row in rows if is_running(row)]

    # --- start ---------------------------------------------------------------------------------------------------

    def _command(self) -> ChildCommand:
        variables = dict(_QUIET)
        if not self._address:
            # Without these Ray would make a token for good in the user's home.
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        label = f"DP{self._dp_rank}"
        return ChildCommand(
            module="fourfold_executor_ray.driver",
            label=f"ray_driver {label}",
            arguments=["--label", label, "--log-level", log_level()],
            environment=variables,
        )

    def _plan(self, placement: str, group_name: str) -> Plan:
        return Plan(
            address=self._address,
            placement=placement,
            group_name=group_name,
            group_id="" if group_name else _current_group(),
            labels=tuple(self._label(rank) for rank in range(self.world_size)),
            tp=self._layout.tp,
            timeout=self._timeouts.startup_timeout,
            folder=str(self._folder),
            log_level=log_level(),
        )

    def _gather(self) -> None:
        """Wait for all ranks."""
        # The driver has the same deadline, and more to say when it passes.
        deadline = self._started + self._timeouts.startup_timeout + _GOODBYE
        while len(self._arrived) < self.world_size:
            try:
                news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = [rank for rank in range(self.world_size) if rank not in self._arrived]
                raise RpcTimeout("the arrival of ranks", self._timeouts.startup_timeout, missing) from None
            self._take(news)

    def _take(self, news: News | ChildExit | tuple[Arrival, socket.socket]) -> None:
        match news:
            case Joined():
                self._order(Invitation(door=str(self._folder / "door")))
            case Waiting(text=text):
                logger.info("%s", text)
            case Placed(nodes=nodes):
                self._nodes = nodes
                logger.info("%s", ", ".join(f"{self._label(rank)} on {node}" for rank, node in enumerate(nodes)))
            case Refused(config=config, message=message):
                raise ConfigError(message) if config else EngineError(message)
            case Lost(rank=rank, cause=cause):
                raise ExecutorFailed(f"{self._name(rank)} has not come: {cause}", rank=rank)
            case ChildExit():
                raise EngineError(f"the process that speaks to Ray {news}")
            case (arrival, stream):
                self._arrived[arrival.rank] = (arrival, stream)

    def _order(self, order: Order) -> bool:
        """Tell the driver; whether it is there to hear it."""
        return self._driver is not None and self._driver.send(msgspec.msgpack.encode(order))

    # --- on the supervisor's thread, which must not wait ---------------------------------------------------------

    def _hear(self, driver: ChildProcess, message: bytes) -> None:
        news: News = msgspec.msgpack.decode(message, type=News)
        if isinstance(news, Lost):
            self._causes[news.rank] = news.cause
        if self._channels is None:
            self._news.put(news)
        elif isinstance(news, Lost):
            self._channels.post(partial(self._lose, news.rank, "has ended", why=news.cause))
        elif isinstance(news, Refused):
            self._channels.post(partial(self._lose_driver, news.message))

    def _note_exit(self, how: ChildExit) -> None:
        if self._channels is None:
            self._news.put(how)
        else:
            self._channels.post(partial(self._lose_driver, f"the process that speaks to Ray {how}"))

    # --- on the thread of the channels ---------------------------------------------------------------------------

    def _note_hangup(self, rank: int) -> None:
        """A rank's stream has ended, of which Ray may know the cause in a moment."""
        channels = self._open_channels

        def lose() -> None:
            channels.post(partial(self._lose, rank, "has ended", why=self._causes.get(rank, "")))

        timer = threading.Timer(_CAUSE_SECONDS, lose)
        timer.daemon = True
        timer.start()

    def _lose_driver(self, message: str) -> None:
        failure = ExecutorFailed(message)
        self._fail(failure, first=partial(self._end_with, failure))

    # --- the end -------------------------------------------------------------------------------------------------

    def _kill_ranks(self) -> None:
        if not self._order(End(grace=0.0)):
            self._open_channels.close()  # ranks end when the executor hangs up

    def _end_ranks(self, grace: float) -> None:
        self._ending = True
        if self._door is not None:
            self._door.close()
        if self._channels is not None:
            self._channels.close()
        while not self._news.empty():  # whoever came too late
            self._take_late(self._news.get())
        self._order(End(grace=grace))
        self._supervisor.close(grace=grace + _GOODBYE, terminate=0)
        if self._driver is not None and not self._address:
            kill_session(self._driver.pid)
        for arrival, stream in self._arrived.values():
            stream.close()
            end_process(arrival.process, grace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take_late(self, news: News | ChildExit | tuple[Arrival, socket.socket]) -> None:
        if isinstance(news, tuple):
            self._arrived[news[0].rank] = news

    # --- names ---------------------------------------------------------------------------------------------------

    def _name(self, rank: int) -> str:
        node = f" on node {self._nodes[rank]}" if self._nodes else ""
        return f"rank {rank}{node}"

    def _describe(self, rank: int) -> str:
        pid = f", pid {self._arrived[rank][0].process.pid}" if rank in self._arrived else ""
        return f"{self._name(rank)} ({self._label(rank)}{pid})"


def _current_group() -> str:
    """The id of the placement group that this program itself runs in; empty if there is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    group = ray.util.get_current_placement_group()
    return "" if group is None else str(group.id.hex())
