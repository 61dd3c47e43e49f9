"""CPU kernels beside their twins, in the shapes of SmolLM2-135M: linears, attention, and a whole recorded decode step.

Ratios above 1 mean the kernels are faster. Each figure is the best of many runs, interleaved with its twin's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.attention_backend import AttentionMetadata, AttentionSpec
from fourfold.entries import AttentionContext, ComputeContext
from fourfold_kernels_cpu.attention import Avx512Attention
from fourfold_kernels_cpu.operators import Avx512Operators
from fourfold_kernels_cpu.packed_linear import PackedLinearMethod
from fourfold_kernels_cpu.program import KernelProgram

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
CONFIG, CPU, BF16 = EngineConfig(), torch.device("cpu"), torch.bfloat16


def best(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each function's fastest run; the functions take turns, so that noise hits all of them."""
    found = dict.fromkeys(functions, float("inf"))
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            elapsed = (time.perf_counter() - started) * 1e3
            if round_:
                found[name] = min(found[name], elapsed)
    return found


def show(title: str, times: dict[str, float]) -> None:
    ours = next(iter(times.values()))
    others = "".join(f"   {name} {ms:8.2f} ms = {ms / ours:5.2f}x" for name, ms in list(times.items())[1:])
    print(f"{title:34} {ours:8.2f} ms{others}", flush=True)


class Model:
    """Random weights in the shapes of the model, and one decode or prefill step over them."""

    def __init__(self) -> None:
        context = ComputeContext(config=CONFIG, device=CPU, dtype=BF16)
        self.linear, self.operators = PackedLinearMethod(context), Avx512Operators(context)
        spec = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, rotary_dim=DIM)
        self.attention = Avx512Attention(AttentionContext(config=CONFIG, device=CPU, dtype=BF16, spec=spec))
        self.dense = [
            torch.randn(shape).mul_(0.02).to(BF16) for shape in (*LAYER_SHAPES * LAYERS, (VOCABULARY, HIDDEN))
        ]
        started = time.perf_counter()
        self.packed = [self._pack(dense) for dense in self.dense]
        print(
            f"packing {sum(dense.nbytes for dense in self.dense) / 1e6:.0f} MB: {time.perf_counter() - started:.3f} s"
        )
        self.norm, self.cos_sin = torch.ones(HIDDEN, dtype=BF16), torch.rand(8192, DIM)

    def _pack(self, dense: torch.Tensor) -> object:
        weight = self.linear.create(dense.shape[1], dense.shape[0], bias=False, dtype=BF16)
        self.linear.load_shard(weight, dense, first_row=0)
        return weight

    def linears(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for weight in self.packed:
            self.linear.apply(weight, x if weight.in_features == HIDDEN else y)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, caches: list[torch.Tensor], batch: AttentionMetadata):
        operators, apply = self.operators, self.linear.apply
        residual = self.linear.embed(self.packed[-1], ids)
        x = operators.rms_norm(residual, self.norm, 1e-5)
        for layer in range(LAYERS):
            qkv, out, up, down = self.packed[layer * 4 : layer * 4 + 4]
            x = self.attention.rotate_and_attend(apply(qkv, x), positions, self.cos_sin, caches[layer], batch)
            x, residual = operators.add_rms_norm(apply(out, x), residual, self.norm, 1e-5)
            x, residual = operators.add_rms_norm(
                apply(down, operators.gated(apply(up, x), "silu")), residual, self.norm, 1e-5
            )
        last = x if x.shape[0] == len(batch.sequence_lengths) else x[batch.query_start[1:].long() - 1]
        return operators.argmax(apply(self.packed[-1], last, out_dtype=torch.float32))


