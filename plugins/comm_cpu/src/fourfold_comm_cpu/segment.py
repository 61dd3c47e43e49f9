"""Memory that all ranks of a group map: made by the first, opened by the others through its process, without a name.

Nothing is left behind however a rank ends: the memory goes with the last mapping.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Final

from fourfold.distributed.store import exchange, fetch, host_identity
from fourfold.errors import Unsupported

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext

HEADER_BYTES: Final = 4096
"""Before the memory proper: a random mark, by which a rank knows that it mapped the right memory."""
_MARK_BYTES: Final = 16


def map_shared(context: CommunicatorContext, name: str, nbytes: int) -> mmap.mmap:
    """``nbytes`` of zeroed memory after HEADER_BYTES, the same on every rank; all must call this.

    ``name`` serves once. Raises Unsupported where a rank is on another host, or may not open what the first one made;
    RpcTimeout where a rank does not come.
    """
    size = HEADER_BYTES + nbytes
    descriptor = -1
    try:
        if context.rank == 0:
            descriptor, memory = _create(context, name, size)
            problem = ""
        else:
            memory, problem = _open(context, name, size)
        what = f"mapping shared memory of group {context.group}"
        problems = exchange(
            context.store,
            f"{name}/mapped",
            problem.encode(),
            rank=context.rank,
            ranks=context.ranks,
            timeout=context.timeout,
            what=what,
        )
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    for rank, one in zip(context.ranks, problems):
        if one:
            raise Unsupported(f"rank {rank} cannot map the memory of rank {context.ranks[0]}: {one.decode()}")
    return memory


def _create(context: CommunicatorContext, name: str, size: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create(f"fourfold-{context.group}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    mark = secrets.token_bytes(_MARK_BYTES)
    memory[:_MARK_BYTES] = mark
    where = {"host": host_identity(), "pid": os.getpid(), "descriptor": descriptor, "mark": mark.hex()}
    context.store.set(name, json.dumps(where))
    return descriptor, memory


def _open(context: CommunicatorContext, name: str, size: int) -> tuple[mmap.mmap, str]:
    what = f"sharing memory of group {context.group}"
    where = json.loads(fetch(context.store, name, rank=context.ranks[0], timeout=context.timeout, what=what))
    nothing = mmap.mmap(-1, 1)
    if where["host"] != host_identity():
        return nothing, "it is on another host"
    try:
        descriptor = os.open(f"/proc/{where['pid']}/fd/{where['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return nothing, str(error)
    try:
        if os.fstat(descriptor).st_size != size:
            return nothing, f"it has {os.fstat(descriptor).st_size} bytes, not {size}"
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return memory, "" if memory[:_MARK_BYTES].hex() == where["mark"] else "it is not the memory that was announced"
