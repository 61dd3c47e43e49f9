"""`fourfold ps`: the processes of this user's deployments, read from their run directories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from fourfold.supervision.run_directory import Deployment, deployments, process_age

if TYPE_CHECKING:
    from rich.table import Table


def build_command() -> click.Command:
    """The command."""

    @click.command("ps", help="Show running deployments and their processes.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def command(as_json: bool) -> None:
        found = deployments()
        if as_json:
            click.echo(json.dumps(_as_values(found), indent=2))
        elif not found:
            click.echo("no deployment is running")
        else:
            from fourfold_server.terminal import output_console

            output_console().print(_table(found))

    return command


def _as_values(found: list[Deployment]) -> list[dict[str, object]]:
    import msgspec

    return [msgspec.to_builtins(deployment) for deployment in found]


def _table(found: list[Deployment]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("DEPLOYMENT", "MODEL", "ROLE", "LABEL", "PID", "AGE", "STATE", "DETAIL"):
        table.add_column(heading, overflow="fold")
    for deployment in found:
        for process in deployment.processes:
            table.add_row(
                deployment.name,
                deployment.model,
                process.role,
                process.label,
                str(process.pid),
                _shown_age(process_age(process)),
                process.state,
                process.detail,
            )
    return table


def _shown_age(seconds: float | None) -> str:
    """In the largest unit that there is one of; empty for a process of another host."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"
