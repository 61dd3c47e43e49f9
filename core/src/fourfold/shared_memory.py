"""Memory that the replicas of one host map together, so that what is equal in all of them is there once.

It has no name in any folder: children find it through /proc, and it is gone with whoever made it and those that map it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Final

from fourfold.errors import EngineError

VARIABLE: Final = "_FOURFOLD_SHARED_MEMORY"  # not FOURFOLD_*: those are options
"""Environment of engines and of their ranks: the path of the memory."""
HUGE_PAGE: Final = 2 << 20
_REGION: Final = 1 << 40
"""Bytes between the beginnings of two ranks' parts: more than any has, and nothing where nothing was written."""
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_MADV_REMOVE: Final = 9
_NO_ACCESS: Final = 0
_MAP_FIXED: Final = 0x10


class SharedMemory:
    """Made before the replicas are started; alive as long as this object."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("fourfold-shared")

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the engines."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        """Let go; whoever maps it keeps it. Twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedRegion:
    """What all replicas of one rank have in common. Each replica takes the same pieces in the same order."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._descriptor = descriptor
        self._next = rank * _REGION
        weakref.finalize(self, os.close, descriptor)

    def take(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """The next ``size`` bytes: zero, or what another replica has written, on huge pages where the kernel has them.

        They live as long as the array. Raises EngineError without memory.
        """
        length = -(-max(size, 1) // HUGE_PAGE) * HUGE_PAGE
        offset, self._next = self._next, self._next + length
        with self.locked():
            if os.fstat(self._descriptor).st_size < offset + length:
                os.ftruncate(self._descriptor, offset + length)
        address = _map(self._descriptor, offset, length)
        memory = (ctypes.c_char * length).from_address(address)
        weakref.finalize(memory, _libc().munmap, address, length)
        take_huge_pages(memory)
        return memory

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other replicas from writing, and wait until none does; they hold this for milliseconds."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def take_huge_pages(memory: ctypes.Array[ctypes.c_char]) -> None:
    """Have pages for all of ``memory``, huge ones where the kernel has them; what is there stays."""
    for start in range(0, len(memory), HUGE_PAGE):
        memory[start]  # a page must be there before it can become a huge one
    _libc().madvise(ctypes.addressof(memory), len(memory), _MADV_COLLAPSE)  # small pages work too


def free_pages(memory: ctypes.Array[ctypes.c_char]) -> None:
    """Give the pages of ``memory`` back: it reads as zero then, in every process that maps it."""
    if _libc().madvise(ctypes.addressof(memory), len(memory), _MADV_REMOVE):
        raise EngineError(f"cannot give shared memory back: {os.strerror(ctypes.get_errno())}")


def shared_region(rank: int) -> SharedRegion | None:
    """The part of rank ``rank`` of its engine; None in a deployment of one replica."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    try:
        return SharedRegion(os.open(path, os.O_RDWR | os.O_CLOEXEC), rank)
    except OSError:  # /proc shows other processes' files not everywhere; each replica then has its own
        return None


def _map(descriptor: int, offset: int, length: int) -> int:
    """Map at an address on which huge pages can lie."""
    reserved = _libc().mmap(None, length + HUGE_PAGE, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved in (None, ctypes.c_void_p(-1).value):
        raise EngineError(f"cannot reserve {length} bytes of addresses: {os.strerror(ctypes.get_errno())}")
    address = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc().mmap(address, length, protection, flags, descriptor, offset) != address:
        raise EngineError(f"cannot map {length} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    if address > reserved:
        _libc().munmap(reserved, address - reserved)
    end, reserved_end = address + length, reserved + length + HUGE_PAGE
    if reserved_end > end:
        _libc().munmap(end, reserved_end - end)
    return int(address)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
