"""Connects a rank to its groups: communicators by name or by suitability, tested before use, the same on all ranks.

A communicator that cannot be built, hangs, or returns wrong data on any rank is vetoed on all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fourfold.distributed.checked_communicator import CheckedCommunicator, CollectiveLog
from fourfold.distributed.model_parallel import (
    GroupLinks,
    GroupName,
    ModelParallel,
    connect_experts,
    initialize_model_parallel,
)
from fourfold.distributed.self_test import self_test
from fourfold.distributed.store import exchange, fetch, host_identity, open_store, scoped
from fourfold.entries import CommunicatorContext, CommunicatorEntry
from fourfold.errors import ConfigError, EngineError, FourfoldError
from fourfold.layout import ParallelLayout
from fourfold.selection import AUTO, COMM_GROUPS, names_by_key, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fourfold.contracts.communicator import Communicator
    from fourfold.entries import WorkerContext
    from fourfold.plugins import PluginRegistry

log = logging.getLogger(__name__)

BUILD_TIMEOUT: Final = 60.0
"""Seconds for building one communicator; a compiler may run meanwhile."""
_LOOK_EVERY: Final = 0.25
CPU: Final = torch.device("cpu")
ONE_HOST: Final = "one_host"
"""The capability of communicators that connect ranks of one host alone; no other group is offered them."""
SEVERAL_HOSTS: Final = "several_hosts"
"""The capability of those for groups on several hosts with several ranks on one, which alone are offered them."""


def connect(context: WorkerContext, registry: PluginRegistry, *, device: torch.device) -> ModelParallel:
    """The groups of this rank; all ranks must call this, and none is left waiting for ever. Engines that share experts
    have those of a stage in one group, and all others within themselves.

    Raises ConfigError where a communicator that was named cannot be used, or none can; RpcTimeout naming ranks that did
    not come.
    """
    parallel = _connect_engine(context, registry, device)
    if not context.config.parallel.lockstep:
        return parallel
    store = _open_meeting(context)
    connector = _Connector(context, registry, store, device)
    rank = context.dp_rank * context.layout.engine_world_size + context.rank
    return replace(parallel, ep=connect_experts(context.layout, rank, connector.links))


def _connect_engine(context: WorkerContext, registry: PluginRegistry, device: torch.device) -> ModelParallel:
    layout = ParallelLayout(pp=context.layout.pp, tp=context.layout.tp)
    if layout.world_size == 1:
        return initialize_model_parallel(layout, context.rank, _nobody)
    if context.open_store is None:
        raise ConfigError(f"{layout} has {layout.world_size} ranks, and this executor gives them no place to meet")
    connector = _Connector(context, registry, context.open_store(), device)
    return initialize_model_parallel(layout, context.rank, connector.links, log=connector.log)


def _open_meeting(context: WorkerContext) -> Any:
    parallel, timeouts = context.config.parallel, context.config.timeouts
    if not parallel.lockstep_meeting:
        raise ConfigError(
            "replicas that share experts have no place to meet; give --lockstep-meeting, or use fourfold serve"
        )
    return open_store(parallel.lockstep_meeting, world_size=context.layout.world_size, timeout=timeouts.startup_timeout)


class Verdict(NamedTuple):
    """What one rank says of a communicator after a phase."""

    problem: str
    """Empty: all right."""
    knows_why: bool = True
    """Whether the problem was seen here, and is not just a wait in vain for other ranks."""
    hangs: bool = False
    """Whether its thread still runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """One group while it is connected."""

    name: GroupName
    ranks: tuple[int, ...]
    rank: int
    store: Any
    device: torch.device
    hosts: tuple[int, ...]
    """A number for each rank, the same for ranks of one host."""

    @property
    def one_host(self) -> bool:
        return len(set(self.hosts)) == 1


