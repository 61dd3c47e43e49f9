"""Which variables of the executor's process its ranks have too, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

_OF_ONE_RANK: Final = frozenset({"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
_OF_ONE_NODE: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "GLOO_SOCKET_IFNAME",
        "HOME",
        "HOSTNAME",
        "HOST_IP",
        "LOGNAME",
        "NCCL_SOCKET_IFNAME",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "TERM",
        "TMPDIR",
        "TP_SOCKET_IFNAME",
        "USER",
        "VIRTUAL_ENV",
        "XDG_RUNTIME_DIR",
        "_",
    }
)
_PREFIXES: Final = ("RAY_", "SSH_", "_FOURFOLD_")
"""Of Ray, a login and a process; they mean nothing elsewhere."""

_THREADS: Final = "OMP_NUM_THREADS"


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that travel: all but what belongs to one rank, one node or one process."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_ONE_RANK and name not in _OF_ONE_NODE and not name.startswith(_PREFIXES)
    }


def apply_variables(shared: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Set those that are not there: what a node says of itself holds."""
    for name, value in shared.items():
        environment.setdefault(name, value)


def forget_reserved_threads(environment: MutableMapping[str, str]) -> None:
    """Drop the number of threads that Ray set in this process, one for the CPU that a rank reserves; what the node says
    of it holds. Before the process takes another title, which may be written over what it started with.
    """
    at_start = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {variable.partition(b"=")[0] for variable in at_start}
    if b"PATH" in names and _THREADS.encode() not in names:
        environment.pop(_THREADS, None)
