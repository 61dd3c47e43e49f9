"""Ranks as actors of a Ray cluster: Ray places them and tells of their end, calls go to them directly."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from functools import partial
from typing import Any, Final

import msgspec

from fourfold.config.transport import encode_config
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError, EngineError, ExecutorFailed, RpcTimeout
from fourfold.manifest import fingerprint
from fourfold.nodes.secret import ClusterSecret, new_secret
from fourfold.plugins import load_plugins
from fourfold.rpc.frames import Frame
from fourfold.rpc.node_ranks import NodeRanks
from fourfold.rpc.rank_executor import RankExecutor, log_level
from fourfold.supervision.child_process import ChildCommand, ChildExit, ChildProcess, ChildSupervisor
from fourfold.supervision.run_directory import ProcessState, is_running
from fourfold.supervision.stopped_watch import StoppedWatch
from fourfold_executor_ray.door import Door, peer_pids
from fourfold_executor_ray.leftovers import end_process
from fourfold_executor_ray.messages import (
    End,
    Invitation,
    Joined,
    Lost,
    News,
    Opened,
    Order,
    Placed,
    Plan,
    Refused,
    Waiting,
)
from fourfold_executor_ray.rank_process import describe_process
from fourfold_executor_ray.session import kill_session
from fourfold_executor_ray.settings import connected_ray, given_cluster, settings_of

logger = logging.getLogger(__name__)

_GOODBYE: Final = 5.0
"""Seconds for the driver to give back what it holds of a cluster that goes on."""
_CAUSE_SECONDS: Final = 1.0
"""How long a rank that has hung up waits for Ray to say why."""
_QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}

_Streams = dict[int, socket.socket]


class RayExecutor(RankExecutor):
    """An actor per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Place all ranks and wait until each has built its worker.

        Raises ConfigError for a cluster that cannot be joined, EngineError for one that stays too small, WorkerError or
        ExecutorFailed for a rank that cannot start, PluginError and ConfigError for ranks that differ, RpcTimeout past
        --startup-timeout.
        """
        super().__init__(context)
        self._context = context
        self._started = context.started
        self._address, where = given_cluster(settings_of(context.config))
        if self._address:
            logger.info("the ranks run in the Ray cluster %s (%s)", self._address, where)
        name = f"fourfold-ray-{secrets.token_hex(8)}"
        self._folder = "" if self._address else os.path.join(tempfile.gettempdir(), name)
        """For what a cluster of its own writes; the driver makes it."""
        # Where ranks of this node meet: gone with this process, whatever ends it.
        self._meeting = os.memfd_create("fourfold-rendezvous", os.MFD_CLOEXEC)
        self._news: queue.SimpleQueue[News | ChildExit | _Streams] = queue.SimpleQueue()
        self._own_address = ""
        self._streams: _Streams = {}
        """To the ranks of this node."""
        self._placed: Placed | None = None
        self._causes: dict[int, str] = {}
        self._rows: list[ProcessState] = []
        self._door: Door | None = None
        self._others: NodeRanks | None = None
        self._driver: ChildProcess | None = None
        self._supervisor = ChildSupervisor(stall_timeout=self._timeouts.stall_timeout)
        self._watch: StoppedWatch | None = None
        try:
            self._driver = self._supervisor.start(
                self._command(), on_report=self._hear, on_exit=lambda child, how: self._note_exit(how)
            )
            self._order(self._plan())
            self._gather()
            self._meet()
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs, as far as can be seen from here."""
        return [] if self._down.is_set() else [msgspec.to_builtins(row) for row in self._rows if is_running(row)]

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

    def _plan(self) -> Plan:
        settings = settings_of(self._context.config)
        return Plan(
            address=self._address,
            placement=settings.placement,
            namespace=settings.namespace or _connected_namespace(),
            group_name=settings.placement_group,
            group_id="" if settings.placement_group else _current_group(),
            labels=tuple(self._label(rank) for rank in range(self.world_size)),
            tp=self._layout.tp,
            replica=self._dp_rank,
            replicas=self._layout.dp,
            timeout=self._timeouts.startup_timeout,
            started=self._started,
            folder=self._folder,
            log_level=log_level(),
        )

    def _gather(self) -> None:
        """Wait until all ranks can be called."""
        # The driver has the same deadline, and more to say when it passes.
        deadline = self._started + self._timeouts.startup_timeout + _GOODBYE
        opened: set[int] = set()
        while self._placed is None or self._missing(opened):
            try:
                news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if not self._own_address:
                    cluster = f"the Ray cluster {self._address}" if self._address else "Ray on this host"
                    raise EngineError(
                        f"{cluster} has not answered within {self._timeouts.startup_timeout:g} s (--startup-timeout)"
                    ) from None
                door = self._door
                missing = [rank for rank in self._missing(opened) if door is None or not door.has_let_in(rank)]
                raise RpcTimeout("the arrival of ranks", self._timeouts.startup_timeout, missing) from None
            match news:
                case dict():
                    self._streams = news
                case Opened(place=place):
                    opened.add(place)
                case Joined(address=address):
                    self._own_address = address
                case Placed():
                    self._invite(news)
                case Waiting(text=text):
                    logger.info("%s", text)
                case Lost(rank=rank, cause=cause):
                    self._check_refused()
                    raise ExecutorFailed(f"{self._name(rank)} has ended before it was connected: {cause}", rank=rank)
                case Refused(config=config, message=message):
                    raise ConfigError(message) if config else EngineError(message)
                case ChildExit():
                    raise EngineError(f"the process that speaks to Ray {news}")

    def _invite(self, placed: Placed) -> None:
        """Open what the ranks come in by."""
        self._placed = placed
        logger.info("%s", ", ".join(f"{self._label(rank)} on {node}" for rank, node in enumerate(placed.nodes)))
        places: defaultdict[int, list[int]] = defaultdict(list)
        for rank, place in enumerate(placed.places):
            places[place].append(rank)
        own = places.pop(0, [])
        if own:
            self._door = Door(own, self._news.put)
        door = self._door.name if self._door is not None else ""
        if not places:
            self._order(Invitation(door=door))
            return
        config, secret = self._context.config, new_secret()
        self._others = NodeRanks(
            self._own_address,
            0,
            secret=ClusterSecret(secret),
            places=places,
            fingerprint=fingerprint(config, load_plugins().manifest, rank=0),
            on_lost=self._note_lost_link,
            option="the address of this Ray node",
        )
        self._order(Invitation(door=door, url=self._others.url, secret=secret, config=encode_config(config)))

    def _meet(self) -> None:
        """Let the ranks build their workers."""
        others = self._others
        nodes = [] if others is None else others.ways(self._take_answer)
        self._connect(self._streams, nodes=nodes, on_end=self._note_hangup)
        limit = self._timeouts.stall_timeout
        self._watch = StoppedWatch(peer_pids(self._streams), limit=limit, on_killed=self._note_lost_link)
        # Ranks of one node need no port to meet.
        rendezvous = "" if others is not None else f"file:///proc/{os.getpid()}/fd/{self._meeting}"
        self._start_workers(self._context, rendezvous=rendezvous, started=self._started)
        found = self.collective_rpc(describe_process)
        self._rows = [
            msgspec.structs.replace(msgspec.convert(row, ProcessState), label=self._label(rank), node=self._node(rank))
            for rank, row in enumerate(found)
        ]

    def _missing(self, opened: set[int]) -> list[int]:
        if self._placed is None:
            return list(range(self.world_size))
        return [
            rank
            for rank, place in enumerate(self._placed.places)
            if (place not in opened if place else rank not in self._streams)
        ]

    def _order(self, order: Order) -> bool:
        """Tell the driver; whether it is there to hear it."""
        return self._driver is not None and self._driver.send(msgspec.msgpack.encode(order))

    def _check_refused(self) -> None:
        """Raise ConfigError if a node does not fit, of which the end of its ranks is a mere echo."""
        if self._others is not None:
            with contextlib.suppress(EngineError):  # it is just not there
                self._others.wait(0)

    def _take_answer(self, rank: int, frame: Frame) -> None:
        self._open_channels.take(rank, frame)

    # --- on other threads, which must not wait -------------------------------------------------------------------

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

    def _note_lost_link(self, rank: int, how: str) -> None:
        if self._channels is None:
            self._news.put(Lost(rank=rank, cause=how))
        else:
            self._channels.post(partial(self._lose, rank, how))

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
        if self._door is not None:
            self._door.close()
        if self._watch is not None:
            self._watch.close()
        if self._channels is not None:
            self._channels.close()
        if self._others is not None:
            self._others.close("the engine ends")
        while not self._news.empty():  # whoever came when it was too late
            news = self._news.get()
            self._streams |= news if isinstance(news, dict) else {}
        for stream in self._streams.values():
            stream.close()
        self._order(End(grace=grace))
        self._supervisor.close(grace=grace + _GOODBYE, terminate=0)
        if self._driver is not None and not self._address:
            kill_session(self._driver.pid)
        for row in self._rows:
            end_process(row, grace)
        os.close(self._meeting)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- names ---------------------------------------------------------------------------------------------------

    def _node(self, rank: int) -> str:
        return "" if self._placed is None else self._placed.nodes[rank]

    def _name(self, rank: int) -> str:
        node = self._node(rank)
        return f"rank {rank} on node {node}" if node else f"rank {rank}"

    def _describe(self, rank: int) -> str:
        return f"{self._name(rank)} ({self._label(rank)})"


def _current_group() -> str:
    """The id of the placement group that this program itself runs in; empty if there is none."""
    ray = connected_ray()
    group = None if ray is None else ray.util.get_current_placement_group()
    return "" if group is None else str(group.id.hex())


def _connected_namespace() -> str:
    """The namespace of this program, if it is connected itself."""
    ray = connected_ray()
    return "" if ray is None else str(ray.get_runtime_context().namespace)
