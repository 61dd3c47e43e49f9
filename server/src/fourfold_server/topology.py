"""What `/topology` shows: the processes that the run directory names, the groups of ranks, and the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fourfold.client.engine_client import EngineClient
from fourfold.config.parallel_config import ParallelConfig
from fourfold.contracts.load_balancer import EngineState
from fourfold.messages import EngineReady
from fourfold.supervision.run_directory import ProcessState, running_processes
from fourfold_server.node_table import read_nodes


def read_topology(run_directory: Path, parallel: ParallelConfig, client: EngineClient) -> dict[str, Any]:
    """As JSON-able values; the same in every API server."""
    layout = parallel.layout
    processes = running_processes(run_directory)
    return {
        "nodes": [msgspec.to_builtins(row) for row in read_nodes(run_directory)],
        "processes": [_shown(state) for state in processes],
        "groups": {
            "tp": layout.tp_groups(),
            "pp": layout.pp_groups(),
            "dp": layout.dp_groups(),
            "ep": layout.ep_groups(),
        },
        "replicas": [
            {
                "rank": link.rank,
                "label": f"DP{link.rank}",
                "state": "running" if link.state is EngineState.READY else link.condition,
                "incarnation": link.incarnation,
                **({"error": link.failure} if link.failure else {}),
                **_communicators(link.ready),
            }
            for link in client.links
        ],
    }


def _communicators(ready: EngineReady | None) -> dict[str, str]:
    """What moves tensors in which group, where there are any and it is known."""
    found = "" if ready is None else ready.backends.get("comm", "")
    return {"comm": found} if found not in ("", "none") else {}


def _shown(state: ProcessState) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(state)
    del shown["start_time"]
    if not state.node:
        del shown["node"]
    return shown
