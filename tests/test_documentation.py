"""Documents name what is there: every package has its line, and the README shows the two commands first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fourfold.offers import OFFER_KINDS
from fourfold.plugins import load_plugins

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core/src/fourfold"
PACKAGES = [
    *(f"`fourfold.{init.parent.name}`" for init in sorted(CORE.glob("*/__init__.py"))),
    *(f"`plugins/{project.parent.name}`" for project in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_line_in_the_architecture(package: str) -> None:
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(f"| {package} |")]


def test_the_architecture_names_no_package_that_is_not_there() -> None:
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    named = {line.split("|")[1].strip() for line in lines if line.startswith(("| `fourfold.", "| `plugins/"))}
    assert named == set(PACKAGES)


def test_the_readme_shows_both_commands_first() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make serve") < text.index("make test") < text.index("curl ")


def test_the_readme_has_every_backend_that_an_option_names() -> None:
    shown, option = set(), ""
    for line in (ROOT / "README.md").read_text().splitlines():
        if line.startswith("| ") and line.endswith("` |"):
            _, _, named, backends, distribution, _ = (cell.strip(" `") for cell in line.split("|"))
            option = named or option
            shown |= {(option, name, distribution) for name in re.findall(r"[\w-]+(?=$|[:`])", backends)}
    offered = {
        (OFFER_KINDS[one.kind].option, one.entry.name, one.origin.distribution) for one in load_plugins().offered
    }
    assert not {row for row in offered - shown if row[0]}
