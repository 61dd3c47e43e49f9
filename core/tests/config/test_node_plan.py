"""Which replicas a node has, in every mode, and which options do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.config.node_plan import check_offline_nodes, plan_nodes, spread_replicas
from fourfold.config.options import build_engine_config
from fourfold.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "num_engines", "local", "first_rank", "local_workers"),
    [
        ({}, 4, range(4), 0, 8),
        ({"data_parallel_size_local": 2}, 4, range(2), 0, 4),
        ({"data_parallel_size_local": 0}, 4, range(0), 0, 2),
        ({"headless": True, "data_parallel_start_rank": 1}, 4, range(1, 4), 0, 6),
        ({"headless": True, "data_parallel_start_rank": 2, "data_parallel_size_local": 1}, 4, range(2, 3), 0, 2),
        (
            {"data_parallel_hybrid_lb": True, "data_parallel_start_rank": 2, "data_parallel_size_local": 2},
            2,
            range(2),
            2,
            4,
        ),
        ({"data_parallel_rank": 3}, 1, range(1), 3, 2),
        ({"data_parallel_external_lb": True, "data_parallel_start_rank": 1}, 1, range(1), 1, 2),
    ],
)
def test_the_part_of_a_node(
    options: dict[str, Any], num_engines: int, local: range, first_rank: int, local_workers: int
) -> None:
    plan = plan_nodes(build_engine_config(data_parallel_size=4, tensor_parallel_size=2, **options))
    assert (plan.num_engines, plan.local, plan.first_rank) == (num_engines, local, first_rank)
    assert plan.local_workers == local_workers
    for place, engine in enumerate(plan.local):
        assert plan.first_local_rank(plan.first_rank + engine) == 2 * place


def test_an_engine_over_nodes_has_as_many_ranks_on_each() -> None:
    config = build_engine_config(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, node_rank=1, headless=True)
    assert plan_nodes(config).local_workers == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_parallel_size_local": 5}, "replicas 0 to 4, and --data-parallel-size is 4"),
        ({"data_parallel_rank": 4}, "replicas 4 to 4, and --data-parallel-size is 4"),
        ({"data_parallel_rank": 1, "data_parallel_size_local": 2}, "with an external balancer it is 1"),
        ({"data_parallel_start_rank": 2}, "add --headless, or --data-parallel-hybrid-lb"),
        ({"headless": True, "data_parallel_size_local": 0}, "leaves nothing to do"),
        ({"headless": True, "data_parallel_hybrid_lb": True}, "--headless answers no requests"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_rank": 1}, "exclude each other"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 0}, "wants 1 or more"),
        ({"nnodes": 2}, "--nnodes is 2, which cuts one engine over nodes"),
        ({"nnodes": 3, "data_parallel_size": 1}, "an engine has 2 ranks; each .* must be a multiple of 3"),
        ({"nnodes": 0}, "--nnodes is 0; 1 or more"),
        ({"nnodes": 2, "data_parallel_hybrid_lb": True}, "--nnodes is 2, .* every node answers; leave out --nnodes"),
        ({"nnodes": 2, "data_parallel_rank": 1}, "--nnodes is 2, .* every node answers; leave out --nnodes"),
        ({"nnodes": 2, "node_rank": 2}, "nodes count from 0"),
        ({"nnodes": 2, "node_rank": 1}, "all others need --headless"),
        ({"nnodes": 2, "master_address": "[::]"}, r"--master-address is '\[::\]', by which other nodes cannot reach"),
        ({"data_parallel_rpc_port": 0}, "--data-parallel-rpc-port is 0"),
        ({"data_parallel_start_rank": -1}, "--data-parallel-start-rank is -1"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_nodes(build_engine_config(**{"data_parallel_size": 4, "tensor_parallel_size": 2, **options}))


@pytest.mark.parametrize(
    "options", [{"headless": True}, {"data_parallel_rank": 0}, {"data_parallel_size_local": 1, "data_parallel_size": 2}]
)
def test_a_program_has_no_replicas_on_other_nodes(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--[a-z-]+ is \w+, .* for fourfold serve alone; leave it out"):
        check_offline_nodes(build_engine_config(**options).nodes)
    check_offline_nodes(build_engine_config(nnodes=2, master_address="10.0.0.1", data_parallel_size=2).nodes)


def test_replicas_of_several_nodes_are_whole_on_each() -> None:
    config = build_engine_config(
        data_parallel_size=6, tensor_parallel_size=2, nnodes=3, node_rank=2, headless=True, master_address="10.0.0.1"
    )
    spread = spread_replicas(config)
    assert (spread.nodes.nnodes, spread.nodes.data_parallel_address) == (1, "10.0.0.1")
    assert spread.nodes.data_parallel_rpc_port == config.nodes.master_port
    plan = plan_nodes(spread)
    assert (plan.num_engines, plan.local, plan.ranks_per_engine) == (6, range(4, 6), 2)
    with pytest.raises(ConfigError, match="--data-parallel-size 3: each node has as many whole replicas"):
        spread_replicas(build_engine_config(data_parallel_size=3, nnodes=2))
    uneven = build_engine_config(data_parallel_size=4, nnodes=2, data_parallel_size_local=3)
    with pytest.raises(ConfigError, match="--data-parallel-size-local is 3, and --nnodes 2 makes it 2"):
        spread_replicas(uneven)
    shifted = build_engine_config(data_parallel_size=4, nnodes=2, data_parallel_start_rank=2)
    with pytest.raises(ConfigError, match="--data-parallel-start-rank is 2, and --node-rank 0 makes it 0"):
        spread_replicas(shifted)
    alone = build_engine_config(tensor_parallel_size=2, nnodes=2)
    assert spread_replicas(alone) is alone
