"""What this distribution offers. A table of contents: torch and the kernels are loaded when something is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.entries import AttentionBackendEntry, LinearMethodEntry, OperatorsEntry, Suitability
from fourfold.markers import hookimpl
from fourfold_kernels_cpu.cpu_support import unsupported_reason

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.attention_backend import AttentionBackend
    from fourfold.contracts.linear_method import LinearMethod
    from fourfold.contracts.operators import Operators
    from fourfold.entries import AttentionContext, ComputeContext

FOURFOLD_CONTRACT = ">=1.0,<2"


@hookimpl
def fourfold_linear_methods() -> list[LinearMethodEntry]:
    """Offer ``packed_bf16``."""
    return [
        LinearMethodEntry(
            name="packed_bf16", build=_build_linear, summary="weights packed once for avx512_bf16", suits=_suits
        )
    ]


@hookimpl
def fourfold_attention_backends() -> list[AttentionBackendEntry]:
    """Offer ``avx512``."""
    return [
        AttentionBackendEntry(
            name="avx512",
            build=_build_attention,
            summary="rotary, cache write and paged attention in C++",
            suits=_suits_attention,
        )
    ]


@hookimpl
def fourfold_operators() -> list[OperatorsEntry]:
    """Offer ``avx512``."""
    return [
        OperatorsEntry(
            name="avx512",
            build=_build_operators,
            summary="norms, activations and sampling in C++; records decode steps",
            suits=_suits,
        )
    ]


def _build_linear(context: ComputeContext) -> LinearMethod:
    from fourfold_kernels_cpu.packed_linear import PackedLinearMethod

    return PackedLinearMethod(context)


def _build_attention(context: AttentionContext) -> AttentionBackend:
    from fourfold_kernels_cpu.attention import Avx512Attention

    return Avx512Attention(context)


def _build_operators(context: ComputeContext) -> Operators:
    from fourfold_kernels_cpu.recording_operators import RecordingOperators

    return RecordingOperators(context)


def _suits(config: EngineConfig) -> Suitability:
    from fourfold.config.resolution import accelerator

    if config.model.dtype not in ("auto", "bfloat16"):
        return Suitability(score=0, reason=f"computes in bfloat16, not {config.model.dtype}; use --dtype bfloat16")
    if accelerator() != "cpu":
        return Suitability(score=0, reason=f"runs on a cpu, and this host has a {accelerator()} device")
    missing = unsupported_reason()
    if missing is not None:
        return Suitability(score=0, reason=missing)
    return Suitability(score=50, reason="this cpu has avx512_bf16, and there is a compiler")


def _suits_attention(config: EngineConfig) -> Suitability:
    block_size = config.cache.block_size
    if block_size % 16:
        return Suitability(
            score=0, reason=f"needs blocks of a multiple of 16 tokens, not {block_size}; use --block-size 16"
        )
    return _suits(config)
