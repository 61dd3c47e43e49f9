"""A communicator over one torch.distributed process group, which belongs to nobody else: there is no default group.

Knows no backend: plugins make the process group, and say what it cannot do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fourfold.contracts.host_recording import refuse_recording
from fourfold.distributed.buffered_pipe import BufferedReceiver, BufferedSender
from fourfold.distributed.store import exchange
from fourfold.errors import EngineError, RpcTimeout, Unsupported

if TYPE_CHECKING:
    from fourfold.contracts.communicator import PeerMemory, Receiver, Sender
    from fourfold.entries import CommunicatorContext

_REPORT_SECONDS = 2.0
"""Within which ranks whose collective failed tell so: the others are those that did not come."""


class ProcessGroupCommunicator:
    """See ``fourfold.contracts.communicator.Communicator``; of one channel."""

    channels = 1

    def __init__(
        self,
        group: Any,
        context: CommunicatorContext,
        *,
        graph_safe: bool,
        deterministic: bool,
        scatters_sums: bool,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """``group`` is a ``ProcessGroupGloo``, ``ProcessGroupNCCL`` or the like; ``scatters_sums``: it can
        reduce_scatter; ``synchronize`` waits for the device where a finished call only means a started kernel.
        """
        self.rank, self.world_size = context.rank, len(context.ranks)
        self.graph_safe, self.deterministic = graph_safe, deterministic
        self._group: Any | None = group
        self._context = context
        self._scatters_sums = scatters_sums
        self._synchronize = synchronize
        self._failures = 0
        self._pipes: Counter[tuple[int, int]] = Counter()

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("all_reduce", tensor, channel)
        self._run("all_reduce", lambda group: group.allreduce([dense]))
        return dense

    def start_all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> StartedSum:
        """See ``fourfold.contracts.split_sum.SplitSums``; the group itself works on it meanwhile."""
        dense = self._dense("start_all_reduce", tensor, channel)
        group = self._open()
        return StartedSum(self.named("all_reduce", lambda: group.allreduce([dense])), dense, self)

    def all_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0) -> torch.Tensor:
        """See Communicator; uneven rows travel padded to the longest."""
        dense = self._dense("all_gather", tensor, channel)
        rows = list(sizes) if sizes is not None else [dense.shape[0]] * self.world_size
        if len(rows) != self.world_size or rows[self.rank] != dense.shape[0]:
            raise EngineError(f"all_gather has {dense.shape[0]} rows on rank {self.rank}, and sizes are {rows}")
        longest = max(rows)
        if dense.shape[0] < longest:
            dense = torch.cat([dense, dense.new_zeros(longest - dense.shape[0], *dense.shape[1:])])
        parts = [torch.empty_like(dense) for _ in rows]
        self._run("all_gather", lambda group: group.allgather([parts], [dense]))
        return torch.cat([part[:count] for part, count in zip(parts, rows)])

    def reduce_scatter(
        self, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None, channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        rows = list(sizes) if sizes is not None else [tensor.shape[0] // self.world_size] * self.world_size
        if len(rows) != self.world_size or sum(rows) != tensor.shape[0]:
            raise EngineError(f"reduce_scatter of {tensor.shape[0]} rows cannot give {rows}")
        first = sum(rows[: self.rank])
        if self._scatters_sums and len(set(rows)) == 1:
            dense = self._dense("reduce_scatter", tensor, channel)
            out = dense.new_empty(rows[self.rank], *dense.shape[1:])
            parts = list(torch.split(dense, rows))
            self._run("reduce_scatter", lambda group: group.reduce_scatter([out], [parts]))
            return out
        total = self.all_reduce(tensor.clone(), channel=channel)
        return total[first : first + rows[self.rank]].clone()

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, channel: int = 0) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("broadcast", tensor, channel)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._run("broadcast", lambda group: group.broadcast([dense], options))
        return tensor if dense is tensor else tensor.copy_(dense)

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        destination: int = 0,
        out: Sequence[torch.Tensor] | None = None,
        channel: int = 0,
    ) -> list[torch.Tensor] | None:
        """See Communicator."""
        dense = self._dense("gather", tensor, channel)
        parts = [torch.empty_like(dense) for _ in range(self.world_size)] if self.rank == destination else []
        options = dist.GatherOptions()
        options.rootRank = destination
        self._run("gather", lambda group: group.gather([parts] if parts else [], [dense], options))
        if out is not None:
            for target, part in zip(out, parts, strict=True):
                target.copy_(part)
            return list(out)
        return parts or None

    def all_to_all(
        self, tensor: torch.Tensor, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], channel: int = 0
    ) -> torch.Tensor:
        """See Communicator."""
        dense = self._dense("all_to_all", tensor, channel)
        if sum(send_sizes) != dense.shape[0] or len(send_sizes) != self.world_size:
            raise EngineError(f"all_to_all of {dense.shape[0]} rows cannot send {list(send_sizes)}")
        out = dense.new_empty(sum(receive_sizes), *dense.shape[1:])
        send, receive = list(send_sizes), list(receive_sizes)
        self._run("all_to_all", lambda group: group.alltoall_base(out, dense, receive, send))
        return out

    def isend(self, tensor: torch.Tensor, destination: int, *, channel: int = 0) -> WorkHandle:
        """See Communicator."""
        return self._start_send(self._dense("isend", tensor, channel), destination, tag=0)

    def irecv(self, tensor: torch.Tensor, source: int, *, channel: int = 0) -> WorkHandle:
        """See Communicator."""
        refuse_recording("irecv")
        if not tensor.is_contiguous():
            raise Unsupported(f"irecv fills contiguous tensors, not one of strides {tensor.stride()}")
        return self._start_receive(tensor, source, tag=0)

    def sender(self, destination: int, *, nbytes: int, depth: int) -> Sender:
        """See Communicator; for groups that tell messages apart by tag, and take short ones for long ones."""
        start = partial(self._start_send, destination=destination, tag=self._next_tag(self.rank, destination))
        return BufferedSender(start, nbytes=nbytes, depth=depth)

    def receiver(self, source: int, *, nbytes: int, depth: int) -> Receiver:
        """See ``sender``."""
        start = partial(self._start_receive, source=source, tag=self._next_tag(source, self.rank))
        return BufferedReceiver(start, nbytes=nbytes, depth=depth)

    def barrier(self) -> None:
        """See Communicator."""
        refuse_recording("barrier")
        self._run("barrier", lambda group: group.barrier())

    def peer_memory(self, nbytes: int, channel: int = 0) -> PeerMemory:
        """Not offered."""
        raise Unsupported(f"{self._open().name()} has no memory that ranks share")

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not offered."""
        raise Unsupported(f"{self._open().name()} has no fused all_reduce_add_rms_norm")

    def capture(self) -> AbstractContextManager[None]:
        """Needs nothing."""
        return nullcontext()

    def close(self) -> None:
        """See Communicator."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()

    def timed_out(self, operation: str, cause: Exception, peers: Sequence[int]) -> EngineError:
        """The error of a call that failed with ``peers`` (places in the group) in it.

        The ranks that are still there meet in the store to find out which ones are not.
        """
        context = self._context
        self._failures += 1
        places = [*peers, self.rank]
        try:
            exchange(
                context.store,
                f"failed {operation} {self._failures} {'-'.join(map(str, sorted(places)))}",
                b"",
                rank=self.rank,
                ranks=context.ranks,
                timeout=min(_REPORT_SECONDS, context.timeout),
                what=operation,
            )
        except RpcTimeout as error:
            missing = [rank for rank in error.missing_ranks if context.ranks.index(rank) in peers]
            return RpcTimeout(f"{operation} in group {context.group}", context.timeout, missing or error.missing_ranks)
        except RuntimeError as error:
            return EngineError(f"{operation} failed in group {context.group}: {cause}; the store is gone: {error}")
        return EngineError(f"{operation} failed on all ranks of group {context.group}: {cause}")

    def _start_send(self, tensor: torch.Tensor, destination: int, tag: int) -> WorkHandle:
        work = self._open().send([tensor], destination, tag)
        return WorkHandle(work, tensor, self, f"sending to rank {self._context.ranks[destination]}", destination)

    def _start_receive(self, tensor: torch.Tensor, source: int, tag: int) -> WorkHandle:
        work = self._open().recv([tensor], source, tag)
        return WorkHandle(work, tensor, self, f"receiving from rank {self._context.ranks[source]}", source)

    def _next_tag(self, source: int, destination: int) -> int:
        """Of a new pipe, the same on both ends; 0 is for plain messages."""
        self._pipes[source, destination] += 1
        return self._pipes[source, destination]

    def named(self, operation: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns, a part of a collective; raises as the collective does."""
        try:
            return call()
        except RuntimeError as error:
            peers = [place for place in range(self.world_size) if place != self.rank]
            raise self.timed_out(operation, error, peers) from error

    def finish(self, work: Any) -> None:
        """Wait for what the group has started."""
        work.wait()
        if self._synchronize is not None:
            self._synchronize()

    def _run(self, operation: str, start: Callable[[Any], Any]) -> None:
        group = self._open()
        self.named(operation, lambda: self.finish(start(group)))

    def _open(self) -> Any:
        if self._group is None:
            raise EngineError(f"the communicator of group {self._context.group} is closed")
        return self._group

    def _dense(self, operation: str, tensor: torch.Tensor, channel: int) -> torch.Tensor:
        refuse_recording(operation)
        if channel >= self.channels:
            raise Unsupported(f"there is no channel {channel}; this communicator has {self.channels}")
        return tensor.contiguous()


class StartedSum:
    """See ``fourfold.contracts.split_sum.PendingSum``; holds the tensor until done."""

    def __init__(self, work: Any, tensor: torch.Tensor, owner: ProcessGroupCommunicator) -> None:
        self._work = work
        self._tensor = tensor
        self._owner = owner

    def wait(self) -> torch.Tensor:
        """See PendingSum."""
        self._owner.named("all_reduce", lambda: self._owner.finish(self._work))
        return self._tensor


class WorkHandle:
    """See ``fourfold.contracts.communicator.Handle``; holds the tensor until done."""

    def __init__(
        self, work: Any, tensor: torch.Tensor, owner: ProcessGroupCommunicator, operation: str, peer: int
    ) -> None:
        self._work: Any | None = work
        self._tensor = tensor
        self._owner = owner
        self._operation = operation
        self._peer = peer

    def wait(self, timeout: float | None = None) -> None:
        """See Handle."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._owner.timed_out(self._operation, error, [self._peer]) from error
