"""Named tensors and plain values between the ranks of a group, as typed msgpack and raw bytes. No pickle.

A message of tensors is a header of fixed size, which says what follows, and then each tensor as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from fourfold.errors import Unsupported
from fourfold.serialization import decode, encode

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator, Handle

HEADER_BYTES: Final = 4096
_LENGTH_BYTES: Final = 4


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class SentTensors:
    """Named tensors on their way; see ``fourfold.contracts.communicator.Handle``."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], communicator: Communicator, host: Communicator, destination: int
    ) -> None:
        entries = [
            _Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        handles = [host.isend(_header(entries), destination)]
        handles += [communicator.isend(tensor, destination) for tensor in tensors.values() if tensor.numel()]
        self._handles: list[Handle] = handles

    def wait(self, timeout: float | None = None) -> None:
        """See Handle; ``timeout`` is for each tensor."""
        for handle in self._handles:
            handle.wait(timeout)
        self._handles.clear()


class ReceivedTensors:
    """Named tensors that will come."""

    def __init__(self, communicator: Communicator, host: Communicator, source: int, device: torch.device) -> None:
        self._communicator = communicator
        self._source = source
        self._device = device
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._handle = host.irecv(self._header, source)
        self._tensors: dict[str, torch.Tensor] | None = None

    def wait(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """The tensors, in the sender's order; raises RpcTimeout past ``timeout`` seconds, for each tensor."""
        if self._tensors is not None:
            return self._tensors
        self._handle.wait(timeout)
        tensors: dict[str, torch.Tensor] = {}
        handles: list[Handle] = []
        for entry in _entries(self._header):
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=self._device)
            tensors[entry.name] = tensor
            if tensor.numel():
                handles.append(self._communicator.irecv(tensor, self._source))
        for handle in handles:
            handle.wait(timeout)
        self._tensors = tensors
        return tensors


def broadcast_value(value: Any, host: Communicator, source: int) -> Any:
    """``source``'s value on every rank; its length goes first."""
    data = encode(value) if host.rank == source else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    host.broadcast(length, source=source)
    count = int(length)
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(count, dtype=torch.uint8)
    host.broadcast(payload, source=source)
    return value if host.rank == source else decode(bytes(payload.numpy()))


def count_votes(vote: bool, host: Communicator) -> int:
    """How many ranks vote so."""
    return int(host.all_reduce(torch.tensor([int(vote)], dtype=torch.int64)))


def _header(entries: list[_Entry]) -> torch.Tensor:
    encoded = msgspec.msgpack.encode(entries)
    if len(encoded) > HEADER_BYTES - _LENGTH_BYTES:
        raise Unsupported(f"{len(entries)} tensors need a header of {len(encoded)} bytes; send fewer at a time")
    data = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _entries(header: torch.Tensor) -> list[_Entry]:
    data = bytes(header.numpy())
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length], type=list[_Entry])
    except msgspec.DecodeError as error:
        raise Unsupported(f"what came is no header of tensors: {error}; the ranks have diverged") from error
