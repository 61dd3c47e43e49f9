"""Every kernel and its main specialisations compile for sm_90, with the instructions that make them fast."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.config.cache_config import CacheConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionContext, ComputeContext, ExpertsContext
from fourfold_kernels_triton import attention, experts, linear, operators

sys.path.insert(0, str(Path(__file__).parent))
from compilation import Launches

META = torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.09, rotary_dim=128)
LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125, rotary_dim=64)
GEMMA = AttentionSpec(
    num_heads=8, num_kv_heads=4, head_dim=256, scale=0.06, rotary_dim=256, sliding_window=4096, soft_cap=50.0
)
UNEVEN = AttentionSpec(num_heads=5, num_kv_heads=2, head_dim=80, scale=0.11, rotary_dim=80, group_sizes=(3, 2))


@pytest.fixture
def launches(monkeypatch):
    noted = Launches()
    for module in (attention, experts, linear, operators):
        monkeypatch.setattr(module, "launch", noted)
        monkeypatch.setattr(module, "starts_early", lambda device: True)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    return noted


def attend(dtype, spec, counts, *, norm=False, cache="auto"):
    """One call on ``counts`` new tokens a sequence, with room for 40,960 tokens each."""
    config = EngineConfig(cache=CacheConfig(kv_cache_dtype=cache))
    context = AttentionContext(config=config, device=META, dtype=dtype, spec=spec)
    backend = attention.TritonAttention(context)
    if norm:
        weight = torch.empty(spec.head_dim, dtype=dtype, device=META)
        backend.norm_heads(weight, weight, 1e-6)
    tokens, sequences = sum(counts), len(counts)
    starts = [sum(counts[:index]) for index in range(sequences + 1)]
    metadata = AttentionMetadata(
        query_start=torch.empty(sequences + 1, dtype=torch.int32, device=META),
        sequence_lengths=torch.empty(sequences, dtype=torch.int32, device=META),
        block_table=torch.empty(sequences, 2560, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(tokens, dtype=torch.int64, device=META),
        max_query_length=max(counts),
        max_sequence_length=40960,
        query_start_list=starts,
        sequence_lengths_list=[40960] * sequences,
    )
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    backend.rotate_and_attend(
        torch.empty(tokens, width, dtype=dtype, device=META),
        torch.empty(tokens, dtype=torch.int64, device=META),
        torch.empty(40960, spec.rotary_dim, dtype=FP32, device=META),
        torch.empty(backend.kv_cache_shape(100, 16), dtype=context.cache_dtype, device=META),
        metadata,
    )


def test_attention(launches):
    attend(BF16, QWEN, (100, 1), norm=True)
    attend(BF16, LLAMA, (100, 1))
    attend(BF16, GEMMA, (100, 1))
    attend(FP16, UNEVEN, (100, 1))
    attend(FP32, LLAMA, (100, 1))
    attend(BF16, QWEN, (100, 1), norm=True, cache="fp8")
    compiled = launches.compile()
    assert len(compiled) == 18
    for launch, kernel in compiled:
        name, ptx = launch.kernel.__name__, kernel.asm["ptx"]
        if name == "write_cache" or "*fp32" in dict(launch.signature)["qkv_ptr"]:
            continue
        constants = dict(launch.constants)
        assert "ld.local" not in ptx, f"{name} {constants} spills"
        if constants["SHAPE"].head_dim == constants["SHAPE"].padded_dim:
            assert re.search(r"cp\.async\.cg[^\n]*0x10", ptx), f"{name} {constants} does not copy 16 bytes at a time"
        assert ("wgmma" if name == "attend_prompts" else "mma.sync") in ptx


def test_what_is_compiled_ahead_is_what_steps_start(launches, monkeypatch):
    monkeypatch.setattr(attention, "compile_instead", lambda device: launches)
    monkeypatch.setattr(operators, "compile_instead", lambda device: launches)
    monkeypatch.setattr(linear, "compile_instead", lambda device: launches)
    cuda = torch.device("cuda")
    compute = ComputeContext(config=EngineConfig(), device=META, dtype=BF16)
    built = operators.TritonOperators(compute)
    built._device = cuda
    built.expect(hidden_size=1024, intermediate_size=3072, activation="silu")
    built._compile(operators._sample)
    method = linear.TritonLinearMethod(compute)
    projection = method.create(1024, 4096, bias=False, dtype=BF16)
    method._device = cuda
    method._compile(projection)
    for norm in (False, True):
        context = AttentionContext(config=EngineConfig(), device=META, dtype=BF16, spec=QWEN)
        backend = attention.TritonAttention(context)
        backend._context = replace(context, device=cuda)
        if norm:
            weight = torch.empty(128, dtype=BF16, device=META)
            backend.norm_heads(weight, weight, 1e-6)
        backend._compile()
    ahead, launches.noted = launches.noted, []
    for norm in (False, True):
        attend(BF16, QWEN, (1,) * 32, norm=norm)
        attend(BF16, QWEN, (100, 1), norm=norm)
    numbers = torch.empty(3, dtype=torch.int64, device=META)
    built = operators.TritonOperators(compute)
    x = torch.empty(7, 1024, dtype=BF16, device=META)
    built.rms_norm(x, x[0], 1e-6)
    built.add_rms_norm(x, x, x[0], 1e-6)
    built.gated(torch.empty(7, 6144, dtype=BF16, device=META), "silu")
    method.apply(projection, x[:1])
    logits = torch.empty(3, 151936, device=META)
    built.draw(logits, torch.empty(3, device=META), numbers, numbers)
    built.argmax(logits)
    assert set(launches.noted) == set(ahead)


def test_operators(launches):
    for dtype in (BF16, FP32):
        built = operators.TritonOperators(ComputeContext(config=EngineConfig(), device=META, dtype=dtype))
        x, weight = torch.empty(3, 1024, dtype=dtype, device=META), torch.empty(1024, dtype=dtype, device=META)
        built.rms_norm(x, weight, 1e-6)
        built.add_rms_norm(x, x, weight, 1e-6)
        built.head_rms_norm(x, weight, 1e-6, first_head=0, num_heads=4, head_dim=128)
        for activation in ("silu", "gelu", "gelu_tanh"):
            built.gated(x, activation)
    logits = torch.empty(3, 151936, device=META)
    numbers = torch.empty(3, dtype=torch.int64, device=META)
    built.soft_cap(logits, 30.0)
    built.argmax(logits)
    built.gumbel_argmax(logits, torch.empty(3, device=META), numbers, numbers)
    built.log_normalizer(logits)
    compiled = launches.compile()
    assert len(compiled) == 16
    for launch, kernel in compiled:
        name, ptx = launch.kernel.__name__, kernel.asm["ptx"]
        assert "ld.local" not in ptx, f"{name} spills"
        wide = "[24]" if name == "head_rms_norm_rows" else "4"  # four heads are too few for 16 bytes a thread
        assert re.search(rf"ld\.global[.\w]*\.v{wide}", ptx), f"{name} does not read 16 bytes at a time"


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_experts(launches, dtype):
    context = ExpertsContext(
        config=EngineConfig(),
        device=META,
        dtype=dtype,
        num_experts=128,
        hidden_size=2048,
        intermediate_size=768,
        activation="silu",
        operators=operators.TritonOperators(ComputeContext(config=EngineConfig(), device=META, dtype=dtype)),
    )
    built = experts.TritonExperts(context)
    for rows in (1, 700):
        ids = torch.empty(rows, 8, dtype=torch.int32, device=META)
        x = torch.empty(rows, 2048, dtype=dtype, device=META)
        built(x, ids, torch.empty(rows, 8, device=META))
    built._gather(x, torch.empty(ids.numel(), dtype=torch.int64, device=META), 8)
    compiled = launches.compile()
    assert [launch.kernel.__name__ for launch, _ in compiled].count("multiply_pairs") == 4
    for launch, kernel in compiled:
        ptx = kernel.asm["ptx"]
        assert "ld.local" not in ptx, f"{launch.kernel.__name__} spills"
        if launch.kernel.__name__ == "multiply_pairs":
            assert re.search(r"cp\.async\.cg[^\n]*0x10", ptx)


def test_linear(launches):
    built = linear.TritonLinearMethod(ComputeContext(config=EngineConfig(), device=META, dtype=BF16))
    for in_features, out_features, bias in ((1024, 4096, False), (3072, 1024, True)):
        weight = built.create(in_features, out_features, bias=bias, dtype=BF16)
        built.apply(weight, torch.empty(1, in_features, dtype=BF16, device=META))
    built.apply(weight, torch.empty(1, 3072, dtype=BF16, device=META), out_dtype=FP32)
    compiled = launches.compile()
    assert len(compiled) == 3
    for _, kernel in compiled:
        ptx = kernel.asm["ptx"]
        assert "ld.local" not in ptx
        assert re.search(r"ld\.global[.\w]*\.v4", ptx)
        # Weights are on their way before the kernel waits for the one before.
        assert ptx.index("ld.global") < ptx.index("griddepcontrol.wait")
