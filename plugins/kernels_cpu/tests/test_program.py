"""A recorded program against the same code run eagerly, with inputs that change between replays."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from fourfold.contracts.attention_backend import AttentionMetadata
from fourfold.contracts.host_recording import current_recorder, recording
from fourfold.contracts.step_graph import StepRecorder
from fourfold.errors import Unsupported
from fourfold_kernels_cpu.attention import Avx512Attention
from fourfold_kernels_cpu.operators import Avx512Operators
from fourfold_kernels_cpu.packed_linear import PackedLinearMethod
from fourfold_kernels_cpu.program import KernelProgram
from fourfold_kernels_cpu.recording_operators import RecordingOperators

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 192, 6, 2, 32, 320, 1000


class TinyModel:
    """Two decoder layers with a tied head, in the order of kernels a real step has."""

    def __init__(self, compute_context, attention_context, batch):
        self.linear, self.operators = PackedLinearMethod(compute_context), Avx512Operators(compute_context)
        self.attention = Avx512Attention(
            attention_context(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, rotary_dim=DIM)
        )
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        sizes = [(qkv, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)] * 2 + [
            (VOCABULARY, HIDDEN)
        ]
        self.weights = [self.pack(out_features, in_features) for out_features, in_features in sizes]
        self.norm = torch.ones(HIDDEN).bfloat16()
        angles = torch.arange(512)[:, None] / (100.0 ** (torch.arange(DIM // 2) / (DIM // 2)))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.caches = [torch.zeros(self.attention.kv_cache_shape(64, 16), dtype=torch.bfloat16) for _ in range(2)]
        self.ids = torch.zeros(batch, dtype=torch.int64)
        self.positions = torch.zeros(batch, dtype=torch.int64)
        self.metadata = AttentionMetadata(
            query_start=torch.arange(batch + 1, dtype=torch.int32),
            sequence_lengths=torch.ones(batch, dtype=torch.int32),
            block_table=torch.arange(batch * 8, dtype=torch.int32).view(batch, 8) % 64,
            slot_mapping=torch.zeros(batch, dtype=torch.int64),
            max_query_length=1,
            max_sequence_length=128,
            query_start_list=list(range(batch + 1)),
            sequence_lengths_list=[1] * batch,
        )

    def pack(self, out_features, in_features):
        weight = self.linear.create(in_features, out_features, bias=False, dtype=torch.bfloat16)
        self.linear.load_shard(weight, torch.randn(out_features, in_features) * in_features**-0.5, first_row=0)
        return weight

    def step(self):
        residual = self.linear.embed(self.weights[-1], self.ids)
        x = self.operators.rms_norm(residual, self.norm, 1e-5)
        for layer in range(2):
            qkv, out, up, down = self.weights[layer * 4 : layer * 4 + 4]
            heads = self.linear.apply(qkv, x)
            x = self.attention.rotate_and_attend(heads, self.positions, self.cos_sin, self.caches[layer], self.metadata)
            x, residual = self.operators.add_rms_norm(self.linear.apply(out, x), residual, self.norm, 1e-5)
            x = self.operators.gated(self.linear.apply(up, x), "silu")
            x, residual = self.operators.add_rms_norm(self.linear.apply(down, x), residual, self.norm, 1e-5)
        logits = self.linear.apply(self.weights[-1], x, out_dtype=torch.float32)
        return logits, self.operators.argmax(logits)

    def set_inputs(self, step):
        batch = self.ids.shape[0]
        self.ids.copy_((torch.arange(batch) * 37 + step * 11) % VOCABULARY)
        self.positions.fill_(step)
        self.metadata.sequence_lengths.fill_(step + 1)
        self.metadata.slot_mapping.copy_(self.metadata.block_table[:, step // 16].long() * 16 + step % 16)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_replay_equals_eager(compute_context, attention_context, thread_counts, batch):
    eager = TinyModel(compute_context, attention_context, batch)
    torch.manual_seed(0)
    recorded = TinyModel(compute_context, attention_context, batch)
    recorded.weights = eager.weights
    program = KernelProgram()
    with program.capture():
        logits, ids = recorded.step()
    gc.collect()
    for step in range(70):
        torch.set_num_threads(thread_counts[step % len(thread_counts)])
        eager.set_inputs(step)
        recorded.set_inputs(step)
        expected_logits, expected_ids = eager.step()
        program.replay()
        assert torch.equal(logits, expected_logits), step
        assert torch.equal(ids, expected_ids), step


def test_program_keeps_what_it_needs(compute_context):
    operators = Avx512Operators(compute_context)
    program, x, weight = KernelProgram(), torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    expected = operators.rms_norm(x, weight, 1e-5)
    with program.capture():
        out = operators.rms_norm(x, weight, 1e-5)
    del x, weight
    gc.collect()
    junk = [torch.randn(4, 64).bfloat16() for _ in range(50)]
    program.replay()
    assert torch.equal(out, expected)
    assert len(junk) == 50


def test_arena_reuses_what_was_let_go(compute_context):
    operators = Avx512Operators(compute_context)
    program, x, weight = KernelProgram(), torch.randn(4, 64).bfloat16(), torch.ones(64).bfloat16()
    with program.capture():
        first = operators.rms_norm(x, weight, 1e-5)
        view = first[1:]
        del first
        second = operators.rms_norm(x, weight, 1e-5)
        assert second.data_ptr() + 128 != view.data_ptr()  # a view keeps the memory
        address = second.data_ptr()
        del second
        third = operators.rms_norm(x, weight, 1e-5)
        assert third.data_ptr() == address


def test_foreign_computation_is_refused_by_name(compute_context):
    program = KernelProgram()
    x = torch.ones(4)
    with pytest.raises(Unsupported, match="aten::add"), program.capture():
        x + x
    with KernelProgram().capture():
        torch.empty(4)
        x.view(2, 2)[0].unsqueeze(0)


def test_captures_do_not_nest_and_happen_once(native):
    program = KernelProgram()
    with program.capture(), pytest.raises(Unsupported, match="do not nest"), KernelProgram().capture():
        pass
    with pytest.raises(Unsupported, match="captured already"), program.capture():
        pass
    with pytest.raises(Unsupported, match="empty"):
        KernelProgram().replay()
    program.replay()


def test_core_replays_recorded_steps(compute_context, attention_context):
    operators = RecordingOperators(compute_context)
    assert isinstance(operators, StepRecorder)
    assert operators.batch_sizes(7) == [1, 2, 3, 4, 5, 6, 7]
    assert operators.batch_sizes(1000)[-1] == 64
    steps = {}
    for batch in (8, 1, 3):
        model = TinyModel(compute_context, attention_context, batch)
        steps[batch] = (model, operators.capture(lambda model=model: model.step()[0]))
    for step in range(5):
        for model, graph in steps.values():
            model.set_inputs(step)
            logits = graph.replay().clone()
            assert torch.equal(logits, model.step()[0])
    graph.close()
    graph.close()


def test_a_failed_capture_leaves_no_trace(compute_context):
    operators = RecordingOperators(compute_context)
    x, weight = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    with pytest.raises(Unsupported, match="aten::mul"):
        operators.capture(lambda: operators.rms_norm(x, weight, 1e-5) * 2)
    graph = operators.capture(lambda: operators.rms_norm(x, weight, 1e-5))
    assert torch.equal(graph.replay(), operators.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_of_others_run_in_order_and_in_place(compute_context, threads):
    torch.set_num_threads(threads)
    operators, x = Avx512Operators(compute_context), torch.ones(3, 32).bfloat16()
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def double(argument):
        seen.append(argument)
        x.mul_(2)

    argument = ctypes.create_string_buffer(8)
    program = KernelProgram()
    with program.capture():
        operators.scale(x, 3.0)
        current_recorder().record_call(
            ctypes.cast(double, ctypes.c_void_p).value,
            ctypes.addressof(argument),
            tensors=(x,),
            keep=(double, argument),
        )
        operators.scale(x, 0.5)
    assert current_recorder() is None
    assert seen == []
    for times in (1, 2):
        program.replay()
        assert x.unique().tolist() == [3.0**times]
    assert seen == [ctypes.addressof(argument)] * 2


def test_recordings_do_not_nest():
    with KernelProgram().capture(), pytest.raises(Unsupported, match="do not nest"), recording(KernelProgram()):
        pass
