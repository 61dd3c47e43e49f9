from __future__ import annotations

from fourfold_executor_ray.environment import apply_variables, shared_variables


def test_all_travels_but_what_belongs_to_a_rank_a_node_or_a_process() -> None:
    mine = {"FOO": "1", "OMP_NUM_THREADS": "3", "FOURFOLD_DTYPE": "float32", "HF_HOME": "/models"}
    theirs = ["RANK", "LOCAL_RANK", "HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH", "RAY_ADDRESS", "GLOO_SOCKET_IFNAME"]
    assert shared_variables(mine | dict.fromkeys([*theirs, "_FOURFOLD_PARENT"], "x")) == mine


def test_what_a_node_says_of_itself_holds() -> None:
    there = {"HF_HOME": "/local"}
    apply_variables({"HF_HOME": "/models", "FOO": "1"}, there)
    assert there == {"HF_HOME": "/local", "FOO": "1"}
