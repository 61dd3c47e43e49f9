"""The `fourfold` command. Imports what a subcommand needs only when that subcommand runs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import click

from fourfold.errors import ConfigError, FourfoldError, PluginError
from fourfold.supervision.standard_streams import open_standard_streams


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subcommand:
    target: str
    """``module:function`` that builds the click command."""
    summary: str


_SUBCOMMANDS = {
    "serve": _Subcommand(target="fourfold_server.serve:build_command", summary="Serve a model over the OpenAI API."),
    "chat": _Subcommand(target="fourfold_server.chat:build_command", summary="Chat with a model in the terminal."),
    "bench": _Subcommand(target="fourfold_server.bench:build_command", summary="Measure throughput and latency."),
    "simulate": _Subcommand(
        target="fourfold_server.simulate:build_command", summary="Try a deployment that is not there."
    ),
    "plugins": _Subcommand(
        target="fourfold_server.plugins_command:build_command", summary="Show what is installed and what it offers."
    ),
    "ps": _Subcommand(target="fourfold_server.ps:build_command", summary="Show running deployments."),
}


class Refusal(click.ClickException):
    """What was asked for cannot work: one message, and exit status 2."""

    exit_code = 2


class _Commands(click.Group):
    """Subcommands by name; `--help` imports none of them."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line."""
        open_standard_streams()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and build one."""
        if cmd_name not in _SUBCOMMANDS:
            return None
        command: click.Command = resolve_name(_SUBCOMMANDS[cmd_name].target)()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown name with a suggestion."""
        if args and args[0] not in _SUBCOMMANDS:
            close = difflib.get_close_matches(args[0], _SUBCOMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands are {', '.join(_SUBCOMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.summary) for name, subcommand in _SUBCOMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Turn errors raised on purpose into one message and an exit status."""
        try:
            return super().invoke(ctx)
        except (ConfigError, PluginError) as error:
            raise Refusal(str(error)) from error
        except FourfoldError as error:
            raise click.ClickException(str(error)) from error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fourfold-server", prog_name="fourfold")
def main() -> None:
    """Serve large language models over one device or many, composed of plugins."""


if __name__ == "__main__":
    main()
