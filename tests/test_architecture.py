"""Who may import whom, what may be imported when, and manners that hold in every file."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from fourfold.config import __path__ as CONFIG_PATH
from fourfold.config.field_docs import field_docs
from fourfold.config.options import OptionSet

from .distributions import CORE, PACKAGES, PROJECTS, ROOT, canonical, declared, imports, name, sources, tree

BANNED_FILE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "base", "tools", "shared"}
MAX_LINES = 400
WITH_TORCH = ("worker", "layers", "distributed", "models", "checkpoints", "serialization.py", "testing")
COMPUTING_PLUGINS = (
    "fourfold_comm_cpu",
    "fourfold_comm_nccl",
    "fourfold_kernels_cpu",
    "fourfold_kernels_triton",
    "fourfold_moe_ep",
)
ALL_SOURCES = [path for project in PROJECTS for path in sources(project)]
API_MODULES = (
    "fourfold",
    "fourfold.plugins",
    "fourfold.selection",
    "fourfold.manifest",
    "fourfold.serialization",
    "fourfold.builtin_plugin",
    "fourfold.config.options",
    "fourfold.config.click_options",
    "fourfold.config.resolution",
    "fourfold.engine.engine_core",
    "fourfold.engine.executor_client",
    "fourfold.client.engine_client",
    "fourfold.coordinator.coordinator_loop",
    "fourfold.coordinator.waves",
    "fourfold.text.hf_tokenizer",
    "fourfold.checkpoints.resolve",
    "fourfold_server.app",
    "fourfold_server.api_process",
    "fourfold_server.cli",
    "fourfold_server.roles",
    "fourfold_server.supervisor",
    "fourfold_comm_cpu.plugin",
    "fourfold_comm_nccl.plugin",
    "fourfold_executor_mp.plugin",
    "fourfold_executor_ray.plugin",
    "fourfold_executor_uniproc.plugin",
    "fourfold_kernels_cpu.plugin",
    "fourfold_kernels_triton.plugin",
    "fourfold_moe_ep.plugin",
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts[path.parts.index("src") + 1 :]
    return ".".join(part for part in parts if part != "__init__")


every_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
every_file = pytest.mark.parametrize("path", ALL_SOURCES, ids=relative)


# --- imports between distributions --------------------------------------------------------------------------------


@every_project
def test_imports_point_at_core_only(project: Path) -> None:
    for path in sources(project):
        for module, where in imports(path):
            package = module.split(".")[0]
            if package in PACKAGES and PACKAGES[package] != project:
                assert package == "fourfold", f"{where} imports {package}; plugins and server import core only"
                assert project.name != "core", f"{where}: core imports {package}"


def test_imports_in_core_point_down_the_list_of_packages() -> None:
    """What runs at import; annotations may name anything."""
    table = re.findall(r"^\| `fourfold\.(\w+)`", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    place = {package: number for number, package in enumerate(table)}
    assert set(place) == {path.parent.name for path in CORE.glob("*/__init__.py")} - {"templates"}
    for path in CORE.rglob("*.py"):
        own = path.relative_to(CORE).parts[0]
        for module, where in imports(path, only_at_import=True):
            package, *rest = module.split(".")
            if package == "fourfold" and rest and own in place:
                assert place.get(rest[0], place[own]) >= place[own], f"{where}: {own} imports {module}"


@every_project
def test_every_import_is_declared(project: Path) -> None:
    owners = packages_distributions()  # does not know editable installs, so add ours
    owners |= {package: [name(owner)] for package, owner in PACKAGES.items()}
    for path in sources(project):
        for module, where in imports(path):
            package = module.split(".")[0]
            if package in sys.stdlib_module_names:
                continue
            found = {canonical(owner) for owner in owners.get(package, [package])}
            assert found & declared(project), f"{where} imports {package}, which {project.name} does not declare"


def test_core_names_no_plugin() -> None:
    plugins = [project for project in PROJECTS if project.parent.name == "plugins"]
    names = {package for package, project in PACKAGES.items() if project in plugins}
    for project in plugins:
        source = "\n".join(path.read_text() for path in project.glob("src/*/plugin.py"))
        names |= set(re.findall(r'Entry\(\s*name="(\w+)"', source))
        names |= set(tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]["fourfold"])
    assert len(names) > len(plugins)
    for path in CORE.rglob("*.py"):
        texts = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
        # devices, libraries, rotary embeddings, groups of ranks and ends of cables, before they are anyone's backend
        found = texts & (names - {"torch", "cpu", "auto", "linear", "ep", "peer"})
        assert not found, f"{relative(path)} names {found}"


def test_hooks_are_called_in_one_file_only() -> None:
    for path in ALL_SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("hook", "get_hookimpls"):
                assert path == CORE / "plugins.py", f"{relative(path)}:{node.lineno} touches plugin hooks"


# --- torch --------------------------------------------------------------------------------------------------------


def test_torch_is_imported_late_outside_the_worker() -> None:
    for path in ALL_SOURCES:
        if path.is_relative_to(CORE) and path.relative_to(CORE).parts[0] in WITH_TORCH:
            continue
        package = path.parts[path.parts.index("src") + 1]
        if package in COMPUTING_PLUGINS and path.name not in ("plugin.py", "gpu_support.py"):
            continue
        for module, where in imports(path, only_at_import=True):
            assert module.split(".")[0] != "torch", f"{where} imports torch when it is imported"


def test_what_the_api_process_imports_brings_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {API_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
        "from fourfold.plugins import load_plugins\n"
        "registry = load_plugins()\n"
        "if 'torch' in sys.modules: sys.exit('discovery imports torch')\n"
        "if registry.warnings: sys.exit(str(registry.warnings))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_module_can_be_imported_alone() -> None:
    """With warnings as errors: no cycle that only another module's import hides."""
    modules = [module_of(path) for path in ALL_SOURCES if path.name != "__main__.py"]
    found = {
        module
        for path in ALL_SOURCES
        for module, _ in imports(path, only_at_import=True)
        if module.split(".")[0] not in PACKAGES
    }
    others = {module.split(".")[0] for module in found}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("import_each.py")), *sorted(others)],
        input="\n".join(modules),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stdout, result.stdout + result.stderr


