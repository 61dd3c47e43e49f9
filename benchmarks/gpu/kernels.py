"""Times each Triton kernel in a CUDA graph against its floor: bytes at the device's own copy rate.

    python benchmarks/gpu/kernels.py [--only attention,layer,...]

Ratios are floor / time, 1.0 is the floor. Inputs rotate, so that nothing stays in the cache between calls.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionContext, ComputeContext
from fourfold.layers.torch_linear import TorchLinearMethod
from fourfold_kernels_triton import tiles
from fourfold_kernels_triton.attention import TritonAttention
from fourfold_kernels_triton.graph_operators import GraphOperators
from fourfold_kernels_triton.linear import TritonLinearMethod

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = {
    "qwen3-0.6b": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "kv": 8, "dim": 128, "vocab": 151936},
    "llama-3.2-1b": {"hidden": 2048, "inner": 8192, "layers": 16, "heads": 32, "kv": 8, "dim": 64, "vocab": 128256},
    "qwen3-8b": {"hidden": 4096, "inner": 12288, "layers": 36, "heads": 32, "kv": 8, "dim": 128, "vocab": 151936},
}
COMPUTE = ComputeContext(config=EngineConfig(), device=DEVICE, dtype=BF16)


class Table:
    """Cases first, so that their kernels compile in parallel; then times."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, list[Callable[[], object]], float]] = []
        self.copy_rate = 0.0

    def add(self, name: str, calls: list[Callable[[], object]], floor: float) -> None:
        """``calls`` are rotated; ``floor`` is bytes, or seconds if below 1."""
        self.cases.append((name, calls, floor))

    def run(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            for (name, _, _), future in [(c, pool.submit(in_thread, c[1][0])) for c in self.cases]:
                try:
                    future.result()
                except Exception as error:
                    print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        self.copy_rate = copy_rate()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {self.copy_rate / 1e12:.2f} TB/s")
        print(f"{'case':58} {'us':>9} {'floor us':>9} {'ratio':>6}")
        for name, calls, floor in self.cases:
            try:
                seconds = timed(calls)
            except Exception as error:
                print(f"{name:58} {type(error).__name__}: {str(error)[:200]}")
                continue
            least = floor if floor < 1 else floor / self.copy_rate
            print(f"{name:58} {seconds * 1e6:9.2f} {least * 1e6:9.2f} {least / seconds:6.2f}", flush=True)


def in_thread(call: Callable[[], object]) -> None:
    with torch.inference_mode():
        call()


def timed(calls: list[Callable[[], object]], *, repeats: int = 7) -> float:
    """Median seconds of one call, of replays of a graph of several."""
    number = max(len(calls), 8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in itertools.islice(itertools.cycle(calls), number):
            call()
        graph.capture_end()
        times = []
        for _ in range(repeats):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / number)
    return statistics.median(times[1:])


def copy_rate() -> float:
    source = torch.randn(1 << 30, device=DEVICE, dtype=BF16)
    target = torch.empty_like(source)
    return 4 * source.numel() / timed([lambda: torch.neg(source, out=target)])


class Attention:
    """A batch over caches of ``rotations`` layers."""

    def __init__(self, shape: dict, batch: list[tuple[int, int]], *, rotations: int, norm: bool = True) -> None:
        heads, kv, dim = shape["heads"], shape["kv"], shape["dim"]
        spec = AttentionSpec(num_heads=heads, num_kv_heads=kv, head_dim=dim, scale=dim**-0.5, rotary_dim=dim)
        context = AttentionContext(config=EngineConfig(), device=DEVICE, dtype=BF16, spec=spec)
        self.backend = TritonAttention(context)
        if norm:
            weight = torch.ones(dim, dtype=BF16, device=DEVICE)
            self.backend.norm_heads(weight, weight, 1e-6)
        blocks = [-(-(old + new) // 16) for old, new in batch]
        order = (1 + torch.randperm(sum(blocks))).int()
        table = torch.zeros(len(batch), 2560, dtype=torch.int32)
        for row, some in enumerate(torch.split(order, blocks)):
            table[row, : len(some)] = some
        starts = [0, *itertools.accumulate(new for _, new in batch)]
        positions = torch.cat([torch.arange(old, old + new) for old, new in batch])
        rows = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor([new for _, new in batch]))
        slots = table[rows, positions // 16].long() * 16 + positions % 16
        self.metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            sequence_lengths=torch.tensor([old + new for old, new in batch], dtype=torch.int32, device=DEVICE),
            block_table=table.to(DEVICE),
            slot_mapping=slots.to(DEVICE),
            max_query_length=max(new for _, new in batch),
            max_sequence_length=40960,
            query_start_list=starts,
            sequence_lengths_list=[40960] * len(batch),
        )
        self.positions = positions.to(DEVICE)
        self.cos_sin = torch.randn(40960, dim, device=DEVICE)
        self.qkv = torch.randn(starts[-1], (heads + 2 * kv) * dim, device=DEVICE).to(BF16)
        cache_shape = self.backend.kv_cache_shape(sum(blocks) + 1, 16)
        self.caches = [torch.randn(cache_shape, device=DEVICE, dtype=BF16) for _ in range(rotations)]
        self.cache_bytes = 4 * kv * dim * sum(old + new for old, new in batch)
        self.flops = 4 * heads * dim * sum(new * old + new * new / 2 for old, new in batch)

    def calls(self) -> list[Callable[[], object]]:
        return [lambda cache=cache: self.attend(self.qkv, cache) for cache in self.caches]

    def attend(self, qkv: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return self.backend.rotate_and_attend(qkv, self.positions, self.cos_sin, cache, self.metadata)


def attention_cases(table: Table) -> None:
    for name, shape in SHAPES.items():
        for size, length in ((1, 1024), (8, 1024), (32, 1024), (256, 800)):
            rotations = 1 if size >= 32 else 8
            one = Attention(shape, [(length - 1, 1)] * size, rotations=rotations)
            table.add(f"decode {name} batch {size} context {length}", one.calls(), one.cache_bytes)
        prompts = Attention(shape, [(0, 1024)] * 8, rotations=1)
        table.add(f"prefill {name} 8 x 1024", prompts.calls(), prompts.flops / 780e12)
    long = [(int(length), 1) for length in torch.linspace(100, 2000, 256).tolist()]
    one = Attention(SHAPES["qwen3-0.6b"], long, rotations=1)
    table.add("decode qwen3-0.6b batch 256 contexts 100 to 2000", one.calls(), one.cache_bytes)


def tuning_cases(table: Table) -> None:
    """Other tiles than the chosen ones."""
    shape = SHAPES["qwen3-0.6b"]
    for size, length, rotations in ((8, 1024, 8), (256, 800, 1)):
        for tokens, warps, stages in ((32, 2, 3), (32, 4, 3), (64, 2, 2), (64, 4, 3), (128, 4, 2)):
            one = Attention(shape, [(length - 1, 1)] * size, rotations=rotations)
            one.backend._decode_tile = tiles.Tile(rows=1, tokens=tokens, warps=warps, stages=stages)
            name = f"  decode batch {size} tile {tokens} warps {warps} stages {stages}"
            table.add(name, one.calls(), one.cache_bytes)
    for rows, tokens, warps, stages in ((64, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2)):
        one = Attention(shape, [(0, 1024)] * 8, rotations=1)
        one.backend._prefill_tile = tiles.Tile(rows=rows, tokens=tokens, warps=warps, stages=stages)
        table.add(f"  prefill rows {rows} tile {tokens} warps {warps} stages {stages}", one.calls(), one.flops / 780e12)


def operator_cases(table: Table) -> None:
    ops = GraphOperators(COMPUTE)
    for rows in (1, 256, 8192):
        for hidden, inner in ((1024, 3072), (4096, 12288)):
            x = [torch.randn(rows, hidden, device=DEVICE).to(BF16) for _ in range(8)]
            weight = torch.ones(hidden, device=DEVICE, dtype=BF16)
            residual = torch.randn(rows, hidden, device=DEVICE).to(BF16)
            calls = [lambda one=one, r=residual, w=weight: ops.add_rms_norm(one, r, w, 1e-6) for one in x]
            table.add(f"add_rms_norm {rows} x {hidden}", calls, 8 * rows * hidden)
            wide = [torch.randn(rows, 2 * inner, device=DEVICE).to(BF16) for _ in range(4)]
            table.add(f"gated {rows} x {inner}", [lambda o=one: ops.gated(o, "silu") for one in wide], 6 * rows * inner)
    for rows in (1, 8, 256):
        logits = [torch.randn(rows, 151936, device=DEVICE) for _ in range(4)]
        heat = torch.ones(rows, device=DEVICE)
        numbers = torch.arange(rows, device=DEVICE)
        size = rows * 151936 * 4
        table.add(f"argmax {rows}", [lambda o=o: ops.argmax(o) for o in logits], size)
        calls = [lambda o=o, h=heat, n=numbers: ops.gumbel_argmax(o, h, n, n) for o in logits]
        table.add(f"gumbel_argmax {rows}", calls, size)
        table.add(f"log_normalizer {rows}", [lambda o=o: ops.log_normalizer(o) for o in logits], size)


def linear_cases(table: Table) -> None:
    for method in (TorchLinearMethod(COMPUTE), TritonLinearMethod(COMPUTE)):
        label = "triton" if isinstance(method, TritonLinearMethod) else "torch"
        for in_features, out_features in (
            (1024, 4096),
            (2048, 1024),
            (1024, 6144),
            (3072, 1024),
            (4096, 24576),
            (12288, 4096),
        ):
            count = max(4, 200_000_000 // (2 * in_features * out_features))
            weights = [method.create(in_features, out_features, bias=False, dtype=BF16) for _ in range(count)]
            for weight in weights:
                weight.dense.normal_()
            for rows in (1, 8) if label == "torch" else (1,):
                x = torch.randn(rows, in_features, device=DEVICE).to(BF16)
                calls = [lambda w=w, x=x, m=method: m.apply(w, x) for w in weights]
                table.add(
                    f"linear {label} {rows} x {in_features} -> {out_features}", calls, 2 * in_features * out_features
                )
        head = method.create(1024, 151936, bias=False, dtype=BF16)
        head.dense.normal_()
        x = torch.randn(1, 1024, device=DEVICE).to(BF16)
        table.add(
            f"head {label} 1 x 1024 -> 151936 fp32",
            [lambda h=head, x=x, m=method: m.apply(h, x, out_dtype=torch.float32)],
            2 * 1024 * 151936,
        )


def layer_cases(table: Table) -> None:
    """A whole stack of layers, as a decode step runs them."""
    for name, sizes in (("qwen3-0.6b", (1, 8, 128)), ("qwen3-8b", (1,))):
        shape = SHAPES[name]
        hidden, inner, dim = shape["hidden"], shape["inner"], shape["dim"]
        wide = (shape["heads"] + 2 * shape["kv"]) * dim
        pairs = ((hidden, wide), (shape["heads"] * dim, hidden), (hidden, 2 * inner), (inner, hidden))
        plain = TritonLinearMethod(COMPUTE)
        stack = [[plain.create(i, o, bias=False, dtype=BF16) for i, o in pairs] for _ in range(shape["layers"])]
        for layer in stack:
            for weight in layer:
                weight.dense.normal_(std=0.02)
        weights = 2 * shape["layers"] * sum(i * o for i, o in pairs)
        norm = torch.ones(hidden, device=DEVICE, dtype=BF16)
        for size in sizes:
            one = Attention(shape, [(1023, 1)] * size, rotations=shape["layers"])
            x0 = torch.randn(size, hidden, device=DEVICE).to(BF16)
            for label, kind, early in (
                ("torch", TorchLinearMethod, False),
                ("torch, early", TorchLinearMethod, True),
                ("own, early", TritonLinearMethod, True),
            ):
                if size > 1 and kind is TritonLinearMethod:
                    continue

                method, ops = kind(COMPUTE), GraphOperators(COMPUTE)

                def step(stack=stack, method=method, ops=ops, one=one, x0=x0, norm=norm, early=early):
                    method._early = ops._early = one.backend._early = early
                    residual = x0.clone()
                    normed = ops.rms_norm(residual, norm, 1e-6)
                    for layer, cache in zip(stack, one.caches):
                        attended = one.attend(method.apply(layer[0], normed), cache)
                        normed, residual = ops.add_rms_norm(method.apply(layer[1], attended), residual, norm, 1e-6)
                        x = method.apply(layer[3], ops.gated(method.apply(layer[2], normed), "silu"))
                        normed, residual = ops.add_rms_norm(x, residual, norm, 1e-6)
                    return normed

                floor = weights + one.cache_bytes * shape["layers"]
                table.add(f"layers {name} batch {size}: {label}", [step], floor)


def main() -> None:
    parts = {
        "layer": layer_cases,
        "linear": linear_cases,
        "attention": attention_cases,
        "operators": operator_cases,
        "tuning": tuning_cases,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(parts))
    wanted = parser.parse_args().only.split(",")
    torch.manual_seed(0)
    table = Table()
    with torch.inference_mode():
        for part in wanted:
            parts[part](table)
        table.run()


if __name__ == "__main__":
    main()
