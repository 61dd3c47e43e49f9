"""Joins a Ray cluster or starts one, and says what its nodes are. Only the driver's process imports this."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, Final

import ray

from fourfold.errors import ConfigError
from fourfold_executor_ray.messages import Plan
from fourfold_executor_ray.placement import Node, unique_names

_REACH_TIMEOUT: Final = 5.0
_OBJECT_STORE: Final = 80 << 20
"""Bytes, the least that Ray takes: nothing of ours goes through it."""

ABOUT_TOKENS: Final = "RAY_AUTH_MODE and RAY_AUTH_TOKEN must be as on its other nodes"


def join_cluster(plan: Plan) -> None:
    """Connect this process to the cluster of ``plan``. Raises ConfigError for one that cannot be joined."""
    options: dict[str, Any] = {
        "namespace": plan.namespace or None,
        "configure_logging": False,
        "logging_level": logging.WARNING,
        "log_to_driver": True,
    }
    if plan.address:
        _check_reachable(plan.address)
    try:
        if plan.address:
            ray.init(address=plan.address, **options)
        else:
            ray.init(
                address="local",
                # Ranks share cores, as they do in any other executor, where there are more ranks than cores.
                num_cpus=max(len(os.sched_getaffinity(0)), len(plan.labels)),
                object_store_memory=_OBJECT_STORE,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=plan.folder,
                **options,
            )
    except (Exception, SystemExit) as error:  # Ray raises of every kind
        raise ConfigError(_why_not(plan.address, error)) from error


def nodes() -> list[Node]:
    """The nodes that are alive."""
    kind = device_kind()
    alive = [row for row in ray.nodes() if row["Alive"]]
    names = unique_names([(row["NodeID"], row["NodeManagerHostname"]) for row in alive])
    return [
        Node(
            id=row["NodeID"],
            name=names[row["NodeID"]],
            address=row["NodeManagerAddress"],
            capacity=int(row["Resources"].get(kind, 0)),
        )
        for row in alive
    ]


def own_node() -> Node:
    """The node that this process is on."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in nodes() if node.id == own)


def device_kind() -> str:
    """What a rank takes one of: GPU where the cluster has any, else CPU."""
    return "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"


def free(kind: str) -> float:
    """How many of ``kind`` nobody has reserved."""
    return float(ray.available_resources().get(kind, 0.0))


def free_in_group(kind: str, group: str) -> dict[int, float]:
    """Bundle -> how many of ``kind`` nobody uses of it, in the placement group of this id."""
    prefix, suffix = f"{kind}_group_", f"_{group}"
    found = {}
    for name, amount in ray.available_resources().items():
        bundle = name.removeprefix(prefix).removesuffix(suffix)
        if name == f"{prefix}{bundle}{suffix}" and bundle.isdecimal():
            found[int(bundle)] = float(amount)
    return found


def _check_reachable(address: str) -> None:
    """Before Ray tries for a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # such as auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_TIMEOUT).close()
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}; give the HOST:PORT that `ray start --head` prints"
        ) from error


def _why_not(address: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # A line that ends with a colon goes on in those below it, as where versions differ.
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    if not address:
        return f"a Ray cluster cannot be started on this host: {text}"
    # Ray tells its log alone that a token is wrong.
    return f"the Ray cluster at {address} cannot be joined: {text}; {ABOUT_TOKENS}"


def leave_cluster() -> None:
    """Say goodbye to a cluster that goes on."""
    ray.shutdown()
