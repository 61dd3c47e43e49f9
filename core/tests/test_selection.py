"""Picking entries: by name, by suitability, and the words when neither works."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from fourfold import hookimpl
from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.entries import CommunicatorEntry, ExecutorEntry, OperatorsEntry, ParallelLayerEntry, Suitability
from fourfold.errors import ConfigError, PluginError
from fourfold.offers import Offers, Origin
from fourfold.plugins import load_plugins
from fourfold.selection import explain, names_by_key, select, select_parallel_layers, suitability

CONFIG = EngineConfig()


def executor(name, score=1, reason="because"):
    return ExecutorEntry(
        name=name, build=lambda context: None, suits=lambda config: Suitability(score=score, reason=reason)
    )


def offers(*entries, broken=()):
    origins = {
        one.name: Origin(plugin=f"executor-{one.name}", distribution=f"fourfold-executor-{one.name}", version="0.1.0")
        for one in entries
    }
    return Offers({one.name: one for one in entries}, origins, broken)


def test_a_name_is_taken_as_it_is():
    selection = select("executor", offers(executor("mp"), executor("best", 100)), "mp", CONFIG)
    assert selection.entry.name == "mp"
    assert selection.reason == "executor 'mp': asked for by name"


def test_an_unknown_name_is_refused_with_a_suggestion_and_what_is_installed():
    with pytest.raises(PluginError) as caught:
        select("executor", offers(executor("mp"), executor("uniproc")), "mpp", CONFIG)
    assert str(caught.value) == (
        "no executor called 'mpp'; did you mean 'mp'? installed: mp (fourfold-executor-mp 0.1.0), "
        "uniproc (fourfold-executor-uniproc 0.1.0)"
    )


def test_an_unknown_name_shows_what_is_broken():
    broken = "plugin 'comm-x' (dist-x 0.1) failed to load: ImportError: libx.so"
    with pytest.raises(PluginError, match=r"no executor called 'x'; installed: none; plugin 'comm-x' \(dist-x 0.1\)"):
        select("executor", offers(broken=(broken,)), "x", CONFIG)


def test_a_named_entry_that_cannot_run_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="executor 'ray' cannot run here: no cluster; start one"):
        select("executor", offers(executor("ray", 0, "no cluster; start one")), "ray", CONFIG)


def test_a_refusal_names_what_could_run():
    table = offers(executor("uniproc", 0, "one rank"), executor("mp"), executor("ray", 0), executor("rdma", 5))
    with pytest.raises(ConfigError, match=r"cannot run here: one rank; installed and able to run here: mp, rdma$"):
        select("executor", table, "uniproc", CONFIG)


def test_a_default_is_not_called_a_wish():
    assert CONFIG.backends.scheduler == "fcfs"
    assert select("scheduler", offers(executor("fcfs")), "fcfs", CONFIG).reason == "scheduler 'fcfs' (default)"


def test_auto_takes_the_highest_score():
    selection = select("executor", offers(executor("a", 1), executor("b", 7, "fits"), executor("c", 3)), "auto", CONFIG)
    assert selection.entry.name == "b"
    assert selection.reason == "executor 'b' (auto): fits"


def test_a_tie_is_refused_with_both_names():
    with pytest.raises(ConfigError, match=r"'a' and 'b' suit equally well as executor \(score 5\); .*--executor"):
        select("executor", offers(executor("a", 5), executor("b", 5), executor("c", 1)), "auto", CONFIG)


def test_nothing_that_suits_is_refused_with_every_reason():
    with pytest.raises(ConfigError, match="no executor can run here: a: one rank only; b: no cluster"):
        select("executor", offers(executor("a", 0, "one rank only"), executor("b", 0, "no cluster")), "auto", CONFIG)
    with pytest.raises(ConfigError, match="no load balancer can run here: none is installed"):
        select("load_balancer", {}, "auto", CONFIG)


def test_an_entry_that_breaks_when_asked_cannot_run_and_says_so():
    def raising(config):
        raise KeyError("x")

    broken = dataclasses.replace(executor("bad"), suits=raising)
    wrong = dataclasses.replace(executor("wrong"), suits=lambda config: 100)
    assert select("executor", offers(broken, wrong, executor("good")), "auto", CONFIG).entry.name == "good"
    with pytest.raises(ConfigError, match=r"'bad' cannot run here: its suits\(\) raised KeyError"):
        select("executor", offers(broken), "bad", CONFIG)
    with pytest.raises(ConfigError, match=r"its suits\(\) returned int, not Suitability"):
        select("executor", offers(wrong), "wrong", CONFIG)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", {"tp": "auto", "pp": "auto"}),
        ("shm", {"tp": "shm", "pp": "shm"}),
        ("tp=shm", {"tp": "shm", "pp": "auto"}),
        ("tp=shm, pp=gloo", {"tp": "shm", "pp": "gloo"}),
    ],
)
def test_names_by_key(value, expected):
    assert names_by_key("--comm", value, ["tp", "pp"]) == expected


@pytest.mark.parametrize("value", ["dp=shm", "tp=", "tp=a,tp=b", "tp=a,b", "=a"])
def test_wrong_names_by_key_are_refused(value):
    with pytest.raises(ConfigError, match=r"--comm is .* is wrong in it; write tp=NAME"):
        names_by_key("--comm", value, ["tp", "pp"])


def layer(kind, name, score=1):
    return ParallelLayerEntry(
        kind=kind, name=name, build=lambda context: None, suits=lambda config: Suitability(score=score, reason="so")
    )


def test_parallel_layers_are_picked_by_kind():
    entries = {(one.kind, one.name): one for one in (layer("moe", "tp"), layer("moe", "ep", 0), layer("row", "tp"))}
    picked = select_parallel_layers(entries, ["moe", "row"], CONFIG)
    assert {kind: selection.entry.name for kind, selection in picked.items()} == {"moe": "tp", "row": "tp"}
    config = EngineConfig(backends=BackendConfig(parallel_layer="moe=ep"))
    with pytest.raises(ConfigError, match="moe parallel layer 'ep' cannot run here: so"):
        select_parallel_layers(entries, ["moe"], config)
    config = EngineConfig(backends=BackendConfig(parallel_layer="ep"))
    with pytest.raises(ConfigError, match="--parallel-layer is 'ep', and row has no layer of that name; write moe=ep"):
        select_parallel_layers(entries, ["row", "moe"], config)


def test_explain_covers_every_kind_and_says_why():
    class Mine:
        @hookimpl
        def fourfold_executors(self):
            return [executor("one", 3, "fits"), executor("two", 0, "no cluster")]

        @hookimpl
        def fourfold_communicators(self):
            return [CommunicatorEntry(name="shm", build=lambda context: None)]

    registry = load_plugins(entry_points=False, extra={"mine": Mine()})
    config = EngineConfig(backends=BackendConfig(comm="tp=shm,pp=gloo", scheduler="none"))
    found = {one.kind: one for one in explain(config, registry)}
    assert found["executor"].chosen == "one"
    assert [(one.name, one.score, one.reason) for one in found["executor"].candidates] == [
        ("one", 3, "fits"),
        ("two", 0, "no cluster"),
    ]
    assert found["communicator of tp"].chosen == "shm"
    assert found["communicator of pp"].chosen is None
    assert "no communicator of pp called 'gloo'" in found["communicator of pp"].reason
    assert found["scheduler"].reason == "no scheduler called 'none'; installed: none"


def test_explain_of_what_is_installed_here():
    found = {one.kind: one for one in explain(EngineConfig(), load_plugins())}
    assert found["scheduler"].chosen == "fcfs"
    assert found["qkv parallel layer"].chosen == "tp"


@pytest.mark.parametrize(
    "answer",
    [
        Suitability(score="9", reason="x"),
        Suitability(score=float("nan"), reason="x"),
        Suitability(score=9, reason=None),
    ],
)
def test_an_answer_of_wrong_types_cannot_run(answer):
    found = suitability(OperatorsEntry(name="x", build=print, suits=lambda config: answer), EngineConfig())
    assert found.score == 0
    assert "its suits() returned score" in found.reason


def test_an_entry_that_would_end_the_process_cannot_run():
    entry = OperatorsEntry(name="x", build=print, suits=lambda config: sys.exit(3))
    assert suitability(entry, EngineConfig()).reason == "its suits() raised SystemExit: 3"
