"""Memory of one device that the other ranks of a host map: torch's symmetric memory, without multicast.

The only file that knows symmetric memory, whose interface is torch's own and may change: whatever goes wrong in it is
Unsupported.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import _symmetric_memory

from fourfold.distributed.store import exchange, scoped
from fourfold.errors import EngineError, Unsupported

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext
    from fourfold_comm_nccl.failures import Failures


class MappedMemory:
    """A zeroed buffer of each rank of the group, mapped here."""

    def __init__(self, context: CommunicatorContext, nbytes: int, name: str) -> None:
        """All ranks must call this at once, with the same ``nbytes`` and ``name``, which serves once a store.

        Raises Unsupported where the ranks' devices cannot reach each other, RpcTimeout naming ranks that did not come.
        """
        # Multicast objects are a risk to a shared host, and nothing here uses them.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        rank, world = context.rank, len(context.ranks)
        group: Any = self._meet(context, name, f"{uuid.uuid4()}" if rank == 0 else "")[0]
        place: Any = _symmetric_memory._SymmetricMemory  # type: ignore[attr-defined]
        self._name = group
        try:
            # Looked up by name, and only for its store: a group of no backend.
            self._owner = dist.ProcessGroup(scoped(context.store, name), rank, world)
            _register_process_group(group, self._owner)
            place.set_group_info(group, rank, world, context.store)
            mine = place.empty_strided_p2p((nbytes,), (1,), torch.uint8, context.device, group)
            mine.zero_()
            torch.cuda.synchronize(context.device)
            # Peers see memory only once it is zero: rendezvous returns when all ranks are in it.
            self._handle: Any = place.rendezvous(mine, group)
            self._buffers: list[torch.Tensor] = [
                self._handle.get_buffer(one, (nbytes,), torch.uint8, 0) for one in range(world)
            ]
        except (RuntimeError, TypeError, AttributeError) as error:
            raise Unsupported(f"the ranks' devices do not map each other's memory: {_first_line(error)}") from error
        self._buffers[rank] = mine

    def buffer(self, rank: int) -> torch.Tensor:
        """uint8 [nbytes] of a rank of the group."""
        if not self._buffers:
            raise EngineError("this peer memory is closed")
        return self._buffers[rank]

    def addresses(self) -> list[int]:
        """Of all ranks' buffers, as this device sees them."""
        return [buffer.data_ptr() for buffer in self._buffers]

    def close(self) -> None:
        """Unmap; idempotent. Nothing may run that uses it, on any rank."""
        if self._buffers:
            _unregister_process_group(self._name)
        self._buffers.clear()
        self._handle = None

    @staticmethod
    def _meet(context: CommunicatorContext, name: str, value: str) -> list[str]:
        answers = exchange(
            context.store,
            name,
            value.encode(),
            rank=context.rank,
            ranks=context.ranks,
            timeout=context.timeout,
            what=f"mapping memory in group {context.group}",
        )
        return [answer.decode() for answer in answers]


class NcclPeerMemory:
    """See ``fourfold.contracts.communicator.PeerMemory``."""

    def __init__(
        self,
        memory: MappedMemory,
        *,
        meet: Callable[[], None],
        check: Callable[[], object],
        failures: Failures,
        timeout: float,
    ) -> None:
        """``meet`` returns, or lets the current stream go on, when all ranks have called it."""
        self._memory = memory
        self._meet = meet
        self.check = check
        """Raises what the communicator does once a kernel has waited in vain."""
        self.failures = failures
        """For kernels that wait by themselves: of the communicator, which says whom they missed."""
        self.timeout = timeout
        """Seconds that such kernels may wait."""

    def buffer(self, rank: int) -> torch.Tensor:
        """See PeerMemory."""
        return self._memory.buffer(rank)

    def barrier(self) -> None:
        """See PeerMemory; the current stream goes on then, the host at once."""
        self._meet()

    def close(self) -> None:
        """See PeerMemory."""
        self._memory.close()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
