"""What this distribution offers. A table of contents: torch and triton are loaded when something is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import AttentionBackendEntry, ExpertsEntry, LinearMethodEntry, OperatorsEntry, Suitability
from fourfold.markers import hookimpl
from fourfold_kernels_triton import gpu_support

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.attention_backend import AttentionBackend
    from fourfold.contracts.linear_method import LinearMethod
    from fourfold.contracts.mixture import Experts
    from fourfold.contracts.operators import Operators
    from fourfold.entries import AttentionContext, ComputeContext, ExpertsContext

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_linear_methods() -> list[LinearMethodEntry]:
    """Offer ``triton``."""
    return [
        LinearMethodEntry(
            name="triton",
            build=_build_linear,
            summary="torch.nn.functional, but a kernel of its own for one row",
            suits=_suits,
        )
    ]


@hookimpl
def fourfold_attention_backends() -> list[AttentionBackendEntry]:
    """Offer ``triton``."""
    return [
        AttentionBackendEntry(
            name="triton",
            build=_build_attention,
            summary="head norms, rotary, cache write and paged attention; one kernel for a decode step",
            capabilities=frozenset({"fp8_cache", "latent_heads"}),
            suits=_suits,
        )
    ]


@hookimpl
def fourfold_operators() -> list[OperatorsEntry]:
    """Offer ``triton``."""
    return [
        OperatorsEntry(
            name="triton",
            build=_build_operators,
            summary="norms, activations and sampling without a wait; records decode steps as CUDA graphs",
            suits=_suits,
        )
    ]


@hookimpl
def fourfold_experts() -> list[ExpertsEntry]:
    """Offer ``triton``."""
    return [
        ExpertsEntry(
            name="triton",
            build=_build_experts,
            summary="weights are read once for few rows; torch's grouped products for many",
            suits=_suits,
        )
    ]


def _build_linear(context: ComputeContext) -> LinearMethod:
    from fourfold_kernels_triton.linear import TritonLinearMethod

    return TritonLinearMethod(context)


def _build_attention(context: AttentionContext) -> AttentionBackend:
    from fourfold_kernels_triton.attention import TritonAttention

    return TritonAttention(context)


def _build_experts(context: ExpertsContext) -> Experts:
    from fourfold_kernels_triton.experts import TritonExperts

    return TritonExperts(context)


def _build_operators(context: ComputeContext) -> Operators:
    from fourfold_kernels_triton.graph_operators import GraphOperators

    return GraphOperators(context)


def _suits(config: EngineConfig) -> Suitability:
    missing = gpu_support.unsupported_reason()
    if missing is not None:
        return Suitability(score=0, reason=missing)
    return Suitability(score=50, reason="this host has a cuda device, and triton is installed")
