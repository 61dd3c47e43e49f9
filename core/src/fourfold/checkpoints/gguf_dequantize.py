"""Turns blocks of a GGUF tensor into fp32: common types here, others through the gguf package. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.checkpoints.gguf_file import GgufFile, GgufTensor

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BlockType(NamedTuple):
    """How one ggml type is stored."""

    name: str
    elements: int
    """A block."""
    size: int
    """Bytes a block."""
    decode: Callable[[Bytes, Floats], None]
    """(blocks [n, size], out [n, elements]) fills ``out``."""


def block_type(tensor: GgufTensor, path: Path) -> BlockType:
    """How a tensor is stored. Raises CheckpointError for a type that nothing here can dequantise."""
    return _OWN.get(tensor.type) or _packaged(tensor, path)


def check_places(file: GgufFile) -> None:
    """Every tensor must lie inside the file and hold whole blocks."""
    for tensor in file.tensors.values():
        kind = block_type(tensor, file.path)
        row = tensor.shape[-1] if tensor.shape else 1
        if row % kind.elements:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} has rows of {row}, no multiple of {kind.elements} ({kind.name})"
            )
        stop = tensor.offset + tensor.size // kind.elements * kind.size
        if stop > len(file):
            raise CheckpointError(
                f"{file.path} is truncated: tensor {tensor.name} ends at byte {stop}, the file at {len(file)}; "
                "download it again"
            )


def dequantize_rows(file: GgufFile, tensor: GgufTensor, rows: range) -> Floats:
    """Rows of a [rows, columns] tensor, or elements of a vector, as fp32."""
    kind = block_type(tensor, file.path)
    columns = tensor.size // tensor.shape[0]
    if len(tensor.shape) == 1:
        columns = 1
        rows = range(rows.start // kind.elements * kind.elements, rows.stop)
    first = rows.start * columns // kind.elements
    count = len(rows) * columns // kind.elements
    with file.data(tensor.offset + first * kind.size, count * kind.size) as data:
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(count, kind.size)
        out: Floats = np.empty((count, kind.elements), dtype=np.float32)
        kind.decode(blocks, out)
        del blocks  # it would keep the mapping from being closed
    return out.reshape(len(rows), columns) if len(tensor.shape) > 1 else out.reshape(len(rows))


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """Fp16 scale, 32 int8."""
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scales, out=out, casting="unsafe")


def _q4_0(blocks: Bytes, out: Floats) -> None:
    """Fp16 scale, 16 bytes: low nibbles are elements 0 to 15, high ones 16 to 31; a nibble stands for nibble - 8."""
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= scales


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """Fp16 scale, fp16 minimum, nibbles as in q4_0."""
    factors = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    _nibbles(blocks[:, 4:], out)
    out *= factors[:, :1]
    out += factors[:, 1:]


def _nibbles(packed: Bytes, out: Floats) -> None:
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


_OWN = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    30: BlockType("BF16", 1, 2, _bf16),
}


def _packaged(tensor: GgufTensor, path: Path) -> BlockType:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros(size, dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} at byte {tensor.offset} has type {tensor.type}, which cannot be "
            f"dequantised ({error}); use another quantisation of this model"
        ) from error

    def decode(blocks: Bytes, out: Floats) -> None:
        out[...] = gguf.quants.dequantize(blocks, kind).reshape(out.shape)

    return BlockType(kind.name, elements, size, decode)
