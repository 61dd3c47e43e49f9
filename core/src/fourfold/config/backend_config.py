"""Which plugin does which part, by name; ``auto`` asks every installed one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Names of backends. ``auto`` takes the one that suits best and logs why."""

    executor: str = "auto"
    """Who starts and calls the ranks."""
    data_parallel_backend: str = "auto"
    """Who places replicas: the executor does, so this is its name, and only one of the two has to be given."""
    comm: str = "auto"
    """Who moves tensors between ranks; one name, or one a group as in tp=shm,pp=gloo."""
    load_balancer: str = "auto"
    """Who chooses an engine for a request."""
    attention: str = "auto"
    """Who computes attention."""
    linear_method: str = "auto"
    """Who computes linear layers."""
    operators: str = "auto"
    """Who computes norms, activations and sampling."""
    parallel_layer: str = "auto"
    """Who cuts layers; one name, or one a kind as in moe=ep."""
    all_to_all: str = "auto"
    """Who carries tokens to the ranks of their experts; auto: nobody where those have the tokens already."""
    expert_placement: str = "auto"
    """Which rank holds which expert at the start."""
    rebalancer: str = "auto"
    """Who decides which experts get copies."""
    experts: str = "auto"
    """Who computes the experts of a mixture."""
    scheduler: str = "fcfs"
    """The order of requests: fcfs, or priority (lower numbers first)."""
