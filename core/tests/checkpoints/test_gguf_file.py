from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fourfold.checkpoints.gguf_dequantize import check_places, dequantize_rows
from fourfold.checkpoints.gguf_file import GgufFile
from fourfold.errors import CheckpointError

Write = Callable[..., Path]
KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
PACKAGED = [
    gguf.GGMLQuantizationType[name]
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ1_0", "MXFP4")
]


def scalars(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("x.u8", 200)
    writer.add_int8("x.i8", -3)
    writer.add_uint16("x.u16", 60000)
    writer.add_int16("x.i16", -30000)
    writer.add_uint32("x.u32", 4_000_000_000)
    writer.add_int32("x.i32", -5)
    writer.add_float32("x.f32", 0.5)
    writer.add_float64("x.f64", 0.1)
    writer.add_uint64("x.u64", 2**63)
    writer.add_int64("x.i64", -(2**62))
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "日本")
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.strings", ["a", "", "日本"])


def test_metadata_of_every_type(write_gguf: Write, tiny_tensors: dict[str, Any]) -> None:
    path = write_gguf(tiny_tensors, keys=scalars)
    file = GgufFile(path)
    reference = gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert file.get(key) == field.contents(), key
    assert file.length("x.strings") == 3
    assert "x.none" not in file
    assert file.get("x.none", 7) == 7
    file.close()


def test_tensor_table(write_gguf: Write, tiny_tensors: dict[str, Any]) -> None:
    file = GgufFile(write_gguf(tiny_tensors))
    check_places(file)
    assert list(file.tensors) == list(tiny_tensors)
    for name, values in tiny_tensors.items():
        assert file.tensors[name].shape == values.shape
        np.testing.assert_array_equal(dequantize_rows(file, file.tensors[name], range(len(values))), values)
    file.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_equal_the_packages(write_gguf: Write, kind: gguf.GGMLQuantizationType) -> None:
    values = np.random.default_rng(1).standard_normal((12, 96)).astype(np.float32) * 3
    path = write_gguf({"x": (values, kind)})
    file = GgufFile(path)
    expected = gguf.quants.dequantize(gguf.GGUFReader(path).tensors[0].data, kind)
    np.testing.assert_array_equal(dequantize_rows(file, file.tensors["x"], range(12)), expected)
    np.testing.assert_array_equal(dequantize_rows(file, file.tensors["x"], range(5, 8)), expected[5:8])
    file.close()


@pytest.mark.parametrize("kind", PACKAGED, ids=lambda kind: kind.name)
def test_types_that_only_the_package_knows(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows = 6
    # Bytes below 0x30 keep every scale a small finite number.
    data = np.random.default_rng(2).integers(0, 0x30, (rows, 2 * size), dtype=np.uint8)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    check_places(file)
    assert file.tensors["x"].shape == (rows, 2 * elements)
    expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(dequantize_rows(file, file.tensors["x"], range(2, 5)), expected[2:5])
    file.close()


def test_unknown_type_is_named(write_gguf: Write, tiny_tensors: dict[str, Any]) -> None:
    path = write_gguf(tiny_tensors)
    # The table is the last thing before the data; the type follows the name and the dimensions.
    data = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    place = data.index(name) + len(name) + 4 + 8
    data[place : place + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    file = GgufFile(path)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor output_norm\.weight at byte \d+ has type 999"):
        check_places(file)
    file.close()


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"x\.gguf is no GGUF file: it begins with b'PK"):
        GgufFile(path)


def test_wrong_version(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(CheckpointError, match="has GGUF version 9; supported: 2 and 3"):
        GgufFile(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF\x03\x00"])
def test_tiny_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        GgufFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_file_cut_anywhere_is_refused(write_gguf: Write, tiny_tensors: dict[str, Any]) -> None:
    path = write_gguf(tiny_tensors)
    whole = path.read_bytes()
    file = GgufFile(path)
    last = max(tensor.offset + tensor.size * 4 for tensor in file.tensors.values())
    file.close()
    for size in [*range(0, len(whole) // 2, 97), last - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            check_places(GgufFile(path))


def test_bytes_changed_anywhere_never_crash(write_gguf: Write, tiny_tensors: dict[str, Any]) -> None:
    path = write_gguf(tiny_tensors)
    whole = path.read_bytes()
    end = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    for place in range(4, end, 3):
        changed = bytearray(whole)
        changed[place] ^= 0xA5
        path.write_bytes(changed)
        with suppress(CheckpointError):
            check_places(GgufFile(path))
