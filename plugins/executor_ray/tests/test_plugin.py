from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_config import NodeConfig
from fourfold.config.options import build_engine_config
from fourfold.config.parallel_config import ParallelConfig
from fourfold.errors import ConfigError
from fourfold.plugins import load_plugins
from fourfold.selection import select
from fourfold_executor_ray.settings import RaySettings, given_cluster

TWO = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_auto_takes_it_where_a_cluster_is_given_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = load_plugins().executors()
    assert select("executor", entries, "auto", TWO).entry.name == "mp"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert select("executor", entries, "auto", TWO).reason == (
        "executor 'ray' (auto): the Ray cluster 10.0.0.1:6379 is given (RAY_ADDRESS)"
    )
    given = dataclasses.replace(TWO, plugins={"ray": RaySettings(address="10.0.0.2:6379")})
    assert "10.0.0.2:6379 is given (--ray-address)" in select("executor", entries, "auto", given).reason


def test_by_name_it_needs_no_cluster() -> None:
    assert select("executor", load_plugins().executors(), "ray", TWO).entry.name == "ray"


def test_without_ray_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = load_plugins().executors()
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="executor 'ray' cannot run here: the package ray is not installed; pip"):
        select("executor", entries, "ray", TWO)
    assert select("executor", entries, "auto", TWO).entry.name == "mp"


def test_the_cluster_of_the_program_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = types.SimpleNamespace(gcs_address="10.0.0.3:1")
    ray = types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: connected)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert given_cluster(RaySettings()) == ("10.0.0.3:1", "ray.init in this program")
    assert given_cluster(RaySettings(address="auto")) == ("auto", "--ray-address")
    assert given_cluster(RaySettings(address="local")) == ("", "")


def test_settings_are_options() -> None:
    config = build_engine_config(load_plugins().settings(), ray_address="10.0.0.1:6379", ray_placement="strict-pack")
    assert config.plugins["ray"] == RaySettings(address="10.0.0.1:6379", placement="strict-pack")
    with pytest.raises(ConfigError, match="--ray-placement is 'diagonal'"):
        build_engine_config(load_plugins().settings(), ray_placement="diagonal")


@pytest.mark.parametrize("where", ["--ray-address", "RAY_ADDRESS"])
def test_addresses_for_programs_outside_the_cluster_are_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "ray://10.0.0.1:10001"
    if where == "RAY_ADDRESS":
        monkeypatch.setenv(where, url)
    settings = RaySettings(address=url if where == "--ray-address" else "")
    config = EngineConfig(backends=BackendConfig(executor="ray"), plugins={"ray": settings})
    with pytest.raises(ConfigError, match=f"{where} is '{url}', for programs outside the cluster; start fourfold on"):
        load_plugins().check_config(config)


def test_replicas_need_a_cluster_that_they_share() -> None:
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=2), backends=BackendConfig(executor="ray"))
    with pytest.raises(ConfigError, match="no Ray cluster is given that replicas could share"):
        load_plugins().check_config(config)


@pytest.mark.parametrize("setting", [{"placement_group": "mine"}, {"placement": "spread"}, {"address": "local"}])
def test_settings_of_another_executor_are_refused(setting: dict[str, str]) -> None:
    (name, value) = next(iter(setting.items()))
    settings = {"ray": RaySettings(**setting)}  # type: ignore[arg-type]
    option = f"--ray-{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} is '{value}', and the executor is 'mp'; use --executor ray"):
        load_plugins().check_config(EngineConfig(backends=BackendConfig(executor="mp"), plugins=settings))
    load_plugins().check_config(EngineConfig(backends=BackendConfig(executor="ray"), plugins=settings))


def test_options_of_other_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    several = dataclasses.replace(TWO, nodes=NodeConfig(nnodes=2))
    entries = load_plugins().executors()
    assert select("executor", entries, "auto", several).entry.name == "mp"
    with pytest.raises(ConfigError, match="--nnodes is 2, and Ray finds its nodes by itself"):
        select("executor", entries, "ray", several)
    chosen = dataclasses.replace(TWO, nodes=NodeConfig(node_interface="eth1"), backends=BackendConfig(executor="ray"))
    with pytest.raises(ConfigError, match="--node-interface is 'eth1', and ranks reach each other as the nodes"):
        load_plugins().check_config(chosen)
