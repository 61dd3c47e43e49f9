"""The communicator ``nccl``: torch.distributed's NCCL process groups, one of two ranks for each pipe, and our own sums
where those are faster.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from fourfold.contracts.host_recording import refuse_recording
from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator, WorkHandle
from fourfold.distributed.store import scoped
from fourfold.errors import EngineError, RpcTimeout, Unsupported
from fourfold_comm_nccl.fast_path import FastPath, open_fast_path
from fourfold_comm_nccl.pipe import NcclReceiver, NcclSender

if TYPE_CHECKING:
    from fourfold.contracts.communicator import PeerMemory
    from fourfold.entries import CommunicatorContext

GRACE: Final = 1.0
"""Seconds that a wait for the device gets beyond the deadline of what runs on it."""
LIBRARY_GRACE: Final = 60.0
"""Seconds after which the library ends the process if nobody has asked what became of its work: the last resort."""
CLOSE_SECONDS: Final = 10.0
ABORT_SECONDS: Final = 5.0
_ALIGNMENT: Final = 16

log = logging.getLogger(__name__)


def build(context: CommunicatorContext) -> NcclCommunicator:
    """The communicator of this rank; raises Unsupported off CUDA and where NCCL cannot connect."""
    if context.device.type != "cuda":
        raise Unsupported(f"nccl connects ranks on cuda devices, not on {context.device.type}")
    if not dist.is_nccl_available():
        raise Unsupported("this torch was built without NCCL; install one for CUDA")
    torch.cuda.set_device(context.device)
    # Messages deliberately travel over the connections of the whole group.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    # Left to the first collective, connecting would wait for a missing peer on the host, where nothing ends it.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    try:
        group, upwards = _connect_all(context, "nccl"), _connect_all(context, "nccl upwards")
    except RuntimeError as error:
        raise Unsupported(f"nccl cannot connect group {context.group}: {error}") from error
    communicator = NcclCommunicator(group, upwards, context)
    communicator.find_fast_path()
    return communicator


class NcclCommunicator(ProcessGroupCommunicator):
    """See ``fourfold.contracts.communicator.Communicator``.

    A collective returns when it is queued on the current stream. That a rank is missing is noticed by ``barrier``,
    which waits for the device, and by whatever is called once a sum of ours has waited in vain; then it is broken.
    """

    def __init__(self, group: Any, upwards: Any, context: CommunicatorContext) -> None:
        """``upwards`` carries messages to higher ranks: a message never waits behind one that goes the other way."""
        # Sums are taken in an order that depends on sizes and topology, but every rank gets the same one.
        super().__init__(group, context, graph_safe=True, deterministic=True, scatters_sums=True)
        self._upwards: Any | None = upwards
        self.fast_path: FastPath | None = None
        """Our own sums; None: NCCL sums alone."""
        self._broken: EngineError | None = None
        self._peer_memories = 0
        self._pipes: Counter[tuple[int, int]] = Counter()

    def find_fast_path(self) -> None:
        """Use our own sums where all ranks can; every rank must call this once."""
        self.fast_path = open_fast_path(self._context, super().all_reduce)

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """See Communicator; in place where ``tensor`` is contiguous."""
        plan = None if self.fast_path is None or channel else self.fast_path.plan(tensor)
        if plan is None or self.fast_path is None:
            return super().all_reduce(tensor, channel=channel)
        self._open()
        dense = _aligned(tensor)
        self.fast_path.custom.all_reduce(plan, dense, dense)
        return dense

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Communicator; ``residual`` is updated in place, and the norm takes ``tensor``'s memory if it can.

        Raises Unsupported without our own sums, and for tensors that are not alike, contiguous and of whole vectors.
        """
        if self.fast_path is None:
            raise Unsupported("nccl has no fused all_reduce_add_rms_norm without the custom all-reduce")
        width = weight.shape[-1] * weight.itemsize
        alike = tensor.dtype == residual.dtype == weight.dtype and tensor.shape == residual.shape
        if not alike or not residual.is_contiguous() or width % _ALIGNMENT or residual.data_ptr() % _ALIGNMENT:
            raise Unsupported("all_reduce_add_rms_norm takes contiguous tensors of one dtype and rows of whole vectors")
        self._open()
        plan = self.fast_path.plan(tensor)
        if plan is None or plan.algorithm == "two_shot":
            tensor, plan = self.all_reduce(tensor), None
        dense = _aligned(tensor)
        self.fast_path.custom.all_reduce_add_rms_norm(plan, dense, residual, weight, out=dense, epsilon=epsilon)
        return dense, residual

    def isend(self, tensor: torch.Tensor, destination: int, *, channel: int = 0) -> WorkHandle:
        """See Communicator."""
        dense = self._dense("isend", tensor, channel)
        work = self._towards(destination > self.rank).send([dense], destination, 0)
        return WorkHandle(work, dense, self, f"sending to rank {self._context.ranks[destination]}", destination)

    def irecv(self, tensor: torch.Tensor, source: int, *, channel: int = 0) -> WorkHandle:
        """See Communicator."""
        refuse_recording("irecv")
        if not tensor.is_contiguous():
            raise Unsupported(f"irecv fills contiguous tensors, not one of strides {tensor.stride()}")
        work = self._towards(source < self.rank).recv([tensor], source, 0)
        return WorkHandle(work, tensor, self, f"receiving from rank {self._context.ranks[source]}", source)

    def sender(self, destination: int, *, nbytes: int, depth: int) -> NcclSender:
        """See Communicator."""
        group = _connect(self._context, self._pipe_name(self.rank, destination), 0, 2)
        return NcclSender(group, self._context.device, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> NcclReceiver:
        """See Communicator."""
        group = _connect(self._context, self._pipe_name(source, self.rank), 1, 2)
        return NcclReceiver(group, self._context.device, nbytes=nbytes, depth=depth)

    def barrier(self) -> None:
        """See Communicator; waits for all that the current stream has, and names who is missing in that."""
        refuse_recording("barrier")
        self._open()
        self._meet()
        self._wait_for_device("barrier")

    def peer_memory(self, nbytes: int, channel: int = 0) -> PeerMemory:
        """See Communicator; all ranks must call it alike."""
        from fourfold_comm_nccl.peer_memory import MappedMemory, NcclPeerMemory

        self._open()
        if self.fast_path is None:
            raise Unsupported("the ranks' devices do not map each other's memory")
        if channel >= self.channels:
            raise Unsupported(f"there is no channel {channel}; nccl has {self.channels}")
        self._peer_memories += 1
        return NcclPeerMemory(
            MappedMemory(self._context, nbytes, f"peer memory {self._peer_memories}"),
            meet=self._meet,
            check=self._open,
            failures=self.fast_path.custom.failures,
            timeout=self._context.timeout,
        )

    def close(self) -> None:
        """See Communicator; graphs that hold its sums must be gone: NCCL waits for them, and this does for a while."""
        groups = [group for group in (self._group, self._upwards) if group is not None]
        fast, self.fast_path = self.fast_path, None
        self._group = self._upwards = None

        def end() -> None:
            if fast is not None:
                fast.close()
            for group in groups:
                group.shutdown()

        if not _done_within(CLOSE_SECONDS, end):
            log.warning("group %s: nccl is still busy, perhaps with a graph that was kept", self._context.group)

    def _meet(self) -> None:
        """On the current stream."""
        self._open()
        if self.fast_path is not None:
            self.fast_path.custom.meet()
        else:
            super().all_reduce(torch.zeros(1, device=self._context.device))

    def _wait_for_device(self, operation: str) -> None:
        """Until the current stream is done, or for as long as the context says: then its work is abandoned."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        if not _done_within(self._context.timeout + GRACE, done.synchronize):
            self._abandon()
            peers = [rank for rank in range(self.world_size) if rank != self.rank]
            self._broken = self.timed_out(operation, TimeoutError("the device is not done"), peers)
        self._open()

    def _abandon(self) -> None:
        """End what NCCL runs on the device, so that the process and the device stay usable."""
        groups = [group for group in (self._group, self._upwards) if group is not None]
        self._group = self._upwards = None

        def end() -> None:
            for group in groups:
                group.abort()

        if not _done_within(ABORT_SECONDS, end):
            log.warning("group %s: nccl does not let go of the device", self._context.group)

    def _open(self) -> Any:
        if self.fast_path is not None and self.fast_path.custom.failed and self._broken is None:
            missing = [self._context.ranks[rank] for rank in self.fast_path.custom.missing]
            self._abandon()
            self._broken = RpcTimeout(
                f"meeting on devices in group {self._context.group}", self._context.timeout, missing
            )
        if self._broken is not None:
            raise self._broken
        return super()._open()

    def _pipe_name(self, source: int, destination: int) -> str:
        self._pipes[source, destination] += 1
        return f"pipe {self._pipes[source, destination]} from {source} to {destination}"

    def _towards(self, higher: bool) -> Any:
        group = self._open()
        return self._upwards if higher else group


def _connect_all(context: CommunicatorContext, name: str) -> Any:
    """A process group of all ranks, connected."""
    group = _connect(context, name, context.rank, len(context.ranks))
    # At once, not by the first message: that would make a rank wait for its peer's, in whatever order they come.
    group.eager_connect_single_device(context.device)
    return group


def _connect(context: CommunicatorContext, name: str, rank: int, world_size: int) -> Any:
    """A process group; ``name`` serves once."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=context.timeout + LIBRARY_GRACE)
    return dist.ProcessGroupNCCL(scoped(context.store, name), rank, world_size, options)


def _done_within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether ``work`` ends in time; else it goes on, on a thread that keeps no process alive."""
    worker = threading.Thread(target=work, name="nccl", daemon=True)
    worker.start()
    worker.join(seconds)
    return not worker.is_alive()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if it is contiguous and starts at a vector; depends on this rank alone."""
    if tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
