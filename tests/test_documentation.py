"""Documents name what is there: every package has its line, and the README shows the two commands first."""

from __future__ import annotations

from pathlib import Path

import pytest

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
