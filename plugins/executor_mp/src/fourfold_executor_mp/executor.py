"""Gives every rank of one engine a fresh interpreter, on this host and on nodes that join it."""

from __future__ import annotations

from functools import partial
from typing import Any

from fourfold.config.node_config import NodeConfig
from fourfold.entries import ExecutorContext
from fourfold.manifest import fingerprint
from fourfold.nodes.addresses import listening_address, node_name
from fourfold.nodes.secret import required_secret
from fourfold.plugins import load_plugins
from fourfold.rpc.frames import Frame
from fourfold.rpc.node_ranks import NodeRanks
from fourfold.rpc.rank_executor import RankExecutor
from fourfold_executor_mp.rank_processes import Part, RankProcesses


class MpExecutor(RankExecutor):
    """A process per rank; see ``fourfold.contracts.executor.Executor`` for the promises."""

    def __init__(self, context: ExecutorContext) -> None:
        """Start all ranks at once and wait until each has built its worker.

        Raises WorkerError or ExecutorFailed for a rank that cannot, PluginError and ConfigError for ranks and nodes
        that differ, RpcTimeout and EngineError past --startup-timeout; no process is left then.
        """
        super().__init__(context)
        self._part = part_of(context, 0)
        self._elsewhere = self._listen(context) if context.config.nodes.nnodes > 1 else None
        self._processes = RankProcesses(self._part, stall_timeout=self._timeouts.stall_timeout)
        try:
            nodes = [] if self._elsewhere is None else self._elsewhere.ways(self._take_answer)
            self._connect(self._processes.streams, nodes=nodes)
            rendezvous = self._processes.start(self._note_loss)
            if self._elsewhere is not None:
                self._elsewhere.wait(self._timeouts.startup_timeout, started=context.started)
                rendezvous = ""
            self._start_workers(context, rendezvous=rendezvous, started=context.started)
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[dict[str, Any]]:
        """One row a rank that runs."""
        return self._processes.rows() + (self._elsewhere.processes() if self._elsewhere is not None else [])

    def _listen(self, context: ExecutorContext) -> NodeRanks:
        nodes = context.config.nodes
        return NodeRanks(
            _own_address(nodes),
            nodes.master_port,
            secret=required_secret(context.config),
            places={place: part_of(context, place).ranks for place in range(1, nodes.nnodes)},
            fingerprint=fingerprint(context.config, load_plugins().manifest, rank=0),
            on_lost=self._note_loss,
            option="--master-address and --master-port",
        )

    def _take_answer(self, rank: int, frame: Frame) -> None:
        self._open_channels.take(rank, frame)

    def _note_loss(self, rank: int, how: str) -> None:
        """On a thread that must not wait."""
        if self._channels is not None:
            self._channels.post(partial(self._lose, rank, how))

    def _end_ranks(self, grace: float) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close(str(self._failure or ""))
        self._processes.close(grace)

    def _kill_ranks(self) -> None:
        self._processes.kill()
        if self._elsewhere is not None:
            self._elsewhere.close(str(self._failure or ""))

    def _describe(self, rank: int) -> str:
        pid = self._processes.pid(rank)
        place = f", pid {pid}" if pid is not None else f" on {self._node(rank)}"
        return f"rank {rank} ({self._label(rank)}{place})"

    def _name(self, rank: int) -> str:
        node = self._node(rank)
        return f"rank {rank} on {node}" if node else f"rank {rank}"

    def _node(self, rank: int) -> str:
        return "" if self._elsewhere is None else self._elsewhere.node_of(rank)


def part_of(context: ExecutorContext, place: int, *, address: str | None = None) -> Part:
    """The ranks of node ``place``; consecutive ones, so that tensor parallelism stays inside a node if it fits.

    ``address`` is this node's, which joins the one with the engine; without it this is that one.
    """
    nodes = context.config.nodes
    count = context.layout.engine_world_size // nodes.nnodes
    several = nodes.nnodes > 1
    own = _own_address(nodes) if several and address is None else address or ""
    return Part(
        layout=context.layout,
        dp_rank=context.dp_rank,
        ranks=range(place * count, (place + 1) * count),
        local_start=context.local_start,
        local_workers=context.local_workers,
        node=node_name(own, joins=None if address is None else nodes.master_address) if several else "",
        address=own,
    )


def _own_address(nodes: NodeConfig) -> str:
    """Of the node with the engine."""
    return listening_address(nodes.master_address, nodes.node_interface, option="--master-address")