class _Connector:
    def __init__(self, context: WorkerContext, registry: PluginRegistry, store: Any, device: torch.device) -> None:
        config = self._config = context.config
        self._host = f"{context.node} {host_identity()}".encode()
        self._address = context.address
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
        hosts = exchange(store, "hosts", self._host, rank=rank, ranks=ranks, timeout=self._startup, what=what)
        numbers = tuple(hosts.index(host) for host in hosts)
        group = _Group(name=name, ranks=ranks, rank=rank, store=store, device=self._device, hosts=numbers)
        chosen, communicator = self._choose(group, self._names[name])
        if self._device.type == "cpu":
            return GroupLinks(name=chosen, communicator=communicator, host=communicator, hosts=numbers)
        on_host = replace(group, device=CPU, store=scoped(store, "host"))
        host = self._choose(on_host, AUTO)[1]
        return GroupLinks(name=chosen, communicator=communicator, host=host, hosts=numbers)

    def _choose(self, group: _Group, wanted: str) -> tuple[str, Communicator]:
        """The first communicator that works on all ranks; the group's first rank proposes."""
        remaining: Mapping[str, CommunicatorEntry] = self._entries
        if wanted == AUTO:
            remaining = {key: entry for key, entry in remaining.items() if spans(entry.capabilities, group.hosts)}
        vetoes: list[str] = []
        while True:
            name = self._proposal(group, remaining, wanted, vetoes)
            communicator, veto = self._try(group, name, len(vetoes))
            if communicator is not None:
                log.info("group %s of rank(s) %s: communicator %r", group.name, list(group.ranks), name)
                return name, self._checked(group, communicator)
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

    def _try(self, group: _Group, name: str, attempt: int) -> tuple[Communicator | None, str]:
        """``name``, built and tested on every rank, or the veto on it, which is the same for all."""
        timeouts = self._config.timeouts
        context = CommunicatorContext(
            group=group.name,
            ranks=group.ranks,
            rank=group.rank,
            device=group.device,
            store=scoped(group.store, f"{name} {attempt}"),
            timeout=min(timeouts.stall_timeout, timeouts.rpc_timeout),
            one_host=group.one_host,
            hosts=group.hosts,
            address=self._address,
        )
        entry = self._entries[name]
        built: list[Communicator] = []

        def build() -> str:
            built.append(entry.build(context))
            return ""

        limit = min(BUILD_TIMEOUT, self._startup)
        verdict = self._within(group, f"building {name!r}", limit, f"it was not built within {limit:g} s", build)
        veto = self._common_verdict(group, f"building {name!r}", verdict)
        if not veto:
            # Only now, so that a rank whose compiler runs long is not taken for one that hangs.
            limit = timeouts.self_test_timeout
            late = f"it did not finish its self-test within {limit:g} s (--self-test-timeout)"
            verdict = self._within(
                group, f"testing {name!r}", limit, late, lambda: self_test(built[0], group.device) or ""
            )
            veto = self._common_verdict(group, f"testing {name!r}", verdict)
        if veto and built and not verdict.hangs:
            built.pop().close()
        return (None, veto) if veto else (built[0], "")

    def _within(self, group: _Group, phase: str, seconds: float, late: str, work: Callable[[], str]) -> Verdict:
        objection = f"objection to {phase}"

        def on_device() -> str:
            # A thread begins on the first device, where kernels must not be launched for another one.
            torch.get_device_module(group.device).set_device(group.device)
            return work()

        verdict = within(seconds, on_device, late=late, stop=lambda: bool(group.store.check([objection])))
        if verdict.problem:
            group.store.set(objection, "")
        return verdict

    def _common_verdict(self, group: _Group, phase: str, verdict: Verdict) -> str:
        """One rank's objection, the same for all: of one that knows why, if there is any."""
        known = "known" if verdict.knows_why else "guessed"
        answers = exchange(
            group.store,
            f"verdict on {phase}",
            f"{known} {verdict.problem}".encode() if verdict.problem else b"",
            rank=group.rank,
            ranks=group.ranks,
            timeout=self._startup,
            what=f"{phase} for group {group.name}",
        )
        objections = [(rank, *one.decode().split(" ", 1)) for rank, one in zip(group.ranks, answers) if one]
        objections.sort(key=lambda one: one[1] != "known")
        return next((f"rank {rank}: {problem}" for rank, _, problem in objections), "")

    def _checked(self, group: _Group, communicator: Communicator) -> Communicator:
        if self.log is None:
            return communicator
        return CheckedCommunicator(communicator, group=group.name, ranks=group.ranks, log=self.log)


def within(seconds: float, work: Callable[[], str], *, late: str, stop: Callable[[], bool]) -> Verdict:
    """The problem that ``work`` returns; what it raises, or ``late`` after ``seconds``, is one too.

    It runs on a thread of its own, so that a hang is an answer. ``stop`` is asked now and then: whether another rank
    has found a problem, so that waiting is in vain.
    """
    problems: list[str] = []

    def run() -> None:
        try:
            problems.append(work())
        except Exception as error:  # whatever a plugin raises is its verdict
            kind = "" if isinstance(error, FourfoldError) else f"{type(error).__name__}: "
            problems.append(f"{kind}{error}" or type(error).__name__)

    thread = threading.Thread(target=run, name="communicator-test", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(min(_LOOK_EVERY, max(0.0, deadline - time.monotonic())))
        if thread.is_alive() and stop():
            return Verdict("it waits for a rank that has given up", knows_why=False, hangs=True)
    return Verdict(problems[0]) if problems else Verdict(late, hangs=True)


def spans(capabilities: Set[str], hosts: Sequence[int]) -> bool:
    """Whether a communicator of such capabilities connects ranks on such ``hosts``, a number for each rank."""
    one_host = len(set(hosts)) == 1
    layered = 1 < len(set(hosts)) < len(hosts)
    return (one_host or ONE_HOST not in capabilities) and (layered or SEVERAL_HOSTS not in capabilities)


def _nobody(name: GroupName, ranks: tuple[int, ...], rank: int) -> GroupLinks:
    raise EngineError(f"group {name} has one rank and connects to nobody")
