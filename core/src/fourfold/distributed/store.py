"""What ranks tell each other before they can talk: small values under names, in a torch.distributed Store.

Every wait has a deadline and names the ranks that it waited for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fourfold.errors import ConfigError, EngineError, RpcTimeout

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def open_store(rendezvous: str, *, world_size: int, timeout: float) -> Any:
    """The store at ``file://PATH`` or ``tcp://HOST:PORT``; a tcp one must be listening already.

    Raises ConfigError for anything else, EngineError for a store that cannot be reached.
    """
    url = urlsplit(rendezvous)
    if url.scheme == "file" and url.path:
        return FileStore(url.path, world_size)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ConfigError(f"the ranks' meeting place is {rendezvous!r}; file://PATH or tcp://HOST:PORT")
    try:
        return TCPStore(url.hostname, url.port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise EngineError(f"no store answers at {rendezvous} within {timeout:g} s: {error}") from error


def host_store(listener: socket.socket, *, timeout: float) -> Any:
    """The store of whoever connects to ``listener``, which it takes over; it is there as long as somebody holds it."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def scoped(store: Any, prefix: str) -> Any:
    """The same store, with every key under ``prefix``."""
    return PrefixStore(prefix, store)


def host_identity() -> str:
    """Equal for processes that can see each other's descriptors: of one boot and one pid namespace."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


def fetch(store: Any, key: str, *, rank: int, timeout: float, what: str) -> bytes:
    """The value that global ``rank`` puts under ``key``; raises RpcTimeout naming it."""
    try:
        store.wait([key], timedelta(seconds=timeout))
        return bytes(store.get(key))
    except RuntimeError as error:
        raise RpcTimeout(what, timeout, [rank]) from error


def exchange(
    store: Any, key: str, value: bytes, *, rank: int, ranks: Sequence[int], timeout: float, what: str
) -> list[bytes]:
    """All ranks' values under ``key``, in order; ``rank`` is this process' place in ``ranks``.

    A key serves once. Raises RpcTimeout naming the (global) ranks that gave none; ``what`` is for the message.
    """
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{place}" for place in range(len(ranks))]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [ranks[place] for place, one in enumerate(keys) if not store.check([one])]
        raise RpcTimeout(what, timeout, missing) from error
    return [bytes(store.get(one)) for one in keys]