def metadata(sequences: int, new: int, context: int, *, shuffled: bool) -> AttentionMetadata:
    per_sequence = -(-context // 16)
    total = sequences * per_sequence
    table = (torch.randperm(total) if shuffled else torch.arange(total)).view(sequences, per_sequence)
    where = torch.arange(context - new, context)
    return AttentionMetadata(
        query_start=torch.arange(0, sequences * new + 1, new, dtype=torch.int32),
        sequence_lengths=torch.full((sequences,), context, dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=(table[:, where // 16] * 16 + where % 16).flatten(),
        max_query_length=new,
        max_sequence_length=context,
        query_start_list=list(range(0, sequences * new + 1, new)),
        sequence_lengths_list=[context] * sequences,
    )


def caches_for(model: Model, blocks: int) -> list[torch.Tensor]:
    shape = model.attention.kv_cache_shape(blocks, 16)
    return [torch.randn(shape).to(BF16) for _ in range(LAYERS)]


def recorded(function: Callable[[], object]) -> KernelProgram:
    program = KernelProgram()
    with program.capture():
        function()
    return program


def bench_linears(model: Model, batches: list[int], rounds: int) -> None:
    print("\nall linears of a step: recorded; eager calls; oneDNN prepacked; F.linear")
    for batch in batches:
        x, y = torch.randn(batch, HIDDEN).to(BF16), torch.randn(batch, INNER).to(BF16)
        prepacked = [torch.ops.mkldnn._reorder_linear_weight(dense, batch) for dense in model.dense]
        pairs = list(zip(prepacked, model.dense, strict=True))
        program = recorded(lambda x=x, y=y: model.linears(x, y))
        pick = {HIDDEN: x, INNER: y}
        times = best(
            {
                "ours": program.replay,
                "eager": lambda x=x, y=y: model.linears(x, y),
                "onednn": lambda pairs=pairs, pick=pick: [
                    torch.ops.mkldnn._linear_pointwise(pick[dense.shape[1]], packed, None, "none", [], "")
                    for packed, dense in pairs
                ],
                "F.linear": lambda pick=pick: [functional.linear(pick[d.shape[1]], d) for d in model.dense],
            },
            max(3, rounds // (1 + batch // 16)),
        )
        gflop = 2 * batch * sum(dense.numel() for dense in model.dense) / 1e9
        rate = sum(dense.nbytes for dense in model.dense) / 1e6
        show(f"M={batch}: {gflop / times['ours'] * 1e3:4.0f} GF/s {rate / times['ours']:4.1f} GB/s", times)


def bench_attention(model: Model, rounds: int) -> None:
    print("\n30 layers of attention: blocks in order; blocks shuffled; torch SDPA over contiguous KV, group folded")
    for sequences, new, context in ((1, 1, 256), (16, 1, 256), (64, 1, 256), (1, 512, 512)):
        blocks = sequences * -(-context // 16)
        caches = caches_for(model, blocks)
        qkv = torch.randn(sequences * new, (HEADS + 2 * KV_HEADS) * DIM).to(BF16)
        ordered, shuffled = (metadata(sequences, new, context, shuffled=flag) for flag in (False, True))
        programs = [
            recorded(
                lambda b=batch, qkv=qkv, caches=caches: [model.attention.attend(qkv, cache, b) for cache in caches]
            )
            for batch in (ordered, shuffled)
        ]
        kv = [torch.randn(2, sequences, KV_HEADS, context, DIM).to(BF16) for _ in range(LAYERS)]
        group = HEADS // KV_HEADS
        if new == 1:
            query, causal = torch.randn(sequences, KV_HEADS, group, DIM).to(BF16), False
        else:
            kv = [layer.repeat_interleave(group, 2) for layer in kv]
            query, causal = torch.randn(sequences, HEADS, new, DIM).to(BF16), True
        times = best(
            {
                "ours": programs[0].replay,
                "shuffled": programs[1].replay,
                "sdpa": lambda query=query, kv=kv, causal=causal: [
                    functional.scaled_dot_product_attention(query, k, v, is_causal=causal) for k, v in kv
                ],
            },
            rounds if new == 1 else 3,
        )
        gigabytes = sequences * context * LAYERS * KV_HEADS * DIM * 4 / 1e9
        show(f"{sequences} x {new} at {context}: {gigabytes / times['ours'] * 1e3:4.1f} GB/s", times)


def bench_steps(model: Model, rounds: int) -> None:
    print("\nwhole step with argmax: recorded; eager")
    for sequences, new, context in ((1, 1, 256), (1, 1, 512), (16, 1, 192), (64, 1, 192), (1, 512, 512)):
        batch = metadata(sequences, new, context, shuffled=False)
        caches = caches_for(model, sequences * -(-context // 16))
        tokens = sequences * new
        ids, positions = torch.randint(0, VOCABULARY, (tokens,)), torch.arange(tokens) % context

        def step(ids=ids, positions=positions, caches=caches, batch=batch):
            return model.step(ids, positions, caches, batch)

        functions = {"eager": step}
        if new == 1:
            functions = {"recorded": recorded(step).replay, **functions}
        show(f"{sequences} x {new} at {context}", best(functions, rounds if new == 1 else 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64, 512])
    parser.add_argument("--only", choices=["linears", "attention", "steps"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Model()
    with torch.inference_mode():
        if arguments.only in (None, "linears"):
            bench_linears(model, arguments.batches, arguments.rounds)
        if arguments.only in (None, "attention"):
            bench_attention(model, arguments.rounds)
        if arguments.only in (None, "steps"):
            bench_steps(model, arguments.rounds)


if __name__ == "__main__":
    main()
