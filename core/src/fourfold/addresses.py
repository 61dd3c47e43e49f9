"""Where the processes of one node listen for each other: sockets in the run directory, which others cannot enter."""

from __future__ import annotations

from pathlib import Path

COORDINATOR = "coordinator"


def engine_socket(engine: int, incarnation: int) -> str:
    """The name of an engine's socket; what was meant for an earlier incarnation never reaches a later one."""
    return f"engine-{engine}-{incarnation}"


def api_socket(index: int) -> str:
    """The name of an API server's socket."""
    return f"api-{index}"


def socket_address(run_directory: Path, name: str) -> str:
    """The address of a socket by its name."""
    return f"ipc://{run_directory}/{name}"


def engine_address(run_directory: Path, engine: int, incarnation: int) -> str:
    """Where an engine takes requests."""
    return socket_address(run_directory, engine_socket(engine, incarnation))


def api_address(run_directory: Path, index: int) -> str:
    """Where an API server takes outputs."""
    return socket_address(run_directory, api_socket(index))


def coordinator_address(run_directory: Path) -> str:
    """Where the coordinator takes reports."""
    return socket_address(run_directory, COORDINATOR)
