"""Values to bytes and back: types that survive, and types that are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.contracts.kv_cache_spec import KVCacheSpec
from fourfold.errors import Unsupported
from fourfold.messages import StepMessage, StepOutput, WorkerInfo
from fourfold.sampling_params import SamplingParams
from fourfold.serialization import Codec, decode, encode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner) | st.lists(inner).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_equal_and_of_their_types(value):
    found = decode(encode(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors(dtype, shape):
    tensor = (torch.randn(shape) * 10).to(dtype)
    found = decode(encode([tensor]))[0]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_tensors_may_be_strided_need_grad_and_own_their_memory():
    tensor = torch.randn(4, 6, requires_grad=True)
    found = decode(encode(tensor.t()[::2]))
    assert torch.equal(found, tensor.t()[::2])
    found += 1
    with pytest.raises(Unsupported, match="make it dense"):
        encode(torch.eye(3).to_sparse())


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?", "u1", "c8"])
def test_arrays(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    found = decode(encode(array))
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    found[0, 0] = 1
    assert decode(encode(np.float32(1.5))) == 1.5


def test_messages_come_back_as_they_were():
    message = StepMessage(step=3)
    assert decode(encode({"a": [message, SamplingParams(temperature=0)]})) == {
        "a": [message, SamplingParams(temperature=0)]
    }


def test_layer_specs_of_a_worker_are_typed():
    info = WorkerInfo(
        rank=0,
        device="cpu",
        dtype="float32",
        available_bytes=1,
        kv_cache_specs={0: KVCacheSpec(block_size=16, bytes_per_block=1)},
        backends={},
    )
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=WorkerInfo)
    assert isinstance(found.kv_cache_specs[0], KVCacheSpec)


@dataclass(frozen=True)
class Mine:
    numbers: tuple[int, ...]


def test_registered_dataclasses_travel_and_others_do_not():
    codec = Codec([Mine])
    assert codec.decode(codec.encode([Mine((1, 2))])) == [Mine((1, 2))]
    with pytest.raises(Unsupported, match=r"test_serialization.Mine cannot travel"):
        encode(Mine((1,)))
    with pytest.raises(Unsupported, match=r"'.*test_serialization:Mine' is not registered"):
        decode(codec.encode(Mine((1,))))


@pytest.mark.parametrize("value", [object(), {1}, len, Mine, np.array([object()]), np.array(["a"]), 1j])
def test_other_values_are_refused_by_name(value):
    with pytest.raises(Unsupported, match="cannot travel"):
        encode([value])


def test_an_integer_beyond_64_bits_is_refused():
    with pytest.raises(Unsupported, match="cannot travel between processes: can't serialize ints"):
        encode(2**64)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", encode([1])[:-1], b"\xc7\x00\x63"])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(Unsupported):
        decode(data)


def test_a_message_cannot_name_a_class_of_its_own_choice():
    inner = msgspec.msgpack.encode(("subprocess:Popen", {"args": ["true"]}))
    with pytest.raises(Unsupported, match="'subprocess:Popen' is not registered"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(4, inner)))


def test_sixteen_mebibytes():
    tensor = torch.randint(0, 255, (16 << 20,), dtype=torch.uint8)
    assert torch.equal(decode(encode(tensor)), tensor)


def test_no_torch_is_imported_for_values_without_tensors():
    code = (
        "import sys; from fourfold.serialization import encode, decode; decode(encode([1, (2,)]))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_reply_is_typed():
    assert decode(encode(StepOutput(step=1, token_ids=[2], errors={3: "x"}))).errors == {3: "x"}
