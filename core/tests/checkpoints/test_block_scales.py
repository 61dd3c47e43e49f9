"""Weights in fp8 with a scale a block: any part reads as the same part of the whole, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fourfold.checkpoints.block_scales import BlockSize, read_block_size
from fourfold.checkpoints.safetensors_format import SafetensorsFormat
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError, ConfigError

BLOCK = BlockSize(rows=8, columns=16)
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def expanded(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    rows, columns = shape
    return scales.repeat_interleave(BLOCK.rows, 0)[:rows].repeat_interleave(BLOCK.columns, 1)[:, :columns]


@pytest.fixture
def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weight = torch.randn(21, 40).to(torch.float8_e4m3fn)
    return {"a.weight": weight, "a.weight_scale_inv": torch.rand(3, 3) + 0.1, "b.bias": torch.randn(5)}


def saved(folder: Path, tensors: dict[str, torch.Tensor], quantization: object = QUANTIZATION) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def opened(folder: Path):  # type: ignore[no-untyped-def]
    return SafetensorsFormat(CheckpointContext(cache_folder="", describe=lambda values: None)).open(folder)  # type: ignore[arg-type, return-value]


def test_any_part_is_that_part_of_the_whole(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    whole = stored["a.weight"].float() * expanded(stored["a.weight_scale_inv"], (21, 40))
    with opened(saved(tmp_path, stored)) as reader:
        assert sorted(reader.names()) == ["a.weight", "b.bias"]
        weight = reader.tensor("a.weight")
        assert tuple(weight.shape) == (21, 40)
        assert torch.equal(weight[:], whole)
        for rows in (slice(0, 8), slice(7, 9), slice(20, 21), slice(5, 5), slice(3, None)):
            assert torch.equal(weight[rows], whole[rows])
            for columns in (slice(0, 16), slice(15, 33), slice(39, None)):
                assert torch.equal(weight[rows, columns], whole[rows, columns])
        assert torch.equal(reader.tensor("b.bias")[1:3], stored["b.bias"][1:3])


def test_scales_that_do_not_fit_are_named(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    stored["a.weight_scale_inv"] = torch.ones(3, 2)
    with (
        opened(saved(tmp_path, stored)) as reader,
        pytest.raises(CheckpointError, match=r"a\.weight of shape \[21, 40\] has scales of shape \[3, 2\]"),
    ):
        reader.tensor("a.weight")


@pytest.mark.parametrize("quantization", [QUANTIZATION, None])
def test_fp8_without_scales_is_refused(quantization: object, tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    if quantization:
        del stored["a.weight_scale_inv"]
    with (
        pytest.raises(CheckpointError, match=r"has tensor a\.weight in F8_E4M3 without the scales of its blocks"),
        opened(saved(tmp_path, stored, quantization)),
    ):
        pass


@pytest.mark.parametrize(
    "value",
    ["int4", {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": [0, 8]}],
)
def test_other_quantisation_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="of quantised safetensors only fp8 with a scale a block"):
        read_block_size({"quantization_config": value})
    assert read_block_size({}) is None
