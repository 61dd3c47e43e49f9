"""The communicator ``nccl``: torch.distributed's NCCL process group, one for each group of ranks and each pipe."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.distributed.store import scoped
from fourfold.errors import Unsupported
from fourfold_comm_nccl.pipe import NcclReceiver, NcclSender

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext


def build(context: CommunicatorContext) -> NcclCommunicator:
    """The communicator of this rank; raises Unsupported off CUDA and where NCCL cannot connect."""
    if context.device.type != "cuda":
        raise Unsupported(f"nccl connects ranks on cuda devices, not on {context.device.type}")
    if not dist.is_nccl_available():
        raise Unsupported("this torch was built without NCCL; install one for CUDA")
    torch.cuda.set_device(context.device)
    return NcclCommunicator(context)


class NcclCommunicator(ProcessGroupCommunicator):
    """See ``fourfold.contracts.communicator.Communicator``; every pipe connects its two ranks by themselves."""

    def __init__(self, context: CommunicatorContext) -> None:
        group = _connect(context, "nccl", context.rank, len(context.ranks))
        # Sums are taken in an order that depends on sizes and topology, but every rank gets the same one.
        super().__init__(group, context, graph_safe=True, deterministic=True, scatters_sums=True)
        self._opened: Counter[tuple[int, int]] = Counter()

    def sender(self, destination: int, *, nbytes: int, depth: int) -> NcclSender:
        """See Communicator."""
        group = _connect(self._context, self._pipe_name(self.rank, destination), 0, 2)
        return NcclSender(group, self._context.device, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> NcclReceiver:
        """See Communicator."""
        group = _connect(self._context, self._pipe_name(source, self.rank), 1, 2)
        return NcclReceiver(group, self._context.device, nbytes=nbytes, depth=depth)

    def _pipe_name(self, source: int, destination: int) -> str:
        self._opened[source, destination] += 1
        return f"pipe {self._opened[source, destination]} from {source} to {destination}"


def _connect(context: CommunicatorContext, name: str, rank: int, world_size: int) -> Any:
    """A process group of NCCL; ``name`` serves once."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=context.timeout)
    try:
        return dist.ProcessGroupNCCL(scoped(context.store, name), rank, world_size, options)
    except RuntimeError as error:
        raise Unsupported(f"nccl cannot connect group {context.group}: {error}") from error
