"""`fourfold simulate balance`: what each load balancer would make of a load, on engines that are not there."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fourfold.config.engine_config import EngineConfig
from fourfold.config.field_docs import field_docs
from fourfold.plugins import load_plugins
from fourfold.selection import select
from fourfold.simulation.engine_model import EngineModel

if TYPE_CHECKING:
    from fourfold.simulation.cluster import Outcome
    from fourfold.simulation.figures import Figures
    from fourfold.simulation.workload import Workload

MAX_REPLICAS = 10_000
_LOADS = ("skewed", "conversations", "uniform")
_HEADINGS = ("queueing p50", "p99", "TTFT p50", "p99", "prefill tokens", "hit rate", "kept", "imbalance", "busy")
F = TypeVar("F", bound=Callable[..., Any])


def build_command() -> click.Group:
    """The command and its subcommand."""
    group = click.Group("simulate", help="Try a deployment that is not there, in virtual time.")
    group.add_command(_balance_command())
    return group


def _model_options(function: F) -> F:
    """One option a field of the engine model."""
    docs = field_docs(EngineModel)
    for field in reversed(dataclasses.fields(EngineModel)):
        option = click.option(
            "--" + field.name.replace("_", "-"),
            type=click.FloatRange(min=0) if isinstance(field.default, float) else click.IntRange(min=1),
            default=field.default,
            show_default=True,
            help=docs[field.name],
        )
        function = option(function)
    return function


def _balance_command() -> click.Command:
    count = click.IntRange(min=1)

    @click.command("balance", help="Compare load balancers: waiting, time to the first token, cache hits, evenness.")
    @click.option("--trace", type=click.Path(path_type=Path), help="Requests to replay: JSON lines, or .csv.")
    @click.option("--load", type=click.Choice(_LOADS), default=_LOADS[0], show_default=True, help="Made-up requests.")
    @click.option("--requests", type=count, default=20_000, show_default=True, help="How many of these.")
    @click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=14.0, show_default=True,
                  help="Of these, how many a second for each replica.")  # fmt: skip
    @click.option("--turns", type=count, default=5, show_default=True, help="Turns of a conversation.")
    @click.option("--replicas", type=click.IntRange(1, MAX_REPLICAS), default=8, show_default=True, help="Engines.")
    @click.option("--api-servers", type=count, default=4, show_default=True, help="Each with a balancer of its own.")
    @click.option("--policy", "policies", multiple=True, metavar="NAME", help="A load balancer. [default: all]")
    @click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all random choices.")
    @click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw an SVG file.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @_model_options
    def command(policies: tuple[str, ...], plot: Path | None, as_json: bool, **given: Any) -> None:
        model = EngineModel(**{field.name: given.pop(field.name) for field in dataclasses.fields(EngineModel)})
        cluster = {"num_engines": given["replicas"], "num_servers": given.pop("api_servers"), "seed": given["seed"]}
        outcomes = _simulate(_workload(**given), policies, model, cluster)
        _show(outcomes, as_json=as_json)
        if plot is not None:
            _draw(outcomes, plot)

    return command


def _workload(
    *, trace: Path | None, load: str, requests: int, rate: float, turns: int, replicas: int, seed: int
) -> Workload:
    from fourfold.simulation.workload import conversations, read_trace, skewed, uniform

    if trace is not None:
        return read_trace(trace)
    if load == "conversations":
        return conversations(requests, rate * replicas, seed, turns=turns)
    if load == "uniform":
        return uniform(requests, rate * replicas, seed)
    return skewed(requests, rate * replicas, seed)


def _simulate(
    workload: Workload, policies: Sequence[str], model: EngineModel, cluster: dict[str, int]
) -> dict[str, Outcome]:
    """One run a policy, by name. A bar on stderr shows how far each is, if that is a terminal."""
    from fourfold.simulation.cluster import SimulatedCluster

    installed = load_plugins().load_balancers()
    entries = [select("load balancer", installed, name, EngineConfig()).entry for name in policies or installed]
    outcomes = {}
    for entry in entries:
        with click.progressbar(length=1000, label=entry.name, file=sys.stderr) as bar:

            def show(share: float, bar: Any = bar) -> None:
                bar.update(int(1000 * share) - bar.pos)

            outcomes[entry.name] = SimulatedCluster(workload, entry.build, model=model, **cluster).run(show)
    return outcomes


def _show(outcomes: dict[str, Outcome], *, as_json: bool) -> None:
    from fourfold.simulation.figures import Figures

    figures = {name: Figures.of(outcome) for name, outcome in outcomes.items()}
    if as_json:
        click.echo(json.dumps({name: dataclasses.asdict(one) for name, one in figures.items()}, indent=2))
        return
    from rich.table import Table

    from fourfold_server.terminal import output_console

    table = Table(box=None, pad_edge=False)
    table.add_column("load balancer")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        table.add_row(name, *_cells(one))
    output_console().print(table)


def _cells(one: Figures) -> list[str]:
    times = (one.queueing_p50, one.queueing_p99, one.ttft_p50, one.ttft_p99)
    return [
        *(f"{1000 * seconds:,.0f} ms" for seconds in times),
        f"{one.prompt_tokens_computed:,}",
        f"{one.hit_rate:.1%}",
        "-" if one.kept is None else f"{one.kept:.1%}",
        f"{one.imbalance:.2f}x",
        f"{one.busy:.0%}",
    ]


def _draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """Two charts: how many requests have waited how long, and how uneven the engines were over time."""
    from fourfold.simulation.figures import imbalance_curve, ttft_curve
    from fourfold_server.line_chart import LineChart, Panel, Series

    waits, unevenness = [], []
    for name, outcome in outcomes.items():
        seconds, shares = ttft_curve(outcome)
        waits.append(Series(name=name, x=seconds, y=[100 * share for share in shares]))
        times, ratios = imbalance_curve(outcome)
        unevenness.append(Series(name=name, x=times, y=ratios))
    chart = LineChart(
        panels=(
            Panel(title="Requests with their first token", x_label="seconds", y_label="%", x_log=True, series=waits),
            Panel(
                title="Tokens to do: busiest engine over the average",
                x_label="seconds of the simulation",
                y_label="x",
                series=unevenness,
            ),
        )
    )
    try:
        path.write_text(chart.svg())
    except OSError as error:
        raise click.ClickException(f"the plot cannot be written to {path}: {error}") from error
