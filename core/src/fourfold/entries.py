"""What offer hooks return: a name, how to build the thing, and what it suits. Frozen, and free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fourfold.contracts.parallel_layer import LayerKind

if TYPE_CHECKING:
    import torch

    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.attention_backend import AttentionBackend, AttentionSpec
    from fourfold.contracts.checkpoint import CheckpointFormat, CheckpointSource
    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.executor import Executor, Follower
    from fourfold.contracts.linear_method import LinearMethod, LinearWeight
    from fourfold.contracts.load_balancer import LoadBalancer
    from fourfold.contracts.mixture import AllToAll, ExpertPlacement, Experts, Rebalancer
    from fourfold.contracts.operators import Operators
    from fourfold.contracts.parallel_layer import ParallelLayer
    from fourfold.contracts.scheduling_policy import SchedulingPolicy
    from fourfold.contracts.step_part import StepPart
    from fourfold.contracts.tokenizer import Tokenizer
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.layers.weight_memory import WeightMemory
    from fourfold.layout import ParallelLayout
    from fourfold.models.description import Activation, LatentAttentionDescription, MixtureDescription, ModelDescription
    from fourfold.plugins import PluginRegistry

Product = TypeVar("Product", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suitability:
    """How well an entry suits a config. ``auto`` takes the highest score; 0 cannot run here."""

    score: int
    reason: str
    """One line, without a stop; for score 0 also what to do about it."""


def always_suits(config: EngineConfig) -> Suitability:
    """The default: can run, and anything better is preferred."""
    return Suitability(score=1, reason="runs anywhere")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[Product]):
    """One named thing that a plugin offers."""

    name: str
    """Lowercase letters, digits, dashes and underscores; what a user types."""
    build: Callable[[Any], Product]
    """Called with one context object; heavy imports belong inside."""
    summary: str = ""
    """One line for ``fourfold plugins``."""
    capabilities: frozenset[str] = field(default_factory=frozenset)
    """Claims that the conformance kit tests both ways."""
    suits: Callable[[EngineConfig], Suitability] = always_suits


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorContext:
    """What an executor needs to start its ranks."""

    config: EngineConfig
    layout: ParallelLayout
    worker: str = "fourfold.worker.worker:Worker"
    """``module:qualname``, called with a WorkerContext on every rank."""
    dp_rank: int = 0
    first_local_rank: int | None = None
    """The engine's first rank, counted among all ranks on this node; None: all replicas are on it."""
    local_workers: int = 0
    """Ranks on this node; 0: all ranks of all replicas."""
    started: float = field(default_factory=time.monotonic)
    """The ``time.monotonic`` from which --startup-timeout counts."""

    @property
    def local_start(self) -> int:
        """``first_local_rank``, whoever knows it."""
        first = self.first_local_rank
        return self.dp_rank * self.layout.engine_world_size if first is None else first


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """What a worker needs to be built, on its own rank."""

    config: EngineConfig
    layout: ParallelLayout
    rank: int
    """Within the engine: 0 to TP x PP - 1."""
    local_rank: int = 0
    """Among all ranks of this host."""
    local_workers: int = 0
    """Ranks of this host; 0: all ranks of all replicas."""
    node: str = ""
    """The host as the executor calls it; ranks of different nodes share no memory. Empty: where there is one."""
    address: str = ""
    """This host's IP address as the others reach it; empty: where there is one host."""
    dp_rank: int = 0
    open_store: Callable[[], Any] | None = None
    """Opens the torch.distributed Store that the ranks of this engine, and no others, reach; None for one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicatorContext:
    """What a communicator needs to connect the ranks of one group."""

    group: str
    """``tp``, ``pp``, ``dp`` or ``ep``."""
    ranks: tuple[int, ...]
    """Global ranks of the group, in order."""
    rank: int
    """This process' rank in the group."""
    device: torch.device
    store: Any
    """A torch.distributed Store that all ranks of the group reach."""
    timeout: float
    """Seconds for the rendezvous and for every collective."""
    one_host: bool = True
    """Whether all ranks of the group are on this host."""
    hosts: tuple[int, ...] = ()
    """A number for each rank, the same for ranks of one host; empty: not known."""
    address: str = ""
    """This host's IP address as the others reach it; empty: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeContext:
    """What linear methods and operators need."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    """Within the engine; equal ranks of all replicas hold the same weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What an attention backend needs for one layer."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    spec: AttentionSpec

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of cache tensors: ``dtype``, or with --kv-cache-dtype fp8 float8_e4m3fn."""
        if self.config.cache.kv_cache_dtype == "auto":
            return self.dtype
        import torch

        return torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayerContext:
    """What a parallel layer needs. ``sizes`` are the whole layer's, before the cut."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    communicator: Communicator | None
    """None when ``world_size`` is 1."""
    linear_method: LinearMethod
    in_features: int
    out_sizes: tuple[int, ...]
    """Output features: one number; one a part for merged_column; (heads, kv heads, head_dim) for qkv and latent_qkv."""
    bias: bool = False
    shared: dict[str, StepPart] = field(default_factory=dict)
    """What the layers of one decoder have in common, under names of their own."""
    in_heads: tuple[int, int, int] | None = None
    """Row layers whose input is the output of attention: its (heads, kv heads, head_dim), cut as qkv cuts them."""
    tied_weight: LinearWeight | None = None
    """A head of tied embeddings: the vocabulary embedding's storage, used in place of an own one."""
    operators: Operators | None = None
    """For latent_qkv and moe layers."""
    latent: LatentAttentionDescription | None = None
    """Of a latent_qkv layer."""
    caches_latents: bool = False
    """Whether attention is over latents (``AttentionSpec.shared_values``), and not over heads made of them."""
    mixture: MixtureDescription | None = None
    """Of a moe layer; the fields that follow are its too."""
    layer: int = 0
    """Its number in the whole model."""
    activation: Activation = "silu"
    registry: PluginRegistry | None = None
    """Where it finds its own parts, by the names in ``config``."""
    weight_memory: WeightMemory | None = None
    """Holds weights that no linear method does, for engines that sleep; of a latent_qkv layer too."""
    expert_group: GroupCoordinator | None = None
    """The DP x TP ranks of its pipeline stage, over which experts may spread; None: those of ``communicator``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsContext:
    """What the experts of one layer need. Sizes are this rank's."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    num_experts: int
    """Local slots."""
    hidden_size: int
    intermediate_size: int
    activation: Activation
    operators: Operators
    memory: WeightMemory | None = None
    """Where ``empty`` takes it from; None: anywhere."""

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of weights in ``dtype`` on ``device``, not filled yet, which an engine that sleeps takes back."""
        from fourfold.layers.weight_memory import WeightMemory

        return (self.memory or WeightMemory(self.device)).empty(*shape, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllContext:
    """What an all-to-all needs, on one rank of an EP group of several."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    communicator: Communicator
    """Of the EP group."""
    hidden_size: int
    top_k: int
    num_experts: int
    """Physical ones, of all ranks."""
    owners: torch.Tensor
    """int32 [``num_experts``] on the CPU: the rank that holds each."""
    max_tokens: int
    """Of one rank in one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBalancerContext:
    """What a load balancer needs."""

    num_engines: int
    num_servers: int = 1
    """API servers that choose beside each other, each with a balancer of its own."""
    seed: int = 0
    """Of its random choices; each API server has another, so that they do not all begin with the same engine."""
    block_size: int = 16
    """Tokens of a block, which a mark of ``BalancedRequest`` stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContext:
    """What checkpoint sources and formats need."""

    cache_folder: str
    """Where conversions are kept."""
    describe: Callable[[Mapping[str, Any]], ModelDescription]
    """Turns a config.json into a description, through the installed models."""
    seed: int = 0
    """Of dummy weights."""
    device: torch.device | None = None
    """Where tensors that no file holds are made; None: on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerContext:
    """What a tokenizer needs."""

    folder: str
    """A prepared checkpoint folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerContext:
    """What a scheduling policy needs."""

    config: EngineConfig


