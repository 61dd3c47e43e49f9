"""Tells what a rank refused from what it failed at. Knows no call."""

from __future__ import annotations

from fourfold.errors import CheckpointError, ConfigError, FourfoldError, PluginError, WorkerError


def refusal(error: WorkerError, *, num_ranks: int) -> FourfoldError | None:
    """The error of a rank as what it is, if the user can change what is wrong; it travelled by the name of its type."""
    kind = next(
        (kind for kind in (ConfigError, CheckpointError, PluginError) if kind.__name__ == error.type_name), None
    )
    if kind is None:
        return None
    return kind(error.message if num_ranks == 1 else f"rank {error.rank}: {error.message}")
