"""Reads the header of a GGUF file: metadata and tensor table. Large arrays are skipped until they are asked for.

The gguf package's reader takes seconds for a vocabulary; this takes milliseconds. Layout: magic, version, counts,
(key, type, value) pairs, tensor infos, padding, data; see the GGUF specification in the ggml repository.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_COUNT_LIMIT = 1 << 32
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch counts; the file stores it reversed."""
    type: int
    """A ggml type number."""
    offset: int
    """First byte, counted from the start of the file."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array's place; read on demand."""

    type: int
    length: int
    start: int


class GgufFile:
    """A mapped file. Raises CheckpointError, naming file and offset, for anything that is not as the format says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap calls an empty file a ValueError
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._offset = 0
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._metadata = self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            raise CheckpointError(f"{path} is truncated or corrupt near byte {self._offset}: {error}") from error

    def __len__(self) -> int:
        return len(self._map)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays as lists."""
        value = self._metadata.get(key, default)
        return list(self._items(value)) if isinstance(value, _Array) else value

    def length(self, key: str) -> int:
        """Items of an array, without reading them; 0 if it is absent."""
        value = self._metadata.get(key)
        return value.length if isinstance(value, _Array) else 0

    def data(self, offset: int, size: int) -> memoryview:
        """Bytes of the file, not copied; must be released before ``close``."""
        return memoryview(self._map)[offset : offset + size]

    def drop_pages(self) -> None:
        """Give the file's pages back to the page cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap."""
        with suppress(BufferError):
            self._map.close()

    def _read_header(self) -> dict[str, Any]:
        if self._map[:4] != _MAGIC:
            raise CheckpointError(
                f"{self.path} is no GGUF file: it begins with {bytes(self._map[:4])!r}, not {_MAGIC!r}"
            )
        self._offset = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}; supported: 2 and 3, little endian")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._checked(num_pairs)):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(self._checked(num_tensors))]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path} has general.alignment {alignment!r}; a whole number above 0")
        data = -(-self._offset // alignment) * alignment
        for name, shape, kind, offset in infos:
            self.tensors[name] = GgufTensor(name, shape, kind, data + offset)
        return metadata

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > 8:
            raise CheckpointError(f"{self.path} is corrupt near byte {self._offset}: {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip_array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} is corrupt near byte {self._offset}: value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _skip_array(self) -> _Array:
        kind, length = self._scalar("I"), self._checked(self._scalar("Q"))
        array = _Array(kind, length, self._offset)
        if kind == _STRING:
            offset, read = self._offset, _LENGTH.unpack_from
            for _ in range(length):
                offset += _LENGTH.size + read(self._map, offset)[0]
            self._offset = offset
        elif kind in _SCALARS:
            self._offset += length * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise CheckpointError(f"{self.path} is corrupt near byte {self._offset}: array of type {kind}")
        if self._offset > len(self._map):
            raise CheckpointError(f"{self.path} is truncated: an array ends at byte {self._offset} of {len(self._map)}")
        return array

    def _items(self, array: _Array) -> Iterator[Any]:
        if array.type in _SCALARS:
            yield from struct.unpack_from(f"<{array.length}{_SCALARS[array.type]}", self._map, array.start)
            return
        offset, read, data = array.start, _LENGTH.unpack_from, self._map
        for _ in range(array.length):
            start = offset + _LENGTH.size
            offset = start + read(data, offset)[0]
            yield data[start:offset].decode("utf-8", errors="replace")

    def _string(self) -> str:
        length = self._checked(self._scalar("Q"))
        start = self._offset
        self._offset += length
        if self._offset > len(self._map):
            raise CheckpointError(f"{self.path} is truncated: a string ends at byte {self._offset} of {len(self._map)}")
        return self._map[start : self._offset].decode()

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._offset)
        self._offset += struct.calcsize("<" + code)
        return value

    def _checked(self, count: int) -> int:
        if count > min(_COUNT_LIMIT, len(self._map)):
            raise CheckpointError(f"{self.path} is corrupt near byte {self._offset}: a count of {count}")
        return count
