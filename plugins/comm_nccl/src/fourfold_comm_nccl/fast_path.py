"""Whether our own sums are used in a group: agreed on by all ranks, tested first, and given up with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from fourfold.distributed.self_test import pattern
from fourfold.distributed.store import exchange
from fourfold.errors import EngineError, Unsupported
from fourfold_comm_nccl.peer_memory import MappedMemory
from fourfold_comm_nccl.region import WORLD_SIZES, Region
from fourfold_comm_nccl.size_table import ALGORITHMS, Plan, SizeTable
from fourfold_comm_nccl.table_cache import TableCache

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext
    from fourfold_comm_nccl.custom_all_reduce import CustomAllReduce

log = logging.getLogger(__name__)

PREPARE_SECONDS: Final = 50.0
"""For each step: a rank may be late because it compiles the kernels."""
TEST_PROGRAMS: Final = 32
TEST_BYTES: Final = (16, 1_040, 65_552, 262_144, 3_000_016)
"""A vector, an odd number of vectors, and more than the programs take at a time."""


class FastPath:
    """Our sums, and the sizes at which they are the faster ones."""

    def __init__(self, memory: MappedMemory, custom: CustomAllReduce, table: SizeTable) -> None:
        self.custom, self.table = custom, table
        self._memory = memory

    def plan(self, tensor: torch.Tensor) -> Plan | None:
        """How to sum ``tensor``; None: the library does it. Depends on its dtype and size alone."""
        nbytes = tensor.numel() * tensor.itemsize
        plan = self.table.plan(nbytes)
        return plan if self.custom.takes(tensor.dtype, nbytes) else None

    def close(self) -> None:
        """Unmap; idempotent."""
        self._memory.close()


def open_fast_path(context: CommunicatorContext, library: Callable[[torch.Tensor], object]) -> FastPath | None:
    """All ranks of a group must call this; all get one, or none does, and the log of its first rank has the reason.

    ``library`` sums in place.
    """
    attempt = _Attempt(context)
    if not attempt.agree("suitable", _unsuitable(context)):
        return None
    region = Region(world_size=len(context.ranks))
    memory, problem = _map(context, region)
    if not attempt.agree("memory", problem) or memory is None:
        return None
    from fourfold_comm_nccl.custom_all_reduce import CustomAllReduce

    custom = CustomAllReduce(
        memory.addresses(), region, rank=context.rank, device=context.device, timeout=PREPARE_SECONDS
    )
    if not attempt.agree("test", try_sums(custom, context.device)):
        memory.close()
        return None
    table = _common_table(attempt, custom, library)
    custom.wait_at_most(context.timeout)
    return FastPath(memory, custom, table)


def try_sums(custom: CustomAllReduce, device: torch.device) -> str:
    """What our sums got wrong first, in words; empty: nothing. All ranks must call this at once.

    Every kernel sums numbers that are exact in bfloat16, so equality is bitwise.
    """
    rank, world = custom.rank, custom.world_size
    problem = ""
    for algorithm in ALGORITHMS:
        plan = Plan(algorithm, TEST_PROGRAMS)
        for nbytes in TEST_BYTES:
            parts = [pattern(one, nbytes // 2, torch.bfloat16, world, device) for one in range(world)]
            total = torch.stack(parts).sum(0).to(torch.bfloat16)
            custom.all_reduce(plan, parts[rank], parts[rank])
            if not torch.equal(parts[rank], total) and not problem:
                problem = f"a {algorithm} sum of {nbytes} bytes gave wrong data on rank {rank} of the group"
            if custom.failed:
                return f"a {algorithm} sum of {nbytes} bytes waited in vain for rank(s) {custom.missing} of the group"
    return problem


class _Attempt:
    """What ranks tell each other on the way."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context

    def exchange(self, step: str, value: str) -> list[str]:
        context = self.context
        answers = exchange(
            context.store,
            f"custom all-reduce {step}",
            value.encode(),
            rank=context.rank,
            ranks=context.ranks,
            timeout=max(context.timeout, PREPARE_SECONDS),
            what=f"preparing the custom all-reduce of group {context.group}",
        )
        return [answer.decode() for answer in answers]

    def agree(self, step: str, problem: str) -> bool:
        """Whether no rank has a problem; the first one's is logged once."""
        answers = self.exchange(step, problem)
        objections = [f"rank {rank}: {answer}" for rank, answer in zip(self.context.ranks, answers) if answer]
        if objections and self.context.rank == 0:
            log.warning("group %s: no custom all-reduce, NCCL sums alone: %s", self.context.group, objections[0])
        return not objections


def _unsuitable(context: CommunicatorContext) -> str:
    if not context.one_host:
        return "the ranks are on several hosts"
    if len(context.ranks) not in WORLD_SIZES:
        return f"it sums over {', '.join(map(str, WORLD_SIZES))} ranks, not {len(context.ranks)}"
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return ""


def _map(context: CommunicatorContext, region: Region) -> tuple[MappedMemory | None, str]:
    try:
        return MappedMemory(context, region.nbytes, "peer memory 0"), ""
    except (Unsupported, EngineError) as error:
        return None, str(error)


def _common_table(attempt: _Attempt, custom: CustomAllReduce, library: Callable[[torch.Tensor], object]) -> SizeTable:
    """The first rank's, kept from an earlier start or measured now."""
    from fourfold_comm_nccl.autotune import tune

    context = attempt.context
    device = torch.cuda.get_device_name(context.device)
    cache = TableCache(device, custom.world_size, torch.__version__, torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    kept = cache.read() if context.rank == 0 else None
    answer = attempt.exchange("kept table", "" if kept is None else kept.encode())[0]
    if answer:
        return SizeTable.decode(answer)
    mine = tune(custom, library, context.device)
    table = SizeTable.decode(attempt.exchange("table", mine.encode())[0])
    if context.rank == 0:
        cache.write(table)
        log.info("group %s: all-reduce %s", context.group, table)
    return table
