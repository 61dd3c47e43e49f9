"""The store of ranks that a launcher started: where MASTER_ADDR and MASTER_PORT point, one part of it an engine."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from fourfold.errors import EngineError


def open_launched_store(*, rank: int, world_size: int, timeout: float) -> Any:
    """The part of the launcher's store that belongs to the next engine; every rank must open its engines in one order.

    Rank 0 hosts the store unless the launcher does. Raises EngineError for a store that cannot be reached.
    """
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout)))
        number = store.add(f"fourfold/engines of rank {rank}", 1)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise EngineError(
            f"rank {rank} of {world_size} did not meet the others at {place} (MASTER_ADDR and MASTER_PORT) within "
            f"{timeout:g} s: {error}"
        ) from error
    return PrefixStore(f"fourfold/engine {number}", store)


def worker_store(store: Any) -> Any:
    """A part of the store for the worker alone, over a connection of its own, so that it may wait in it."""
    return PrefixStore("worker", store.clone())
