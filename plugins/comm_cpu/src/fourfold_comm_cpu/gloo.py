"""The communicator ``gloo``: torch.distributed over TCP; on the loopback interface where all ranks are on this host."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.distributed.store import scoped
from fourfold.errors import Unsupported

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext

LOOPBACK = "127.0.0.1"


def build(context: CommunicatorContext) -> ProcessGroupCommunicator:
    """The communicator of this rank; raises Unsupported off the CPU and where gloo cannot connect."""
    return ProcessGroupCommunicator(
        connect(context), context, graph_safe=False, deterministic=True, scatters_sums=False
    )


def connect(context: CommunicatorContext) -> Any:
    """The process group; raises as ``build`` does."""
    if context.device.type != "cpu":
        raise Unsupported(f"gloo connects ranks on a cpu, not on {context.device.type}")
    if not dist.is_gloo_available():
        raise Unsupported("this torch was built without gloo")
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    timeout = timedelta(seconds=context.timeout)
    options._timeout = timeout
    try:
        if context.one_host:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        elif context.address:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=context.address)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        store = scoped(context.store, "gloo")
        return dist.ProcessGroupGloo(store, context.rank, len(context.ranks), options)
    except RuntimeError as error:
        raise Unsupported(f"gloo cannot connect group {context.group}: {error}") from error
