"""What ``StageTransportConformance`` runs on every rank: stages of ``tp`` ranks over a communicator by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.distributed.model_parallel import GroupLinks, ModelParallel, initialize_model_parallel
from fourfold.distributed.stage_link import Layout
from fourfold.distributed.stage_transport import StageTransport
from fourfold.errors import EngineError, RpcTimeout
from fourfold.layout import ParallelLayout
from fourfold.plugins import load_plugins
from fourfold.selection import AUTO, select
from fourfold.testing.communicator_cases import check, connected, data, place
from fourfold.testing.rank_process import Rank

WIDTH, MAX_TOKENS, DEPTH = 37, 300, 3
"""An odd width, so that parts of a message differ in size."""


@contextmanager
def stages(rank: Rank, name: str, device: str, tp: int, *, timeout: float = 30.0) -> Iterator[ModelParallel]:
    """This rank's groups over communicator ``name``; where it connects devices, another one connects the hosts."""
    layout = ParallelLayout(pp=rank.world_size // tp, tp=tp)
    links: dict[tuple[int, ...], GroupLinks] = {}
    with ExitStack() as stack:

        def connect(group: str, ranks: tuple[int, ...], place_in_group: int) -> GroupLinks:
            if ranks in links:
                return links[ranks]
            communicator = stack.enter_context(connected(rank, name, device, ranks=ranks, timeout=timeout))
            host = communicator
            if device != "cpu":
                host = stack.enter_context(connected(rank, host_communicator(), "cpu", ranks=ranks, timeout=timeout))
            links[ranks] = GroupLinks(name=name, communicator=communicator, host=host)
            return links[ranks]

        yield initialize_model_parallel(layout, rank.rank, connect)


def host_communicator() -> str:
    """The name of the one that suits the CPU best."""
    entries = {name: one for name, one in load_plugins().communicators().items() if "cpu" in one.capabilities}
    return select("communicator", entries, AUTO, EngineConfig()).entry.name


def transport(
    parallel: ModelParallel, where: torch.device, dtype: torch.dtype = torch.float32, layout: Layout = Layout.REPLICATED
) -> StageTransport:
    """The transport of this rank."""
    return StageTransport(
        parallel, where, hidden_size=WIDTH, dtype=dtype, max_tokens=MAX_TOKENS, depth=DEPTH, layout=layout
    )


def runs_a_pipeline(rank: Rank, name: str, device: str, tp: int, steps: int) -> None:
    """Steps of changing sizes through all stages, each of which adds one; ids come back while others are in the air.

    The tensors that were sent are overwritten at once, and ranks are late at random.
    """
    pause, sizes = threading.Event(), (1, MAX_TOKENS, 2, 64, 5)
    where = place(rank, device)
    with stages(rank, name, device, tp) as parallel:
        group = parallel.pp
        for dtype in (torch.float32, torch.bfloat16):
            ends = transport(parallel, where, dtype)
            for step in range(steps):
                rows = sizes[step % len(sizes)]
                made = [data(part, (rows, WIDTH), torch.float32, "cpu", step).to(where, dtype) for part in range(2)]
                if group.is_first and step >= DEPTH:
                    check(ends.receive_ids(step - DEPTH, step - DEPTH), ids(step - DEPTH, where))
                given = made
                if not group.is_first:
                    given = list(ends.receive_activations(step, rows))
                    assert given[0].data_ptr() == ends.activations(MAX_TOKENS)[0].data_ptr()
                for found, original in zip(given, made):
                    expected = original
                    for _ in range(group.rank):
                        expected = expected + 1
                    check(found, expected)
                if step % 7 == 3 + rank.rank % 2:
                    pause.wait(0.005)
                if group.is_last:
                    ends.send_ids(step, ids(step, where))
                else:
                    outgoing = [one + 1 for one in given]
                    ends.send_activations(step, *outgoing)
                    for one in (*outgoing, *given):
                        one.fill_(-7.0)
            for step in range(steps - DEPTH, steps) if group.is_first else ():
                check(ends.receive_ids(step, step), ids(step, where))
            assert ends.waited_seconds > 0
            ends.close()
            ends.close()


def ids(step: int, where: torch.device) -> torch.Tensor:
    """As many as the step's number, which no other step has."""
    return torch.arange(step, device=where) * 1000 + step


def outruns_its_reader(rank: Rank, name: str, device: str) -> None:
    """One stage sends many more messages than fit, and overwrites each; the next one takes its time."""
    pause, where = threading.Event(), place(rank, device)
    with stages(rank, name, device, 1) as parallel:
        ends = transport(parallel, where)
        for step in range(5 * DEPTH):
            original = data(0, (50, WIDTH), torch.float32, "cpu", step).to(where)
            if rank.rank == 0:
                sent = original.clone()
                ends.send_activations(step, sent, original)
                sent.fill_(-7.0)
            else:
                pause.wait(0.003)
                for found in ends.receive_activations(step, 50):
                    check(found, original)
        if rank.rank == 1:
            rank.store.set("arrived", "")
        rank.store.wait(["arrived"])
        ends.close()


def keeps_shards(rank: Rank, name: str, device: str, tp: int) -> None:
    """What differs between the TP ranks arrives as it was sent."""
    where = place(rank, device)
    with stages(rank, name, device, tp) as parallel:
        ends = transport(parallel, where, layout=Layout.SHARDED)
        mine = data(parallel.tp.rank, (9, WIDTH), torch.float32, "cpu").to(where)
        if parallel.pp.is_first:
            ends.send_activations(0, mine, mine + 1)
        if parallel.pp.is_last:
            hidden, residual = ends.receive_activations(0, 9)
            check(hidden, mine)
            check(residual, mine + 1)
            rank.store.set(f"arrived {parallel.tp.rank}", "")
        rank.store.wait([f"arrived {parallel.tp.rank}"])
        ends.close()


def tells_what_differs(rank: Rank, name: str, device: str, what: str) -> str:
    """The second stage's words about a message that is another one than it expects, in one respect."""
    where, sends = place(rank, device), rank.rank == 0
    layout = Layout.SHARDED if what == "layout" and sends else Layout.REPLICATED
    dtype = torch.float16 if what == "dtype" and sends else torch.bfloat16
    with stages(rank, name, device, 1) as parallel:
        ends = transport(parallel, where, dtype, layout)
        if sends:
            rows, step = (4 if what == "rows" else 3), (8 if what == "step" else 7)
            tensor = torch.zeros(rows, WIDTH, dtype=dtype, device=where)
            for _ in range(2 if what == "gap" else 1):
                ends.send_activations(step, tensor, tensor)
            rank.store.wait(["told"])
            return ""
        found = "nothing"
        try:
            if what == "gap":  # as if the first message had never come
                assert ends._input is not None
                (ends._input._headers or ends._input._pipe).receive([torch.empty(10_000, dtype=torch.uint8)])
            ends.receive_activations(7, 3)
        except EngineError as error:
            found = str(error)
        rank.store.set("told", "")
        return found


def waits_in_vain(rank: Rank, name: str, device: str) -> Any:
    """On the second stage, to which nothing is sent: (ranks it names, seconds)."""
    with stages(rank, name, device, 1, timeout=2.0) as parallel:
        ends = transport(parallel, place(rank, device))
        if rank.rank == 0:
            rank.store.wait(["over"])
            return None
        started = time.monotonic()
        try:
            ends.receive_activations(0, 3)
        except RpcTimeout as error:
            return list(error.missing_ranks), time.monotonic() - started
        finally:
            rank.store.set("over", "")
        return [], 0.0


def refuses(rank: Rank, name: str, device: str) -> list[str]:
    """Its words about what each end cannot do."""
    where, found = place(rank, device), []
    with stages(rank, name, device, 1) as parallel:
        ends = transport(parallel, where)
        parallel.pp.barrier()  # or one rank is done and gone before the other has opened its end
        long, short = torch.zeros(MAX_TOKENS + 1, WIDTH, device=where), torch.zeros(2, WIDTH, device=where)
        calls: list[Callable[[], object]]
        if rank.rank == 0:
            calls = [
                lambda: ends.receive_activations(0, 1),
                lambda: ends.send_ids(0, torch.zeros(1, dtype=torch.int64, device=where)),
                lambda: ends.send_activations(0, short, long),
                lambda: ends.send_activations(0, long, long),
                lambda: ends.send_activations(0, short.to(torch.int8), short.to(torch.int8)),
            ]
        else:
            calls = [lambda: ends.send_activations(0, short, short), lambda: ends.receive_ids(0, 1)]
        for call in calls:
            try:
                call()
            except EngineError as error:
                found.append(str(error))
        ends.close()
    return found
