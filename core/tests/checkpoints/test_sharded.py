"""What ranks save of a model, and what any cut reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.recorded_reading import RecordedFormat
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.checkpoints.safetensors_format import SafetensorsFormat
from fourfold.checkpoints.sharded_format import ShardedFormat
from fourfold.checkpoints.sharded_index import SHARD_FOLDER, SHARDED_INDEX, ShardedTensor, write_index
from fourfold.checkpoints.sharded_writing import copy_side_files, write_shard
from fourfold.checkpoints.tensor_region import TensorRegion, is_covered, region_of
from fourfold.config.model_config import ModelConfig
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError, ConfigError
from fourfold.plugins import PluginRegistry

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
ROWS = {"a": [slice(0, 3), slice(2, 5)], "b": [(slice(None), slice(0, 4)), (slice(None), slice(4, 7))]}
"""What two ranks take of each tensor; they share row 2 of ``a``."""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    tensors = {"a": torch.randn(5, 4).to(torch.bfloat16), "b": torch.randn(3, 7), "tied": torch.randn(2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def saved(whole: Path, tmp_path: Path, context: CheckpointContext) -> Path:
    folder = tmp_path / "saved"
    copy_side_files(whole, folder)
    ranks: list[dict[str, ShardedTensor]] = []
    for rank in range(2):
        reading = RecordedFormat(SafetensorsFormat(context))
        with reading.open(whole) as reader:
            for name, parts in ROWS.items():
                tensor = reader.tensor(name)
                tensor[parts[rank]]
                tensor[parts[rank]]  # a second time is not kept twice
                reader.tensor(name)[:]  # as a check of the whole would
            assert {name: len(regions) for name, regions in reading.regions.items()} == {"a": 1, "b": 1}
        with SafetensorsFormat(context).open(whole) as reader:
            ranks.append(write_shard(folder, rank, reader, reading.regions))
    write_index(folder, ranks)
    return folder


def test_every_slice_reads_as_in_the_whole(saved: Path, whole: Path, context: CheckpointContext) -> None:
    with ShardedFormat(context).open(saved) as found, SafetensorsFormat(context).open(whole) as expected:
        assert sorted(found.names()) == ["a", "b"]
        for name in ROWS:
            ours, theirs = found.tensor(name), expected.tensor(name)
            assert tuple(ours.shape) == tuple(theirs.shape)
            for index in (slice(None), slice(1, 4), slice(4, 5), slice(2, 2), (slice(0, 3), slice(2, 4)), *ROWS[name]):
                assert ours[index].dtype == theirs[index].dtype
                assert torch.equal(ours[index], theirs[index]), (name, index)
        with pytest.raises(CheckpointError, match="has no tensor tied"):
            found.tensor("tied")


def test_files_beside_the_weights_come_along_and_no_index_of_others(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        SHARDED_INDEX,
        SHARD_FOLDER,
    ]


def test_it_is_recognized(saved: Path, registry: PluginRegistry) -> None:
    found = resolve_checkpoint(ModelConfig(model=str(saved)), registry, NoProgress())
    assert isinstance(found.format, ShardedFormat)
    assert found.folder == saved
    assert found.description.vocab_size == 64


def test_a_folder_in_use_is_refused(whole: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        copy_side_files(whole, saved)


def change(saved: Path, **fields: object) -> None:
    index = json.loads((saved / SHARDED_INDEX).read_text())
    index["tensors"]["a"].update(fields)
    (saved / SHARDED_INDEX).write_text(json.dumps(index))


def test_a_state_that_is_not_whole_is_refused(saved: Path, context: CheckpointContext) -> None:
    index = json.loads((saved / SHARDED_INDEX).read_text())
    first, second = index["tensors"]["a"]["pieces"]
    for pieces, text in (
        ([first], "lacks parts of tensor a; save the state again"),
        ([first, {**second, "file": "../x"}], "places tensor a outside shards"),
        ([first, {**second, "file": "x.safetensors"}], "x.safetensors cannot be read"),
        ([first, {**second, "key": "a#9"}], "does not hold the part of a that it should"),
        (7, "cannot be read"),
    ):
        change(saved, pieces=pieces)
        with pytest.raises(CheckpointError, match=text), ShardedFormat(context).open(saved):
            pass
    (saved / SHARDED_INDEX).write_text(json.dumps({**index, "version": 2}))
    with pytest.raises(CheckpointError, match="is of version 2; this one reads 1"), ShardedFormat(context).open(saved):
        pass


def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    class Integers:
        def tensor(self, name: str) -> torch.Tensor:
            return torch.zeros(3, dtype=torch.int32)

    with pytest.raises(CheckpointError, match="a tensor of dtype int32 cannot be stored"):
        write_shard(tmp_path, 0, Integers(), {"a": [TensorRegion((0,), (3,))]})  # type: ignore[arg-type]


bounds = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.lists(st.tuples(bounds, bounds), max_size=4))
def test_covering_is_what_counting_says(boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    seen = torch.zeros(4, 5, dtype=torch.bool)
    regions = []
    for rows, columns in boxes:
        index = (slice(*sorted(rows)), slice(*sorted(columns)))
        seen[index] = True
        regions.append(region_of(index, seen.shape))
    assert is_covered(seen.shape, regions) == bool(seen.all())


@given(bounds, bounds)
def test_a_region_is_what_an_index_reads(one: tuple[int, int], other: tuple[int, int]) -> None:
    values = torch.arange(20).reshape(4, 5)
    index = (slice(*sorted(one)), slice(*sorted(other)))
    region = region_of(index, values.shape)
    assert values[index].shape == torch.Size(region.shape)
    assert region.is_empty == (values[index].numel() == 0)
    whole = region_of(slice(None), values.shape)
    assert torch.equal(values[region.within(whole)], values[index])
    assert whole.contains(region)
    assert region.contains(whole) == (region == whole)
