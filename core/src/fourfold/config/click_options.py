"""Draws options for the command line. Values stay as typed; ``OptionSet`` reads them, like those of files."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import click

from fourfold.config.option_values import is_list, split_optional
from fourfold.config.options import Option, OptionSet

F = TypeVar("F", bound=Callable[..., Any])


def config_options(options: OptionSet, *, skip: Collection[str] = ()) -> Callable[[F], F]:
    """A decorator that gives a click command all ``options`` (but those named in ``skip``), and ``--config``."""

    def decorate(command: F) -> F:
        chosen = [_Drawn(option) for option in options.options.values() if option.name not in skip]
        params: list[click.Parameter] = getattr(command, "__click_params__", [])
        params += [*reversed(chosen), _config_file()]  # click turns the order round
        command.__click_params__ = params  # type: ignore[attr-defined]
        return command

    return decorate


class ConfigCommand(click.Command):
    """A command whose help lists config options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section under its own heading."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = parameter.section if isinstance(parameter, _Drawn) else "Options"
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


class _Drawn(click.Option):
    """One config option as click shows it."""

    def __init__(self, option: Option) -> None:
        accepted, _ = split_optional(option.annotation)
        names = [f"{option.flag}/--no-{option.flag[2:]}"] if accepted is bool else [option.flag]
        super().__init__(
            [*names, option.name],
            default=None,
            type=bool if accepted is bool else str,
            multiple=is_list(accepted),
            metavar=_metavar(accepted, is_size=option.is_size),
            help=_help(option),
        )
        self.section = f"{option.section} options"


def _config_file() -> click.Option:
    return click.Option(
        ["--config", "config_file"],
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="A YAML file with one 'option: value' a line; the command line and FOURFOLD_* variables come first.",
    )


def _metavar(accepted: Any, *, is_size: bool) -> str | None:
    if accepted is bool:
        return None
    if typing.get_origin(accepted) is Literal:
        return "[" + "|".join(map(str, typing.get_args(accepted))) + "]"
    if is_list(accepted):
        return "TEXT,..."
    return "BYTES" if is_size else {int: "N", float: "NUMBER"}.get(accepted, "TEXT")


def _help(option: Option) -> str:
    if is_list(option.annotation):
        return f"{option.help} Put commas between several, or repeat the option."
    if option.default in (None, ""):
        return option.help
    default = {True: "on", False: "off"}[option.default] if isinstance(option.default, bool) else option.default
    return f"{option.help} [default: {default}]"
