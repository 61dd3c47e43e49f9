"""Messages from one pipeline stage to another, each after a header of fixed size that the receiver compares.

Where the stages talk between devices, headers travel between the hosts: they are compared before anything is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from fourfold.errors import EngineError

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.distributed.group_coordinator import GroupCoordinator

_MAGIC: Final = 0x66_6F_75_72
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


class Layout(IntEnum):
    """What the TP ranks of a stage hold of a tensor."""

    REPLICATED = 0
    """All the same: each sends its part of it, and the parts are gathered on arrival."""
    SHARDED = 1
    """Each something else: it is sent as it is."""


class Header(NamedTuple):
    """What a message is, as both sides must see it."""

    magic: int
    message: int
    """Sequence number within its link, from 0."""
    step: int
    rows: int
    width: int
    dtype: int
    """A place in the list of dtypes that travel."""
    layout: int
    parts: int
    """Into how many the TP ranks cut it."""


HEADER_BYTES: Final = 8 * len(Header._fields)


def describe(step: int, tensor: torch.Tensor, *, layout: Layout, parts: int) -> Header:
    """The header of a message of tensors like ``tensor``, [rows] or [rows, width]; its number is filled in later."""
    width = tensor.shape[1] if tensor.dim() > 1 else 1
    return Header(_MAGIC, 0, step, tensor.shape[0], width, dtype_code(tensor.dtype), layout, parts)


def dtype_code(dtype: torch.dtype) -> int:
    """Its place among the dtypes that travel; raises EngineError for one that does not."""
    try:
        return _DTYPES.index(dtype)
    except ValueError:
        raise EngineError(
            f"{dtype} does not travel between stages; these do: {_words('dtype', range(len(_DTYPES)))}"
        ) from None


class OutLink:
    """The sending end of a link."""

    def __init__(self, group: GroupCoordinator, destination: int, *, nbytes: int, depth: int) -> None:
        host = _separate_host(group)
        self._headers = None if host is None else host.sender(destination, nbytes=HEADER_BYTES, depth=depth)
        room = HEADER_BYTES + nbytes if host is None else nbytes
        self._pipe = group.sender(destination, nbytes=room, depth=depth)
        self._header = torch.zeros(len(Header._fields), dtype=torch.int64)
        self._values = self._header.numpy()
        self._count = 0

    def send(self, header: Header, parts: Sequence[torch.Tensor]) -> None:
        """Returns when ``parts`` may change; see ``Sender.send``."""
        self._values[:] = header._replace(message=self._count)
        self._count += 1
        if self._headers is None:
            self._pipe.send([self._header, *parts])
        else:
            self._headers.send([self._header])
            self._pipe.send(parts)

    def close(self) -> None:
        """Idempotent."""
        self._pipe.close()
        if self._headers is not None:
            self._headers.close()


class InLink:
    """The receiving end of a link."""

    def __init__(self, group: GroupCoordinator, source: int, *, nbytes: int, depth: int, what: str) -> None:
        """``what`` is for messages."""
        host = _separate_host(group)
        self._headers = None if host is None else host.receiver(source, nbytes=HEADER_BYTES, depth=depth)
        room = HEADER_BYTES + nbytes if host is None else nbytes
        self._pipe = group.receiver(source, nbytes=room, depth=depth)
        self._header = torch.zeros(len(Header._fields), dtype=torch.int64)
        self._values = self._header.numpy()
        self._count = 0
        self._what = f"{what} from stage {source} (rank {group.ranks[source]})"

    def receive(self, header: Header, parts: Sequence[torch.Tensor]) -> None:
        """Fill ``parts``; raises EngineError where the message is another one than ``header`` tells."""
        expected = header._replace(message=self._count)
        self._count += 1
        if self._headers is None:
            length = self._pipe.receive([self._header, *parts])
            self._compare(expected)
            size = HEADER_BYTES + sum(part.nbytes for part in parts)
            if length != size:
                raise EngineError(f"{self._what} have {length} bytes, not {size}; the ranks have diverged")
        else:
            self._headers.receive([self._header])
            self._compare(expected)
            self._pipe.receive(parts)

    def close(self) -> None:
        """Idempotent."""
        self._pipe.close()
        if self._headers is not None:
            self._headers.close()

    def _compare(self, expected: Header) -> None:
        found = self._values.tolist()
        if tuple(found) == expected:
            return
        differences = [
            f"{name} is {_words(name, [theirs])}, not {_words(name, [ours])}"
            for name, theirs, ours in zip(Header._fields, found, expected)
            if theirs != ours
        ]
        raise EngineError(f"{self._what} are not those expected: {'; '.join(differences)}; the ranks have diverged")


def _separate_host(group: GroupCoordinator) -> Communicator | None:
    """What moves headers where tensors stay on their devices; None: they go with the tensors."""
    return None if group.host is group.communicator else group.host


def _words(field: str, values: Sequence[int]) -> str:
    names: Sequence[str] = ()
    if field == "dtype":
        names = [str(dtype).removeprefix("torch.") for dtype in _DTYPES]
    elif field == "layout":
        names = [layout.name.lower() for layout in Layout]
    return ", ".join(names[value] if 0 <= value < len(names) else str(value) for value in values)
