"""The communicator ``nccl``: torch.distributed's NCCL process group, one for each group of ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.distributed.store import scoped
from fourfold.errors import Unsupported

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext


def build(context: CommunicatorContext) -> ProcessGroupCommunicator:
    """The communicator of this rank; raises Unsupported off CUDA and where NCCL cannot connect."""
    if context.device.type != "cuda":
        raise Unsupported(f"nccl connects ranks on cuda devices, not on {context.device.type}")
    if not dist.is_nccl_available():
        raise Unsupported("this torch was built without NCCL; install one for CUDA")
    torch.cuda.set_device(context.device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=context.timeout)
    try:
        store = scoped(context.store, "nccl")
        group = dist.ProcessGroupNCCL(store, context.rank, len(context.ranks), options)
    except RuntimeError as error:
        raise Unsupported(f"nccl cannot connect group {context.group}: {error}") from error
    # Sums are taken in an order that depends on sizes and topology, but every rank gets the same one.
    return ProcessGroupCommunicator(group, context, graph_safe=True, deterministic=True, scatters_sums=True)
