from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from fourfold import hookimpl
from fourfold.entries import LoadBalancerEntry
from fourfold.plugins import load_plugins
from fourfold_server import cli

POLICIES = ["least-work", "prefix-affinity", "random-two", "round-robin"]


def balance(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["simulate", "balance", "--requests", "300", *arguments])


def test_it_compares_all_installed_policies() -> None:
    result = balance("--replicas", "3")
    assert result.exit_code == 0, result.output
    header, *rows = result.stdout.splitlines()
    assert header.split()[:4] == ["load", "balancer", "queueing", "p50"]
    assert [row.split()[0] for row in rows] == POLICIES
    assert all(row.rstrip().endswith("%") for row in rows)


def test_figures_as_json() -> None:
    result = balance("--json", "--load", "conversations", "--policy", "prefix-affinity", "--api-servers", "2")
    figures = json.loads(result.stdout)
    assert list(figures) == ["prefix-affinity"]
    assert figures["prefix-affinity"]["ttft_p50"] > 0
    assert figures["prefix-affinity"]["kept"] > 0.5


def test_options_of_the_model_matter() -> None:
    slow = json.loads(balance("--json", "--policy", "round-robin", "--step-seconds", "1").stdout)
    assert slow["round-robin"]["ttft_p50"] > 1


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n0,100,5\n1,200,5\n")
    figures = json.loads(balance("--json", "--trace", str(path), "--policy", "random-two").stdout)
    assert figures["random-two"]["prompt_tokens_computed"] == 300
    path.write_text("arrival,prompt_tokens\n0,100\n")
    refused = balance("--trace", str(path))
    assert refused.exit_code == 2
    assert "line 2 has no 'output_tokens'" in refused.stderr


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    assert balance("--plot", str(path)).exit_code == 0
    root = ElementTree.parse(path).getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f".//{namespace}polyline")
    assert len(lines) == 2 * len(POLICIES)
    texts = {text.text for text in root.iter(f"{namespace}text")}
    assert set(POLICIES) < texts
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) > 10
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    refused = balance("--policy", "round-robin", "--plot", str(tmp_path / "nowhere" / "plot.svg"))
    assert refused.exit_code == 1
    assert "the plot cannot be written" in refused.stderr


def test_an_unknown_policy_is_refused() -> None:
    refused = balance("--policy", "round_robin")
    assert refused.exit_code == 2
    assert "no load balancer called 'round_robin'; did you mean 'round-robin'?" in refused.stderr


def test_too_many_replicas_are_refused() -> None:
    assert balance("--replicas", "10001").exit_code == 2


def test_an_outsiders_policy_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        def choose(self, request: object, loads: object) -> int:
            return len(loads) - 1

        def learn_prefixes(self, engine: int, marks: object) -> None: ...

    class Plugin:
        @hookimpl
        def fourfold_load_balancers(self) -> list[LoadBalancerEntry]:
            return [LoadBalancerEntry(name="the-last", build=lambda context: Last())]

    registry = load_plugins(extra={"outsider": Plugin()})
    monkeypatch.setattr("fourfold_server.simulate.load_plugins", lambda: registry)
    figures = json.loads(balance("--json", "--replicas", "4").stdout)
    assert list(figures) == sorted([*POLICIES, "the-last"])
    assert figures["the-last"]["imbalance"] == pytest.approx(4)
