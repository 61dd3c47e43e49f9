"""How a deployment is spread over nodes: each node is started with its own command, and says here which it is."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """Which part of the deployment this node is, and where the others are. Nodes differ in these, and in no other."""

    headless: bool = False
    """Whether this node has engines or ranks only, and another one answers requests."""
    data_parallel_size_local: int | None = None
    """Replicas on this node; by default all, or all from the start rank on. 0: this node only answers requests."""
    data_parallel_start_rank: int = 0
    """The first of this node's replicas."""
    data_parallel_address: str = "127.0.0.1"
    """The node that answers requests, as all nodes reach it; it listens there for nodes with replicas."""
    data_parallel_rpc_port: int = 29550
    """The port of that address."""
    data_parallel_hybrid_lb: bool = False
    """Whether each node answers requests, for its own replicas only; what is in front balances over nodes."""
    data_parallel_external_lb: bool = False
    """Whether each replica is a server of its own; what is in front balances over all of them."""
    data_parallel_rank: int | None = None
    """The replica that this server is, with an external load balancer."""
    nnodes: int = 1
    """Nodes that share the ranks of one engine."""
    node_rank: int = 0
    """Which of these nodes this is; 0 has the engine and answers requests."""
    master_address: str = "127.0.0.1"
    """The node with the engine, as all of them reach it; it listens there for the others."""
    master_port: int = 29501
    """The port of that address."""
    node_interface: str | None = None
    """Network interface, or address, that other nodes reach this one by; by default that of the way to them."""
    cluster_secret: str | None = None
    """What all nodes of a deployment share, so that nobody else can join; better in FOURFOLD_CLUSTER_SECRET."""

    def __post_init__(self) -> None:
        if self.data_parallel_size_local is not None and self.data_parallel_size_local < 0:
            raise ConfigError(f"--data-parallel-size-local is {self.data_parallel_size_local}; 0 or more")
        for name in ("data_parallel_start_rank", "data_parallel_rank", "node_rank"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; 0 or more")
        for name in ("data_parallel_rpc_port", "master_port"):
            if not 0 < getattr(self, name) < 65536:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; from 1 to 65535")
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes is {self.nnodes}; 1 or more")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank is {self.node_rank} and --nnodes {self.nnodes}; nodes count from 0")
        if self.nnodes > 1 and (self.data_parallel_hybrid_lb or self.external):
            raise ConfigError(
                f"--nnodes is {self.nnodes}, for nodes of which the first answers for all, and with a hybrid or "
                "external balancer every node answers; leave out --nnodes, and --data-parallel-start-rank and "
                "--data-parallel-size-local (or --data-parallel-rank) say which replicas a node has"
            )
        if self.nnodes > 1 and self.master_address.strip("[]") in ("0.0.0.0", "::"):  # noqa: S104  # refused, not bound to
            raise ConfigError(
                f"--master-address is {self.master_address!r}, by which other nodes cannot reach this one; give the "
                "address that they see, the same on all of them"
            )
        if self.data_parallel_hybrid_lb and self.external:
            raise ConfigError("--data-parallel-hybrid-lb and an external load balancer exclude each other; give one")
        if self.headless and (self.data_parallel_hybrid_lb or self.external):
            raise ConfigError("--headless answers no requests, and with a hybrid or external balancer every node does")
        if self.nnodes > 1 and (self.node_rank > 0) != self.headless:
            raise ConfigError(
                f"--node-rank is {self.node_rank}; node 0 answers requests, and all others need --headless"
            )

    @property
    def external(self) -> bool:
        """Whether this server is one replica."""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None
