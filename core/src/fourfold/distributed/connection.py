"""Connects a rank to its groups: communicators by name or by suitability, tested before use, the same on all ranks.

A communicator that cannot be built, hangs, or returns wrong data on any rank is vetoed on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fourfold.distributed.checked_communicator import CheckedCommunicator, CollectiveLog
from fourfold.distributed.model_parallel import GroupLinks, GroupName, ModelParallel, initialize_model_parallel
from fourfold.distributed.self_test import self_test
from fourfold.distributed.store import exchange, fetch, host_identity, scoped
from fourfold.entries import CommunicatorContext, CommunicatorEntry
from fourfold.errors import ConfigError, EngineError, FourfoldError
from fourfold.layout import ParallelLayout
from fourfold.selection import AUTO, COMM_GROUPS, names_by_key, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.communicator import Communicator
    from fourfold.entries import WorkerContext
    from fourfold.plugins import PluginRegistry

log = logging.getLogger(__name__)

SELF_TEST_TIMEOUT: Final = 60.0
"""Seconds for building and testing one communicator; a compiler may run meanwhile."""
_LOOK_EVERY: Final = 0.25
CPU: Final = torch.device("cpu")


def connect(context: WorkerContext, registry: PluginRegistry, *, device: torch.device) -> ModelParallel:
    """The groups of this rank within its engine; all ranks must call this, and none is left waiting for ever.

    Raises ConfigError where a communicator that was named cannot be used, or none can; RpcTimeout naming ranks that did
    not come.
    """
    # Copies of the engine are independent: a rank's groups are those within its own.
    layout = ParallelLayout(pp=context.layout.pp, tp=context.layout.tp)
    if layout.world_size == 1:
        return initialize_model_parallel(layout, context.rank, _nobody)
    if context.open_store is None:
        raise ConfigError(f"{layout} has {layout.world_size} ranks, and this executor gives them no place to meet")
    connector = _Connector(context.config, registry, context.open_store(), device)
    return initialize_model_parallel(layout, context.rank, connector.links, log=connector.log)


class _Verdict(NamedTuple):
    communicator: Communicator | None
    problem: str
    """Empty: it may be used."""
    knows_why: bool = True
    """Whether the problem was seen here, and is not just a wait in vain for other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """One group while it is connected."""

    name: GroupName
    ranks: tuple[int, ...]
    rank: int
    store: Any
    device: torch.device
    one_host: bool


