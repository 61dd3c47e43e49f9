"""What a rank says of its process. Called like a method of the worker, on every rank."""

from __future__ import annotations

from typing import Any

import msgspec

from fourfold.rpc.rank_executor import ROLE
from fourfold.supervision.run_directory import process_state


def describe_process(worker: object) -> dict[str, Any]:
    """A ProcessState as plain values, without the place of the rank."""
    state: dict[str, Any] = msgspec.to_builtins(process_state(ROLE, "", "running"))
    return state
