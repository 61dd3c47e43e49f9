"""What this node has of the deployment: which replicas, and whom it has to find. Follows from the config alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_config import NodeConfig
from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """Engines count from 0 among those that an API server knows; a replica's rank counts over the whole deployment."""

    num_engines: int
    """Engines that the API servers know, on all their nodes."""
    local: range
    """The engines on this node."""
    first_rank: int = 0
    """The rank of engine 0."""
    ranks_per_engine: int = 1
    """Of each engine, those on this node."""

    @property
    def elsewhere(self) -> list[int]:
        """The engines on other nodes."""
        return [engine for engine in range(self.num_engines) if engine not in self.local]

    @property
    def local_workers(self) -> int:
        """Ranks on this node."""
        return max(1, len(self.local)) * self.ranks_per_engine

    def first_local_rank(self, rank: int) -> int:
        """The first rank of replica ``rank``, counted among the ranks on this node."""
        return max(0, rank - self.first_rank - self.local.start) * self.ranks_per_engine


def spread_replicas(config: EngineConfig) -> EngineConfig:
    """With --nnodes and replicas: the same as replicas of which each node has its share, whole ones.

    Raises ConfigError where a replica would be on two nodes.
    """
    nodes, size = config.nodes, config.parallel.data_parallel_size
    if nodes.nnodes == 1 or size == 1:
        return config
    if size % nodes.nnodes:
        raise ConfigError(
            f"--nnodes is {nodes.nnodes} and --data-parallel-size {size}: each node has as many whole replicas, so "
            f"give a multiple of {nodes.nnodes}; replicas that are on several nodes each need an executor that places "
            "ranks by itself, without --nnodes"
        )
    share = size // nodes.nnodes
    if nodes.data_parallel_size_local not in (None, share):
        raise ConfigError(
            f"--data-parallel-size-local is {nodes.data_parallel_size_local}, and --nnodes {nodes.nnodes} makes it "
            f"{share}; leave one of them out"
        )
    if nodes.data_parallel_start_rank not in (0, nodes.node_rank * share):
        raise ConfigError(
            f"--data-parallel-start-rank is {nodes.data_parallel_start_rank}, and --node-rank {nodes.node_rank} makes "
            f"it {nodes.node_rank * share}; leave it out"
        )
    own = replace(
        nodes,
        nnodes=1,
        node_rank=0,
        data_parallel_size_local=share,
        data_parallel_start_rank=nodes.node_rank * share,
        data_parallel_address=nodes.master_address,
        data_parallel_rpc_port=nodes.master_port,
    )
    return replace(config, nodes=own)


def check_offline_nodes(nodes: NodeConfig) -> None:
    """Refuse what only servers do: answer for replicas on other nodes, or have them. Raises ConfigError."""
    for field in fields(nodes):
        value = getattr(nodes, field.name)
        if field.name.startswith(("headless", "data_parallel")) and value != field.default:
            raise ConfigError(
                f"--{field.name.replace('_', '-')} is {value}, and replicas on other nodes are for fourfold serve "
                "alone; leave it out"
            )


def plan_nodes(config: EngineConfig) -> NodePlan:
    """The part of this node. Raises ConfigError for options that do not go together."""
    nodes, size = config.nodes, config.parallel.data_parallel_size
    ranks = config.parallel.layout.engine_world_size
    if nodes.nnodes > 1:
        return _plan_shared_engine(nodes, size, ranks)
    if nodes.external:
        if nodes.data_parallel_size_local not in (None, 1):
            raise ConfigError("--data-parallel-size-local is for several replicas; with an external balancer it is 1")
        rank = nodes.data_parallel_start_rank if nodes.data_parallel_rank is None else nodes.data_parallel_rank
        _check_range(rank, 1, size)
        return NodePlan(num_engines=1, local=range(1), first_rank=rank, ranks_per_engine=ranks)
    start = nodes.data_parallel_start_rank
    count = max(1, size - start) if nodes.data_parallel_size_local is None else nodes.data_parallel_size_local
    _check_range(start, count, size)
    if nodes.data_parallel_hybrid_lb:
        if count < 1:
            raise ConfigError("--data-parallel-size-local is 0, and --data-parallel-hybrid-lb wants 1 or more")
        return NodePlan(num_engines=count, local=range(count), first_rank=start, ranks_per_engine=ranks)
    if nodes.headless and count < 1:
        raise ConfigError("--headless with --data-parallel-size-local 0 leaves nothing to do; give 1 or more")
    if not nodes.headless and start:
        raise ConfigError(
            f"--data-parallel-start-rank is {start}: the node that answers requests has the first replicas; add "
            "--headless, or --data-parallel-hybrid-lb to answer requests on each node"
        )
    return NodePlan(num_engines=size, local=range(start, start + count), ranks_per_engine=ranks)


def _plan_shared_engine(nodes: NodeConfig, size: int, ranks: int) -> NodePlan:
    if size > 1:
        raise ConfigError(
            f"--nnodes is {nodes.nnodes}, which cuts one engine over nodes, and --data-parallel-size {size}; only "
            "fourfold serve has replicas on other nodes"
        )
    if ranks % nodes.nnodes:
        raise ConfigError(
            f"--nnodes is {nodes.nnodes}, and an engine has {ranks} ranks; each node has as many, so "
            f"--tensor-parallel-size times --pipeline-parallel-size must be a multiple of {nodes.nnodes}"
        )
    return NodePlan(num_engines=1, local=range(1), ranks_per_engine=ranks // nodes.nnodes)


def _check_range(start: int, count: int, size: int) -> None:
    if start + count > size or (start and not count):
        raise ConfigError(
            f"this node has replicas {start} to {start + count - 1}, and --data-parallel-size is {size}; its replicas "
            f"count from 0 to {size - 1}"
        )