class _Connector:
    def __init__(self, config: EngineConfig, registry: PluginRegistry, store: Any, device: torch.device) -> None:
        self._config = config
        self._entries = registry.communicators()
        self._names = names_by_key("--comm", config.backends.comm, COMM_GROUPS)
        self._store = store
        self._device = device
        self._startup = config.timeouts.startup_timeout
        self._links: dict[tuple[tuple[int, ...], str], GroupLinks] = {}
        self.log = CollectiveLog() if config.parallel.debug_collectives else None

    def links(self, name: GroupName, ranks: tuple[int, ...], rank: int) -> GroupLinks:
        """What connects one group: its communicator, and one for metadata on the CPU.

        Groups of the same ranks share it, unless they ask for different ones.
        """
        wanted = self._names[name]
        for (known, asked), links in self._links.items():
            if known == ranks and wanted in (asked, AUTO):
                return links
        links = self._links[ranks, wanted] = self._connect(name, ranks, rank)
        return links

    def _connect(self, name: GroupName, ranks: tuple[int, ...], rank: int) -> GroupLinks:
        store = scoped(self._store, f"{name} {ranks[0]}")
        what = f"meeting in group {name}"
        hosts = exchange(
            store, "hosts", host_identity().encode(), rank=rank, ranks=ranks, timeout=self._startup, what=what
        )
        group = _Group(
            name=name, ranks=ranks, rank=rank, store=store, device=self._device, one_host=len(set(hosts)) == 1
        )
        chosen, communicator = self._choose(group, self._names[name])
        if self._device.type == "cpu":
            return GroupLinks(name=chosen, communicator=communicator, host=communicator)
        on_host = replace(group, device=CPU, store=scoped(store, "host"))
        return GroupLinks(name=chosen, communicator=communicator, host=self._choose(on_host, AUTO)[1])

    def _choose(self, group: _Group, wanted: str) -> tuple[str, Communicator]:
        """The first communicator that works on all ranks; the group's first rank proposes."""
        remaining: Mapping[str, CommunicatorEntry] = self._entries
        vetoes: list[str] = []
        while True:
            name = self._proposal(group, remaining, wanted, vetoes)
            verdict = self._try(group, name, len(vetoes))
            veto = self._common_verdict(group, name, verdict, len(vetoes))
            if not veto and verdict.communicator is not None:
                log.info("group %s of rank(s) %s: communicator %r", group.name, list(group.ranks), name)
                return name, self._checked(group, verdict.communicator)
            if verdict.communicator is not None and not verdict.problem:
                verdict.communicator.close()
            if wanted != AUTO:
                raise ConfigError(f"communicator {name!r} cannot be used for group {group.name}: {veto}")
            log.warning("communicator %r cannot be used for group %s, taking the next one: %s", name, group.name, veto)
            vetoes.append(f"{name}: {veto}")
            remaining = {key: entry for key, entry in remaining.items() if key != name}

    def _proposal(
        self, group: _Group, remaining: Mapping[str, CommunicatorEntry], wanted: str, vetoes: list[str]
    ) -> str:
        key = f"proposal {len(vetoes)}"
        if group.rank == 0:
            try:
                answer = "+" + select("communicator", remaining, wanted, self._config).entry.name
            except FourfoldError as error:
                vetoed = f"; vetoed: {'; '.join(vetoes)}" if vetoes else ""
                answer = f"-{error}{vetoed}"
            group.store.set(key, answer)
        else:
            what = f"choosing a communicator for group {group.name}"
            answer = fetch(group.store, key, rank=group.ranks[0], timeout=self._startup, what=what).decode()
        if answer.startswith("-"):
            raise ConfigError(answer[1:])
        if answer[1:] not in self._entries:
            raise ConfigError(f"rank {group.ranks[0]} chose communicator {answer[1:]!r}, which is not installed here")
        return answer[1:]

    def _try(self, group: _Group, name: str, attempt: int) -> _Verdict:
        """Build and test ``name`` on a thread of its own, so that a hang is an answer too."""
        timeouts = self._config.timeouts
        context = CommunicatorContext(
            group=group.name,
            ranks=group.ranks,
            rank=group.rank,
            device=group.device,
            store=scoped(group.store, f"{name} {attempt}"),
            timeout=min(timeouts.stall_timeout, timeouts.rpc_timeout),
            one_host=group.one_host,
        )
        entry = self._entries[name]
        limit = min(SELF_TEST_TIMEOUT, self._startup)

        def build_and_test() -> _Verdict:
            communicator = entry.build(context)
            return _Verdict(communicator, self_test(communicator, group.device) or "")

        objection = f"objection {attempt}"
        verdict = within(limit, build_and_test, stop=lambda: bool(group.store.check([objection])))
        if verdict.problem:
            group.store.set(objection, "")
        return verdict

    def _common_verdict(self, group: _Group, name: str, verdict: _Verdict, attempt: int) -> str:
        """One rank's objection, the same for all: of one that knows why, if there is any."""
        known = "known" if verdict.knows_why else "guessed"
        answers = exchange(
            group.store,
            f"verdict {attempt}",
            f"{known} {verdict.problem}".encode() if verdict.problem else b"",
            rank=group.rank,
            ranks=group.ranks,
            timeout=self._startup,
            what=f"testing communicator {name!r} of group {group.name}",
        )
        objections = [(rank, *one.decode().split(" ", 1)) for rank, one in zip(group.ranks, answers) if one]
        objections.sort(key=lambda one: one[1] != "known")
        return next((f"rank {rank}: {problem}" for rank, _, problem in objections), "")

    def _checked(self, group: _Group, communicator: Communicator) -> Communicator:
        if self.log is None:
            return communicator
        return CheckedCommunicator(communicator, group=group.name, ranks=group.ranks, log=self.log)


def within(seconds: float, build: Callable[[], _Verdict], stop: Callable[[], bool]) -> _Verdict:
    """What ``build`` returns; what it raises, or that it is not done within ``seconds``, as a problem.

    ``stop`` is asked now and then: whether another rank has found a problem, so that waiting is in vain.
    """
    answers: list[_Verdict] = []

    def run() -> None:
        try:
            answers.append(build())
        except Exception as error:  # whatever a plugin raises is its verdict
            kind = "" if isinstance(error, FourfoldError) else f"{type(error).__name__}: "
            answers.append(_Verdict(None, f"{kind}{error}" or type(error).__name__))

    thread = threading.Thread(target=run, name="communicator-test", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(min(_LOOK_EVERY, max(0.0, deadline - time.monotonic())))
        if thread.is_alive() and stop():
            return _Verdict(None, "it waits for a rank that has given up", knows_why=False)
    return answers[0] if answers else _Verdict(None, f"it did not finish its self-test within {seconds:g} s")


def _nobody(name: GroupName, ranks: tuple[int, ...], rank: int) -> GroupLinks:
    raise EngineError(f"group {name} has one rank and connects to nobody")
