"""What the kernels compute, rank by rank on the CPU, and what they are compiled to for a Hopper device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold_comm_nccl import all_reduce_kernels, norm_kernels, rows_kernels
from fourfold_comm_nccl.region import MAX_PROGRAMS, Region
from fourfold_comm_nccl.rows_region import RowsRegion

TOP_K = 8


def ptx(kernel: Any, world: int, dtype: str, **constants: int) -> str:
    region = Region(world_size=world)
    known = {
        "region": RowsRegion(world_size=world, max_tokens=1024, top_k=TOP_K, row_bytes=4096),
        "world": world,
        "max_programs": MAX_PROGRAMS,
        "slots_at": region.slots_at,
        "slot_bytes": region.slot_bytes,
        "part_bytes": region.part_bytes,
        "results_at": region.results_at,
        **constants,
    }
    pointers = {"table": "*i64", "sequence": "*i32", "weights": "*fp32"}
    pointers |= dict.fromkeys(("tensor", "residual", "weight", "out", "x", "partial"), f"*{dtype}")
    pointers |= dict.fromkeys(("ids", "owners", "receivers"), "*i32")
    numbers = {"rank": "i32", "vectors": "i32", "rows": "i32", "epsilon": "fp32"}
    numbers |= dict.fromkeys(("first", "count", "items"), "i32")
    kinds = {
        name: "constexpr" if name in constants else (pointers | numbers).get(name, "constexpr")
        for name in kernel.arg_names
    }
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kinds) if name in pointers}
    values = {name: known[name] for name, kind in kinds.items() if kind == "constexpr"}
    source = ASTSource(kernel, kinds, constexprs=values, attrs=aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's own, about defaults of its next version
        options = {"num_warps": 8, "enable_fp_fusion": True}
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("program", ["one_by_one.py", "rows_one_by_one.py"])
def test_numbers_are_right_on_every_rank(program: str) -> None:
    command = [sys.executable, str(Path(__file__).parent / program)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert answer.stdout == "done\n", answer.stdout + answer.stderr


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "kernel",
    [all_reduce_kernels.one_shot_all_reduce, all_reduce_kernels.two_shot_all_reduce, norm_kernels.one_shot_add_norm],
    ids=lambda kernel: kernel.__name__,
)
def test_plain_data_moves_in_whole_vectors(kernel: Any, dtype: str, world: int) -> None:
    text = ptx(kernel, world, dtype, block=4096, width=4096)
    loads, stores = re.findall(r"ld\.global\.\S+", text), re.findall(r"st\.global\.\S+", text)
    narrow = [one for one in loads + stores if ".v4." not in one]
    # Counters, addresses and the rest of a vector of peers; all data, once a peer, is wide.
    assert {one.split(".")[-1] for one in narrow} <= {"b32", "b64"}
    assert sum(".v4." in one for one in loads) >= world + 1
    assert len(narrow) < 24 + 2 * world
    assert ".local" not in text


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "kernel", [rows_kernels.dispatch_rows, rows_kernels.combine_rows], ids=lambda one: one.__name__
)
def test_rows_move_in_whole_vectors(kernel: Any, rows: int, world: int) -> None:
    text = ptx(kernel, world, "bf16", hidden=2048, choices=TOP_K, rows=rows, block=2048, moves=True)
    loads, stores = re.findall(r"ld\.global\.\S+", text), re.findall(r"st\.global\.\S+", text)
    wide_loads, wide_stores = (sum(".v4." in one for one in kind) for kind in (loads, stores))
    # A vector a thread and row: read once and written to each rank, or read from each and written to each.
    sends = kernel is rows_kernels.dispatch_rows
    assert wide_loads >= rows * (1 if sends else 2 * world)
    assert wide_stores >= rows * (world if sends else world + 1)
    assert ".local" not in text


def test_signals_are_ordered_for_the_whole_host() -> None:
    text = ptx(all_reduce_kernels.one_shot_all_reduce, 2, "bf16", block=4096)
    released = text.index("st.release.sys")
    acquired = text.index("ld.acquire.sys")
    barriers = [match.start() for match in re.finditer(r"bar\.sync", text)]
    assert any(at < released for at in barriers)
    assert any(at > acquired for at in barriers)
    assert released < acquired
