"""`fourfold plugins`: what is installed, what each offers, whether it can run here, and what `auto` would choose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fourfold.config.click_options import ConfigCommand, config_options
from fourfold.config.engine_config import EngineConfig
from fourfold.config.options import OptionSet
from fourfold.config.resolution import settle
from fourfold.offers import OFFER_KINDS, Offered
from fourfold.plugins import PluginRegistry, load_plugins
from fourfold.selection import Explanation, explain, suitability

if TYPE_CHECKING:
    from rich.console import Console


def build_command() -> click.Command:
    """The command; it takes the options of an engine, because what suits depends on them."""
    registry = load_plugins()
    options = OptionSet((EngineConfig,), registry.settings())

    @click.command("plugins", cls=ConfigCommand, help="Show what is installed and what it offers.")
    @click.option("--explain", "explained", is_flag=True, help="Show what would be chosen with these options, and why.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @config_options(options)
    def command(explained: bool, as_json: bool, config_file: str | None, **given: object) -> None:
        settings = options.read(given, file=Path(config_file) if config_file else None)
        config, _ = settle(options.build(EngineConfig, settings), registry)
        explanations = explain(config, registry) if explained else []
        if as_json:
            values = [dataclasses.asdict(one) for one in explanations] if explained else _inventory(registry, config)
            click.echo(json.dumps(values, indent=2))
            return
        from fourfold_server.terminal import output_console

        console = output_console()
        if explained:
            _print_explanations(console, explanations)
        else:
            _print_inventory(console, registry, config)

    return command


def _inventory(registry: PluginRegistry, config: EngineConfig) -> dict[str, Any]:
    plugins = [
        {
            "plugin": origin.plugin,
            "distribution": origin.distribution,
            "version": origin.version,
            "offers": [_offer(one, config) for one in registry.offered if one.origin == origin],
        }
        for origin in registry.manifest
    ]
    return {"plugins": plugins, "broken": list(registry.warnings), "clashes": list(registry.clashes)}


def _offer(offered: Offered, config: EngineConfig) -> dict[str, Any]:
    suits = suitability(offered.entry, config)
    return {
        "kind": OFFER_KINDS[offered.kind].noun,
        "name": _name(offered),
        "summary": offered.entry.summary,
        "capabilities": sorted(offered.entry.capabilities),
        "can_run": suits.score > 0,
        "reason": suits.reason,
    }


def _name(offered: Offered) -> str:
    return "=".join(offered.key) if isinstance(offered.key, tuple) else str(offered.key)


def _print_inventory(console: Console, registry: PluginRegistry, config: EngineConfig) -> None:
    from rich.table import Table

    for plugin in _inventory(registry, config)["plugins"]:
        console.print(f"{plugin['distribution']} {plugin['version']} (plugin {plugin['plugin']!r})")
        table = Table(box=None, show_header=False, pad_edge=False)
        for _ in range(4):
            table.add_column(overflow="fold")
        for offer in plugin["offers"]:
            state = "ok" if offer["can_run"] else f"cannot run here: {offer['reason']}"
            table.add_row(f"  {offer['kind']}", offer["name"], offer["summary"], state)
        console.print(table)
    for warning in registry.warnings:
        console.print(f"broken: {warning}")
    for clash in registry.clashes:
        console.print(f"clash: {clash}")


def _print_explanations(console: Console, explanations: list[Explanation]) -> None:
    for one in explanations:
        console.print(one.reason)
        for candidate in one.candidates:
            console.print(f"  {candidate.name} ({candidate.package}): score {candidate.score}, {candidate.reason}")
