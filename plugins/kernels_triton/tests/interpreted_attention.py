"""Run by test_interpreted: attention against core's torch twin. The interpreter has no products of bfloat16."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionSpec, HeadNorming
from fourfold.entries import ComputeContext
from fourfold.errors import Unsupported
from fourfold.layers.torch_operators import TorchOperators
from fourfold.testing.attention import AttentionConformance
from fourfold.testing.linear_method import assert_near
from fourfold_kernels_triton import attention, gpu_support
from fourfold_kernels_triton.attention import TritonAttention
from fourfold_kernels_triton.tiles import Tile

LONG = ((127, 1), (0, 1), (65, 1), (40, 1))
MIXED = ((100, 3), (127, 1), (0, 2))
WIDE = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=256, scale=0.06, rotary_dim=256)
ODD = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=80, scale=0.11, rotary_dim=32, soft_cap=20.0)
WINDOWED = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25, sliding_window=70, rotary_dim=16)


interpreted_conversion = interpreter._convert_float


def convert_float(values, source, target, rounding):
    """The interpreter's, but for e4m3, where it forgets to carry what it rounds up into the exponent."""
    if (source, target) == (tl.float32, tl.float8e4nv):
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return interpreted_conversion(values, source, target, rounding)


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_support, "unsupported_reason", lambda: None)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


class Suite(AttentionConformance):
    name = "triton"
    dtypes = ("float32", "float16")


class TestConformance(Suite):
    pass


@pytest.fixture
def suite(monkeypatch):
    # Small tiles and a device to fill, so that short contexts are cut.
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(attention, "decode_tile", lambda dim, **kinds: Tile(rows=1, tokens=16, warps=4, stages=2))
    monkeypatch.setattr(attention, "prefill_tile", lambda dim, **kinds: Tile(rows=16, tokens=16, warps=4, stages=2))
    return Suite()


@pytest.fixture
def entry(suite):
    from fourfold.plugins import load_plugins

    return load_plugins().attention_backends()["triton"]


@pytest.mark.parametrize("spec", [WIDE, ODD, WINDOWED], ids=["wide", "odd", "windowed"])
@pytest.mark.parametrize("batch", [LONG, MIXED], ids=["decodes", "mixed"])
def test_long_contexts_are_cut_and_combined(suite, entry, spec, batch):
    suite.check(entry, "float32", spec, batch)


@pytest.mark.parametrize("batch", [((37, 1), (3, 1)), ((37, 3), (3, 1))], ids=["decodes", "mixed"])
def test_heads_are_normed_on_the_way(suite, batch):
    """As if both norms had gone over the rows before."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, rotary_dim=16)
    backend, twin = TritonAttention(suite.context("float32", spec)), suite.twin(spec)
    assert isinstance(backend, HeadNorming)
    weights = torch.randn(2, 32)
    backend.norm_heads(weights[0], weights[1], 1e-6, weight_offset=1.0)
    operators = TorchOperators(ComputeContext(config=EngineConfig(), device=torch.device("cpu"), dtype=torch.float32))
    turns = torch.randn(128, 8)
    cos_sin = torch.cat([turns.cos(), turns.sin()], dim=1)
    tables, outputs = [[3, 1, 5], [2, 4]], []
    rows = torch.randn(sum(old + new for old, new in batch), 8 * 32)
    for one in (backend, twin):
        own = rows.clone()
        if one is twin:
            for first, count, weight in ((0, 4, weights[0]), (4, 2, weights[1])):
                operators.head_rms_norm(
                    own, weight, 1e-6, first_head=first, num_heads=count, head_dim=32, weight_offset=1.0
                )
        cache = torch.full(one.kv_cache_shape(6, 16), float("nan"))
        start, new_rows = 0, []
        for sequence, (old, new) in enumerate(batch):
            first = suite.metadata(((0, old),), [tables[sequence]])
            suite.run(
                one, own[start : start + old], "float32", ((0, old),), cache=cache, metadata=first, cos_sin=cos_sin
            )
            new_rows.append(own[start + old : start + old + new])
            start += old + new
        metadata = suite.metadata(batch, tables)
        outputs.append(
            suite.run(one, torch.cat(new_rows), "float32", batch, cache=cache, metadata=metadata, cos_sin=cos_sin)
        )
    assert_near(outputs[0], outputs[1], "float32", torch.float32)


def test_the_rows_are_left_alone(suite):
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.2, rotary_dim=16)
    backend = TritonAttention(suite.context("float32", spec))
    cos_sin = torch.rand(128, 16)
    cache = torch.zeros(backend.kv_cache_shape(4, 16))
    qkv = torch.randn(5, 64)
    before = qkv.clone()
    backend.rotate_and_attend(qkv, torch.arange(5), cos_sin, cache, suite.metadata(((0, 5),), [[1]]))
    assert torch.equal(qkv, before)


def test_a_padding_row_writes_nothing_and_gives_numbers(suite):
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.2, rotary_dim=16)
    backend = TritonAttention(suite.context("float32", spec))
    cache = torch.full(backend.kv_cache_shape(4, 16), float("nan"))
    metadata = suite.metadata(((0, 1), (0, 1)), [[0], [0]])
    metadata.slot_mapping.fill_(-1)
    out = backend.rotate_and_attend(torch.randn(2, 64), torch.zeros(2, dtype=torch.int64), None, cache, metadata)
    assert bool(out.isfinite().all())
    assert bool(cache.isnan().all())


def test_refuses_what_it_cannot_do(suite):
    for fields, reason in (
        ({"head_dim": 512}, "heads of up to 256, not 512"),
        ({"num_heads": 65}, "up to 64 query heads, not 65"),
        ({"rotary_dim": 130}, "a head of 128 cannot rotate 130 dimensions"),
    ):
        spec = AttentionSpec(**({"num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "scale": 1.0} | fields))
        with pytest.raises(Unsupported, match=reason):
            TritonAttention(suite.context("float32", spec))