@dataclass(frozen=True, kw_only=True)
class ExecutorEntry(Entry["Executor"]):
    """``build(ExecutorContext) -> Executor``."""

    follow: Callable[[ExecutorContext], Follower] | None = None
    """Builds what has the ranks of another node (``--nnodes``, ``--node-rank``); None: its engines are on one node, or
    it finds others by itself.
    """
    offline_only: str = ""
    """Why only ``LLM`` can use it, where that is so; ``serve`` refuses it with this reason."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorEntry(Entry["Communicator"]):
    """``build(CommunicatorContext) -> Communicator``."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayerEntry(Entry["ParallelLayer"]):
    """``build(ParallelLayerContext) -> ParallelLayer``; names are unique within a kind.

    Capability ``expert_parallel``, of a moe layer: each rank holds whole experts.
    """

    kind: LayerKind


@dataclass(frozen=True, kw_only=True)
class LoadBalancerEntry(Entry["LoadBalancer"]):
    """``build(LoadBalancerContext) -> LoadBalancer``. Capability ``load_aware``: keeps away from busy engines."""


@dataclass(frozen=True, kw_only=True)
class LinearMethodEntry(Entry["LinearMethod"]):
    """``build(ComputeContext) -> LinearMethod``."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackendEntry(Entry["AttentionBackend"]):
    """``build(AttentionContext) -> AttentionBackend``."""


@dataclass(frozen=True, kw_only=True)
class OperatorsEntry(Entry["Operators"]):
    """``build(ComputeContext) -> Operators``."""


@dataclass(frozen=True, kw_only=True)
class AllToAllEntry(Entry["AllToAll"]):
    """``build(AllToAllContext) -> AllToAll``, on all ranks of an EP group at once."""


@dataclass(frozen=True, kw_only=True)
class ExpertsEntry(Entry["Experts"]):
    """``build(ExpertsContext) -> Experts``, once a layer; raises Unsupported for sizes or dtypes that it cannot do."""


@dataclass(frozen=True, kw_only=True)
class ExpertPlacementEntry(Entry["ExpertPlacement"]):
    """``build(None) -> ExpertPlacement``."""


@dataclass(frozen=True, kw_only=True)
class RebalancerEntry(Entry["Rebalancer"]):
    """``build(fourfold.contracts.mixture.RebalancerContext) -> Rebalancer``."""


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry[Any]):
    """``build(config.json as dict) -> fourfold.models.description.ModelDescription``; ``name`` is the family's."""

    architectures: tuple[str, ...]
    """Values of ``architectures`` in config.json that this entry reads."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFormatEntry(Entry["CheckpointFormat"]):
    """``build(CheckpointContext) -> CheckpointFormat``."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSourceEntry(Entry["CheckpointSource"]):
    """``build(CheckpointContext) -> CheckpointSource``; asked in order of ``order``, then name."""

    order: int = 50


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry(Entry["Tokenizer"]):
    """``build(TokenizerContext) -> Tokenizer``."""


@dataclass(frozen=True, kw_only=True)
class SchedulerEntry(Entry["SchedulingPolicy"]):
    """``build(SchedulerContext) -> SchedulingPolicy``."""


@dataclass(frozen=True, kw_only=True)
class ToolParserEntry(Entry[Any]):
    """Finds tool calls in generated text; ``build(None)`` returns the parser."""


@dataclass(frozen=True, kw_only=True)
class ReasoningParserEntry(Entry[Any]):
    """Separates reasoning from the answer; ``build(None)`` returns the parser."""


@dataclass(frozen=True, kw_only=True)
class RoutesEntry(Entry[Any]):
    """``build(application state) -> fastapi.APIRouter``, mounted by the API server."""
