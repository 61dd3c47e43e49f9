"""The process that speaks to Ray for an executor: ``python -m fourfold_executor_ray.driver``, its child.

It places the ranks' actors and tells of their end. Calls never pass through it. It leads a session of its own, so that
a terminal's signals are the executor's to answer, and a cluster that it starts can be ended as a whole.
"""

from __future__ import annotations

from fourfold.supervision.parent_watch import ParentLink, connect_to_parent

# isort: split
import argparse
import contextlib
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from fourfold.errors import ConfigError, EngineError, FourfoldError
from fourfold.supervision.process_title import name_process
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
from fourfold_executor_ray.session import start_watchman

logger = logging.getLogger(__name__)

_ORDER_TIMEOUT: Final = 30.0
_LOOK_EVERY: Final = 1.0
"""Seconds between looks at nodes that are yet to connect."""
_PATIENCE: Final = 2.5
"""Seconds at the end for ranks to let their workers go."""


class Ended(NamedTuple):
    """The actor of a rank has ended."""

    rank: int
    how: Future[str]


def main() -> None:
    """Serve one executor until it asks to stop."""
    link = connect_to_parent()
    os.setsid()
    parser = argparse.ArgumentParser(prog="python -m fourfold_executor_ray.driver")
    parser.add_argument("--label", required=True)
    parser.add_argument("--log-level", required=True)
    arguments = parser.parse_args()
    name_process("ray_driver", arguments.label, log_level=arguments.log_level)
    driver = Driver(link)
    try:
        driver.run()
    except FourfoldError as error:
        driver.report(Refused(config=isinstance(error, ConfigError), message=str(error)))
    except Exception as error:
        logger.exception("Ray cannot be spoken to any more")
        driver.report(Refused(config=False, message=f"{type(error).__name__}: {error}"))
    logging.shutdown()
    # A cluster of our own ends with this session, which the executor ends; there is nothing to wait for.
    os._exit(0)


class Driver:
    """One engine's ranks in Ray."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._events: queue.SimpleQueue[Order | Ended | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._watchman: subprocess.Popen[bytes] | None = None
        orders = msgspec.msgpack.Decoder(Order)
        link.on_message(lambda message: self._events.put(orders.decode(message)))
        link.on_stop(self._stop)

    def run(self) -> None:
        """Join or start a cluster, place the ranks, watch them, end them."""
        plan = self._next(Plan)
        if not plan.address:
            self._watchman = start_watchman(plan.folder)
            os.mkdir(plan.folder, 0o700)  # only now, so that it is removed whoever ends first
        # Only now, and only here, since it takes most of a second and changes how a process answers signals.
        from fourfold_executor_ray import cluster
        from fourfold_executor_ray.actors import Actors
        from fourfold_executor_ray.group import BundleGroup

        cluster.join_cluster(plan)
        own = cluster.own_node()
        self.report(Joined(address=own.address))
        group = BundleGroup(plan)
        try:
            slots = group.wait(stopped=self._stopped, notice=lambda text: self.report(Waiting(text=text)))
            actors = Actors(plan, slots, group, own_node=own.id)
            self.report(Placed(nodes=actors.nodes, places=actors.places))
            started = actors.start(self._next(Invitation))
            for place, opening in started.gates.items():
                opening.add_done_callback(partial(self._note_opening, place))
            for rank, end in enumerate(started.ends):
                end.add_done_callback(partial(self._note_end, rank))
            self._watch(actors, started.gates.values())
        finally:
            group.remove()
            if plan.address:
                cluster.leave_cluster()

    def report(self, news: News) -> None:
        """Tell the executor, unless it has gone."""
        with contextlib.suppress(OSError):
            self._link.report(msgspec.msgpack.encode(news))

    def _stop(self) -> None:
        self._stopped.set()
        self._events.put(None)

    def _note_opening(self, place: int, how: Future[str]) -> None:
        if how.exception() is None:  # else its ranks cannot come in, and end
            self.report(Opened(place=place))

    def _note_end(self, rank: int, how: Future[str]) -> None:
        self._events.put(Ended(rank, how))

    def _next(self, kind: type[Any]) -> Any:
        try:
            event = self._events.get(timeout=_ORDER_TIMEOUT)
        except queue.Empty:
            raise EngineError(f"the executor sent no {kind.__name__} within {_ORDER_TIMEOUT:g} s") from None
        if not isinstance(event, kind):
            raise EngineError("the start was given up")
        return event

    def _watch(self, actors: Any, gates: Collection[Future[str]]) -> None:
        """Tell of ends until the executor wants them all; of nodes until they are connected, which then tell more."""
        ended: set[int] = set()
        until: float | None = None
        while len(ended) < actors.count or until is None:
            look = until is None and not all(gate.done() for gate in gates)
            wait = _LOOK_EVERY if look else None if until is None else max(0.0, until - time.monotonic())
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:
                if not look:
                    break
                for rank in set(actors.stranded()) - ended:
                    ended.add(rank)
                    self.report(Lost(rank=rank, cause="its node has died"))
                continue
            if event is None:
                until = until or time.monotonic() + _PATIENCE
            elif isinstance(event, End):
                if event.grace == 0:
                    actors.kill()
                else:
                    until = time.monotonic() + event.grace
            elif isinstance(event, Ended):
                ended.add(event.rank)
                cause = actors.cause(event.how)
                if until is None and cause:
                    self.report(Lost(rank=event.rank, cause=cause))
        actors.kill()


if __name__ == "__main__":
    main()
