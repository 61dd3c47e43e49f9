"""The distributions of this repository, as their pyprojects describe them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECTS = sorted(path.parent for path in [*ROOT.glob("[!.]*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")])
PACKAGES = {next(path for path in (project / "src").iterdir() if path.is_dir()).name: project for project in PROJECTS}
CORE = ROOT / "core" / "src" / "fourfold"


def metadata(project: Path) -> dict:
    """The [project] table."""
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]


def name(project: Path) -> str:
    """The distribution's name."""
    return metadata(project)["name"]


def canonical(distribution: str) -> str:
    """The name as registries compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared(project: Path) -> set[str]:
    """Distributions that the project requires, extras included, and itself."""
    table = metadata(project)
    extras = [one for extra in table.get("optional-dependencies", {}).values() for one in extra]
    requirements = [re.match(r"[\w.-]+", one)[0] for one in table["dependencies"] + extras]
    return {canonical(one) for one in [*requirements, table["name"]]}


def sources(project: Path) -> list[Path]:
    """The package's Python files."""
    return sorted(project.glob("src/**/*.py"))


def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[tuple[str, str]]:
    """Every module that a file imports, with where; ``only_at_import`` leaves out functions and TYPE_CHECKING."""
    nodes = _run_at_import(tree(path)) if only_at_import else ast.walk(tree(path))
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for found in names:
            yield found, f"{path.relative_to(ROOT)}:{node.lineno}"


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)
