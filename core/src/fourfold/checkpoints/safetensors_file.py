"""Reads and writes single .safetensors files, mapped. Imports torch only to hand out tensors.

The format: 8 bytes header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_LENGTH_BYTES = 8
_HEADER_LIMIT = 100 << 20  # the format's own limit
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """All tensors of a file, checked against the file's size. Raises CheckpointError naming file and tensor."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header claims {length} bytes, it has {size}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a corrupt header: no JSON object")
    data = _LENGTH_BYTES + length
    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            places[name] = _place(path, name, entry, data, size)
    _check_apart(path, places)
    return places


def _check_apart(path: Path, places: Mapping[str, TensorPlace]) -> None:
    in_order = sorted(places.items(), key=lambda item: (item[1].start, item[1].stop))
    for (first, place), (second, following) in pairwise(in_order):
        if following.start < place.stop:
            raise CheckpointError(f"{path} has a corrupt header: tensors {first} and {second} overlap")


def _place(path: Path, name: str, entry: Any, data: int, size: int) -> TensorPlace:
    try:
        dtype, shape = str(entry["dtype"]), tuple(index(extent) for extent in entry["shape"])
        start, stop = (index(offset) + data for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a corrupt header entry for tensor {name}: {error!r}") from error
    if dtype not in _ITEM_SIZES:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(_ITEM_SIZES)}")
    if min(shape, default=0) < 0 or not data <= start <= stop or stop - start != math.prod(shape) * _ITEM_SIZES[dtype]:
        raise CheckpointError(f"{path}: tensor {name} of shape {list(shape)} claims bytes {start} to {stop}")
    if stop > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name} ends at byte {stop}, the file at {size}; download it again"
        )
    return TensorPlace(dtype, shape, start, stop)


class MappedFile:
    """A file whose tensors are views of its mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = read_header(path)
        with path.open("rb") as file:
            # Copy-on-write, because torch refuses to view memory it may not write; nothing is ever written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._map.madvise(mmap.MADV_SEQUENTIAL)

    def view(self, name: str) -> torch.Tensor:
        """The whole tensor, not read yet."""
        import torch

        place = self.places[name]
        dtype: torch.dtype = getattr(torch, _TORCH_NAMES[place.dtype])
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=dtype)
        if place.start % dtype.itemsize:
            # A header whose length is no multiple of 8 leaves the data unaligned; such a tensor is copied.
            data = bytearray(self._map[place.start : place.stop])
            return torch.frombuffer(data, dtype=dtype).view(place.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place.start).view(place.shape)

    def drop_pages(self, name: str) -> None:
        """Give a tensor's pages back to the page cache, so that they do not count as this process'."""
        place = self.places[name]
        first = place.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, place.stop - first)

    def close(self) -> None:
        """Let go of the mapping; a view that still lives, say in a traceback, keeps it until it goes.

        Never ``mmap.close``: torch refers to the map without locking it, and would read unmapped memory.
        """
        del self._map


class SafetensorsWriter:
    """Writes a file of tensors whose shapes are known beforehand, in any order, from several threads."""

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """Tensors that ``dtypes`` leaves out are F32. Raises CheckpointError for a dtype that is not read here."""
        header, self._offsets, offset = {}, dict[str, int](), 0
        for name, shape in shapes.items():
            dtype = "F32" if dtypes is None or name not in dtypes else _dtype_name(dtypes[name])
            size = math.prod(shape) * _ITEM_SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            self._offsets[name] = offset
            offset += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
        self._data = _LENGTH_BYTES + len(encoded)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._write_all(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, 0)
        os.ftruncate(self._file, self._data + offset)

    def write(self, name: str, data: memoryview, *, first_byte: int = 0) -> None:
        """Store ``data`` (bytes of its dtype) as the tensor's bytes from ``first_byte`` on."""
        self._write_all(data, self._data + self._offsets[name] + first_byte)

    def _write_all(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    found = next((short for short, long in _TORCH_NAMES.items() if long == name), None)
    if found is None:
        raise CheckpointError(
            f"a tensor of dtype {name} cannot be stored; supported: {', '.join(_TORCH_NAMES.values())}"
        )
    return found
