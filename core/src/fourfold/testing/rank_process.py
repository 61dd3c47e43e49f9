"""One rank of a ``RankPool``: runs functions that the pool names, until the pool lets go of the line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold.distributed.store import open_store, scoped
from fourfold.serialization import decode, encode

LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a function on a rank gets first."""

    rank: int
    world_size: int
    store: Any
    """A torch.distributed Store of this call alone."""


def send_frame(line: socket.socket, value: Any) -> None:
    """One value, its length first."""
    data = encode(value)
    line.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive_frame(line: socket.socket) -> Any:
    """The next value; EOFError when the other side is gone."""
    return decode(_receive(line, int.from_bytes(_receive(line, LENGTH_BYTES), "little")))


def _receive(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = line.recv(min(1 << 20, count - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def serve(line: socket.socket, rank: int, world_size: int, store: Any) -> None:
    """Answer calls: (number, file, qualified name, arguments) -> (True, value) or (False, traceback)."""
    while True:
        try:
            number, file, name, args = receive_frame(line)
        except EOFError:
            return
        try:
            own = Rank(rank=rank, world_size=world_size, store=scoped(store, f"call {number}"))
            answer = (True, _load(file, name)(own, *args))
            send_frame(line, answer)
        except BaseException:  # whatever a rank raises is the answer
            send_frame(line, (False, traceback.format_exc()))


def _load(file: str, name: str) -> Callable[..., Any]:
    """A function by file and name: test files are not importable by module name."""
    path = Path(file)
    module_name = f"_ranks_{abs(hash(file))}_{path.stem}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def main() -> None:
    """Run as a process; the pool passes the descriptors."""
    parser = argparse.ArgumentParser()
    for option in ("rank", "world-size", "line", "store"):
        parser.add_argument(f"--{option}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    store = open_store(f"file:///proc/self/fd/{given.store}", world_size=given.world_size, timeout=60.0)
    serve(socket.socket(fileno=given.line), given.rank, given.world_size, store)
    os._exit(0)  # threads of a vetoed communicator may still hang


if __name__ == "__main__":
    main()
