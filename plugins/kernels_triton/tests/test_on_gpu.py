"""On a CUDA device: the conformance suites, real shapes, and recorded steps beside plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionSpec
from fourfold.contracts.step_graph import StepRecorder
from fourfold.entries import AttentionContext, ComputeContext, ExpertsContext
from fourfold.errors import Unsupported
from fourfold.layers.grouped_experts import GroupedExperts
from fourfold.layers.torch_operators import TorchOperators
from fourfold.testing.attention import BLOCK_SIZE, SPECS, AttentionConformance
from fourfold.testing.experts import ExpertsConformance
from fourfold.testing.linear_method import LinearMethodConformance, assert_near
from fourfold.testing.operators import OperatorsConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
]
QWEN = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.09, rotary_dim=128)
LLAMA = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.125, rotary_dim=64)
GEMMA = AttentionSpec(
    num_heads=8, num_kv_heads=4, head_dim=256, scale=0.06, rotary_dim=256, sliding_window=1000, soft_cap=50.0
)
ODD = AttentionSpec(num_heads=10, num_kv_heads=2, head_dim=80, scale=0.11, rotary_dim=80, group_sizes=(7, 3))
DEVICE = torch.device("cuda")


def operators(dtype=torch.bfloat16):
    from fourfold_kernels_triton.graph_operators import GraphOperators

    return GraphOperators(ComputeContext(config=EngineConfig(), device=DEVICE, dtype=dtype))


class Suite(AttentionConformance):
    name = "triton"
    device = "cuda"


# A class for each kernel to compile, so that several processes may share them.
for _dtype in ("float32", "float16", "bfloat16"):
    for _index, _spec in enumerate((*SPECS, ODD)):
        _name = f"TestAttention_{_dtype}_{_index}"
        vars()[_name] = type(_name, (Suite,), {"dtypes": (_dtype,), "specs": (_spec,)})


class TestOperators(OperatorsConformance):
    name = "triton"
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")


class TestLinearMethod(LinearMethodConformance):
    name = "triton"
    device = "cuda"
    dtypes = ("float32", "bfloat16")


class TestExperts(ExpertsConformance):
    name = "triton"
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("rows", [1, 5, 64, 300, 3000])
def test_experts_agree_with_grouped_products_and_can_be_recorded(rows):
    """At real sizes; some choices are of experts elsewhere."""
    from fourfold_kernels_triton.experts import TritonExperts

    torch.manual_seed(0)
    context = ExpertsContext(
        config=EngineConfig(),
        device=DEVICE,
        dtype=torch.bfloat16,
        num_experts=32,
        hidden_size=1024,
        intermediate_size=512,
        activation="silu",
        operators=operators(),
    )
    built = [kind(context) for kind in (GroupedExperts, TritonExperts)]
    for expert in range(32):
        for part, shape in (("gate", (512, 1024)), ("up", (512, 1024)), ("down", (1024, 512))):
            matrix = 0.02 * torch.randn(shape)
            for one in built:
                one.load(expert, part, matrix)
    x = torch.randn(rows, 1024, device=DEVICE).bfloat16()
    ids = torch.rand(rows, 32, device=DEVICE).argsort(1)[:, :4].int()
    ids[torch.rand(ids.shape, device=DEVICE) < 0.2] = -1
    weights = torch.rand(rows, 4, device=DEVICE)
    expected, found = (one(x, ids, weights).float() for one in built)
    assert (found - expected).norm() / expected.norm() < 0.01
    recorded = operators().capture(lambda: built[1](x, ids, weights).float())
    assert torch.equal(recorded.replay(), found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [QWEN, LLAMA, GEMMA], ids=["qwen", "llama", "gemma"])
@pytest.mark.parametrize("new", [(1, 1, 1, 1, 1), (300, 1, 129, 1, 700)], ids=["decodes", "mixed"])
def test_long_contexts(dtype, spec, new):
    """Against the twin in float32 over the same cache, whose layout differs."""
    from fourfold_kernels_triton.attention import TritonAttention

    torch.manual_seed(0)
    suite = Suite()
    kept = getattr(torch, dtype)
    old = (0, 1, 700, 2900, 3333)
    batch = tuple(zip(old, new))
    blocks = [-(-(o + n) // BLOCK_SIZE) for o, n in batch]
    order = (1 + torch.randperm(sum(blocks))).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    metadata = suite.metadata(batch, tables)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    rows = torch.randn(sum(new), width, device=DEVICE).to(kept)
    positions = torch.cat([torch.arange(o, o + n) for o, n in batch]).to(DEVICE)
    turns = torch.randn(4096, spec.rotary_dim // 2, device=DEVICE)
    cos_sin = torch.cat([turns.cos(), turns.sin()], dim=1)
    backend = TritonAttention(replace(suite.context(dtype, spec), dtype=kept))
    cache = torch.randn(backend.kv_cache_shape(sum(blocks) + 1, BLOCK_SIZE), device=DEVICE).to(kept)
    twin = suite.twin(spec)
    twin_cache = cache.float().permute(2, 0, 3, 1, 4).contiguous()
    found = backend.rotate_and_attend(rows.clone(), positions, cos_sin, cache, metadata)
    expected = twin.rotate_and_attend(rows.float(), positions, cos_sin, twin_cache, metadata)
    assert_near(found, expected, dtype, kept)
    assert_near(cache.permute(2, 0, 3, 1, 4), twin_cache, dtype, kept)


def test_draws_are_those_of_the_cpu():
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 151936)
    temperature = torch.rand(64) * 2
    temperature[::5] = 0
    seeds, positions = torch.randint(2**63 - 1, (64,)), torch.randint(100_000, (64,))
    twin = TorchOperators(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))
    expected = twin.gumbel_argmax(logits, temperature, seeds, positions)
    found = operators().gumbel_argmax(*(one.to(DEVICE) for one in (logits, temperature, seeds, positions)))
    assert torch.equal(found.cpu(), expected)


def test_recorded_steps_read_their_inputs_anew():
    """Two sizes share memory, splits and counters; replays in turn give what plain calls give."""
    from fourfold_kernels_triton.attention import TritonAttention

    torch.manual_seed(0)
    suite, recorder = Suite(), operators()
    assert isinstance(recorder, StepRecorder)
    context = AttentionContext(config=EngineConfig(), device=DEVICE, dtype=torch.bfloat16, spec=QWEN)
    backend = TritonAttention(context)
    cache = torch.randn(backend.kv_cache_shape(600, BLOCK_SIZE), device=DEVICE).bfloat16()
    turns = torch.randn(4096, 64, device=DEVICE)
    cos_sin = torch.cat([turns.cos(), turns.sin()], dim=1)
    weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    steps = {}
    for size in (4, 2):
        metadata = suite.metadata(((0, 1),) * size, [list(range(1 + 140 * i, 141 + 140 * i)) for i in range(size)])
        metadata.max_sequence_length = 2240
        qkv = torch.randn(size, 4096, device=DEVICE).bfloat16()
        positions = torch.zeros(size, dtype=torch.int64, device=DEVICE)

        def step(qkv=qkv, positions=positions, metadata=metadata):
            normed = recorder.rms_norm(qkv, weight, 1e-6)
            return backend.rotate_and_attend(normed, positions, cos_sin, cache, metadata).float()

        steps[size] = (recorder.capture(step), step, qkv, positions, metadata)
    for lengths in ([1, 1, 1, 1], [2200, 3, 700, 129], [17, 2000, 1, 1]):
        for size in (2, 4, 2):
            graph, step, qkv, positions, metadata = steps[size]
            qkv.copy_(torch.randn(size, 4096))
            metadata.sequence_lengths.copy_(torch.tensor(lengths[:size]))
            positions.copy_(torch.tensor(lengths[:size]) - 1)
            metadata.slot_mapping.copy_(
                metadata.block_table[torch.arange(size), (positions // BLOCK_SIZE)].long() * BLOCK_SIZE
                + positions % BLOCK_SIZE
            )
            found = graph.replay().clone()
            torch.testing.assert_close(found, step(), rtol=0, atol=0.02)
    for graph, *_ in steps.values():
        graph.close()
        graph.close()
    with pytest.raises(ValueError, match="closed"):
        graph.replay()


def test_a_step_that_waits_cannot_be_recorded():
    recorder = operators()
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(Unsupported, match="cannot be recorded"):
        recorder.capture(lambda: x * float(x.sum()))
    assert recorder.capture(lambda: x + 1).replay().tolist() == [2.0] * 4


def test_what_is_compiled_ahead_is_what_runs():
    """Nothing is left to compile when a decode and a prompt run for the first time."""
    from fourfold_kernels_triton.attention import TritonAttention
    from fourfold_kernels_triton.kernels import cache_write, decode, prefill
    from fourfold_kernels_triton.launch import settle

    torch.manual_seed(0)
    suite = Suite()
    kernels = (cache_write.write_cache, decode.attend_decodes, prefill.attend_prompts)

    def compiled():
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    spec = replace(QWEN, num_heads=24)  # of no other test
    backend = TritonAttention(suite.context("bfloat16", spec))
    for kernel in kernels:
        settle(kernel)
    before = compiled()
    cos_sin = torch.rand(4096, 128, device=DEVICE)
    cache = torch.zeros(backend.kv_cache_shape(9, BLOCK_SIZE), device=DEVICE, dtype=torch.bfloat16)
    for batch, tables in ((((5, 1),), [[1]]), (((5, 1), (0, 9)), [[1], [2]])):
        metadata = suite.metadata(batch, tables)
        metadata.max_sequence_length = 2240
        rows = torch.randn(sum(new for _, new in batch), 40 * 128)
        suite.run(backend, rows, "bfloat16", batch, cache=cache, metadata=metadata, cos_sin=cos_sin)
    assert compiled() == before


def test_sizes_to_record():
    assert list(operators().batch_sizes(20)) == [1, 2, 4, 8, 16, 20]
    sizes = list(operators().batch_sizes(1000))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 512