# --- manners ------------------------------------------------------------------------------------------------------


@every_file
def test_manners(path: Path) -> None:
    text, module = path.read_text(), tree(path)
    where = relative(path)
    assert path.stem not in BANNED_FILE_NAMES, f"{where}: name the file for the one noun in it"
    assert len(text.splitlines()) <= MAX_LINES, f"{where} has {len(text.splitlines())} lines; {MAX_LINES} at most"
    if not module.body:
        return
    assert ast.get_docstring(module), f"{where} has no module docstring"
    is_kit = "testing" in path.parts
    for node in ast.walk(module):
        line = f"{where}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), f"{line} has a global statement"
        assert is_kit or not isinstance(node, ast.Assert), f"{line} asserts; raise an error of the tree"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{line} has a bare except"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called != "print", f"{line} prints; use logging, click.echo or a console"
            assert called != "time.sleep", f"{line} sleeps; wait for something, with a deadline"
            assert called != "object.__setattr__", f"{line} changes what is frozen"
            assert not called.startswith(("pickle.", "multiprocessing.")), f"{line} uses {called}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "cloudpickle", "multiprocessing"}, f"{line} imports {names}"


def config_classes() -> list[type]:
    modules = [importlib.import_module(f"fourfold.config.{one.name}") for one in pkgutil.iter_modules(CONFIG_PATH)]
    modules.append(importlib.import_module("fourfold_server.config"))
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__name__.endswith("Config") and dataclasses.is_dataclass(value)
    }
    return sorted(found, key=lambda one: one.__name__)


@pytest.mark.parametrize("owner", config_classes(), ids=lambda one: one.__name__)
def test_config_is_frozen_and_documented(owner: type) -> None:
    assert owner.__dataclass_params__.frozen
    assert "__slots__" in vars(owner)
    assert all(field.kw_only for field in dataclasses.fields(owner))
    options = OptionSet((owner,)).options.values()
    docs = field_docs(owner)
    undocumented = [option.name for option in options if option.owner is owner and option.field not in docs]
    assert undocumented == [], f"{owner.__name__}: write a string under {undocumented}"


def test_config_classes_are_found() -> None:
    names = {owner.__name__ for owner in config_classes()}
    assert {"EngineConfig", "ModelConfig", "CacheConfig", "ServerConfig"} <= names


def test_exports_are_sorted_and_real() -> None:
    import fourfold

    assert sorted(fourfold.__all__, key=lambda one: (not one.isupper(), one.lower() if one.islower() else one)) == (
        fourfold.__all__
    )
    for exported in fourfold.__all__:
        assert getattr(fourfold, exported) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fourfold.nothing  # noqa: B018
