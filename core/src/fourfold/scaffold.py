"""``python -m fourfold.scaffold executor NAME [FOLDER]`` writes a plugin that works and passes its tests as it is."""

from __future__ import annotations

import re
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from fourfold.errors import ConfigError, FourfoldError
from fourfold.hookspecs import CONTRACT_VERSION


def _templates() -> Traversable:
    return resources.files("fourfold") / "templates"


def kinds() -> list[str]:
    """What can be written: the names of the templates."""
    return sorted(child.name for child in _templates().iterdir() if child.is_dir())


def write_plugin(kind: str, name: str, folder: Path) -> Path:
    """Write ``fourfold-<kind>-<name>`` into ``folder`` and return where it is.

    Raises ConfigError for a kind that there is no template of, a name that cannot be, and a place that is taken.
    """
    if kind not in kinds():
        raise ConfigError(f"no template called {kind!r}; there are {', '.join(kinds())}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ConfigError(f"name {name!r} must be lowercase letters, digits and underscores, such as 'slurm'")
    target = folder / f"fourfold-{kind}-{name.replace('_', '-')}"
    if target.exists():
        raise ConfigError(f"{target} is already there; choose another name or folder")
    major = int(CONTRACT_VERSION.split(".")[0])
    words = {
        "__plugin__": name,
        "__plugin-dashed__": name.replace("_", "-"),
        "__Plugin__": name.title().replace("_", ""),
        "__core_range__": _compatible(metadata.version("fourfold-core")),
        "__contract__": f">={CONTRACT_VERSION},<{major + 1}",
    }
    _copy(_templates() / kind, target, words)
    return target


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=f"Kinds: {', '.join(kinds())}.")
@click.argument("kind")
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path), default=".")
def main(kind: str, name: str, folder: Path) -> None:
    """Write a plugin of KIND called NAME into FOLDER."""
    try:
        click.echo(write_plugin(kind, name, folder))
    except FourfoldError as error:
        raise click.UsageError(str(error)) from error


def _compatible(version: str) -> str:
    """From this version up to the next that may break what was written for it."""
    major, minor = (int(part) for part in version.split(".")[:2])
    following = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f">={version},<{following}"


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    if source.is_dir():
        target.mkdir(parents=True)
        for child in source.iterdir():
            _copy(child, target / _fill(child.name.removesuffix(".tmpl"), words), words)
    else:
        target.write_text(_fill(source.read_text(encoding="utf-8"), words), encoding="utf-8")


def _fill(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


if __name__ == "__main__":
    main(prog_name="python -m fourfold.scaffold")
