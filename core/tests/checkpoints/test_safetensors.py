from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.checkpoints.safetensors_file import MappedFile, SafetensorsWriter, read_header
from fourfold.checkpoints.safetensors_format import SafetensorsFormat
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError


def save_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_views_equal_the_librarys_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": torch.randn(7, 5).to(dtype), "a": torch.randn(3).to(dtype), "none": torch.zeros(0, 4).to(dtype)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = MappedFile(tmp_path / "x.safetensors")
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        view = file.view(name)
        assert view.dtype == dtype
        assert torch.equal(view, tensor)
    assert torch.equal(file.view("b")[2:5, 1:3], tensors["b"][2:5, 1:3])
    file.drop_pages("b")
    assert torch.equal(file.view("b"), tensors["b"]), "pages that are given back are read again"
    file.close()


def test_unaligned_data(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} '
    assert len(header) % 4
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.0))
    file = MappedFile(tmp_path / "x.safetensors")
    assert file.view("x").tolist() == [1.5, -2.0]
    file.close()


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    values = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.float32([7.0])}
    writer = SafetensorsWriter(tmp_path / "x.safetensors", {name: value.shape for name, value in values.items()})
    writer.write("b", values["b"].view(np.uint8).data)
    writer.write("a", values["a"][1:].reshape(-1).view(np.uint8).data, first_byte=16)
    writer.write("a", values["a"][:1].reshape(-1).view(np.uint8).data)
    writer.close()
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor.numpy(), values[name])


def header_file(path: Path, entry: Any, data: bytes = bytes(64)) -> Path:
    header = json.dumps(entry).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"x": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}, "is truncated: tensor x ends at byte"),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, r"tensor x of shape \[3\] claims bytes"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "tensor x of shape"),
        ({"x": {"dtype": "I4", "shape": [2], "data_offsets": [0, 8]}}, "tensor x has dtype I4; supported: F64, F32"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "corrupt header entry for tensor x"),
        ({"x": 3}, "corrupt header entry for tensor x"),
        ({"x": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}, "corrupt header entry for tensor x"),
        ({"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, "claims bytes"),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("x", 4), ("y", 0))},
            "tensors y and x overlap",
        ),
        ([1], "corrupt header: no JSON object"),
    ],
)
def test_bad_headers(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors.*{message}"):
        read_header(header_file(tmp_path / "bad.safetensors", entry))


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"\xff\xfe{}"])
def test_no_safetensors_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        read_header(tmp_path / "bad.safetensors")


def test_truncated_file_names_file_and_tensor(tmp_path: Path, context: CheckpointContext) -> None:
    save_file({"x": torch.zeros(100), "y": torch.ones(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor y ends at byte"),
        SafetensorsFormat(context).open(tmp_path),
    ):
        pass


def test_index_places_tensors(tmp_path: Path, context: CheckpointContext) -> None:
    save_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.zeros(3)}})
    save_file({"z": torch.zeros(1)}, tmp_path / "stray.safetensors")
    format_ = SafetensorsFormat(context)
    assert format_.recognizes(tmp_path)
    with format_.open(tmp_path) as reader:
        assert sorted(reader.names()) == ["x", "y"]
        assert list(reader.tensor("y").shape) == [3]
        assert reader.tensor("x")[0:1].tolist() == [1.0]
        with pytest.raises(CheckpointError, match="the checkpoint has no tensor z"):
            reader.tensor("z")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), r"places tensor y in b\.safetensors, which is missing"),
        (
            lambda folder: save_file({"other": torch.zeros(1)}, folder / "b.safetensors"),
            r"b\.safetensors lacks tensor y, which model\.safetensors\.index\.json places there",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"x": "../a.safetensors"}})
            ),
            "a file of the same folder",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "is no JSON"),
    ],
)
def test_broken_index(
    tmp_path: Path, context: CheckpointContext, break_it: Callable[[Path], Any], message: str
) -> None:
    save_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.zeros(3)}})
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=message), SafetensorsFormat(context).open(tmp_path):
        pass


def test_the_same_tensor_twice(tmp_path: Path, context: CheckpointContext) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "b.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"tensor x is in .*a\.safetensors and again in .*b\.safetensors"),
        SafetensorsFormat(context).open(tmp_path),
    ):
        pass


def test_the_publishers_second_copy_is_left_alone(tmp_path: Path, context: CheckpointContext) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"tok.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    with SafetensorsFormat(context).open(tmp_path) as reader:
        assert list(reader.names()) == ["x"]


def test_a_view_that_outlives_the_reader_is_no_error(tmp_path: Path, context: CheckpointContext) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    with SafetensorsFormat(context).open(tmp_path) as reader:
        kept = reader.tensor("x")[:]
    assert kept.tolist() == [1.0, 1.0]
