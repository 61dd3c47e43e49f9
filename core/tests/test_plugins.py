"""Loading plugins: what is refused, in which words, and what a broken plugin leaves of the others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from fourfold import hookimpl
from fourfold.config.engine_config import EngineConfig
from fourfold.entries import ExecutorEntry, LoadBalancerEntry, ParallelLayerEntry
from fourfold.errors import ConfigError, PluginError
from fourfold.messages import EngineStats
from fourfold.offers import OFFER_KINDS
from fourfold.plugins import load_plugins

GOOD = """
from fourfold import hookimpl
from fourfold.entries import ExecutorEntry
FOURFOLD_CONTRACT = ">=1.0,<2"
@hookimpl
def fourfold_executors():
    return [ExecutorEntry(name="NAME", build=lambda context: None)]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put distributions on sys.path, as pip would: install(distribution, version, {entry point: source})."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def install(distribution, version, plugins, folder: Path = tmp_path):
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = ["[fourfold]"]
        for name, source in plugins.items():
            module = f"{distribution}_{name}".replace("-", "_")
            (folder / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}")
            made.append(module)
        (info / "entry_points.txt").write_text("\n".join(lines))

    yield install
    for module in made:
        sys.modules.pop(module, None)


def refused(plugin, name="mine"):
    with pytest.raises(PluginError) as caught:
        load_plugins(entry_points=False, extra={name: plugin})
    return str(caught.value)


def offering(**hooks):
    """A plugin object whose hooks return what is given."""
    plugin = SimpleNamespace()
    for hook, returned in hooks.items():

        def implementation(returned=returned):
            return returned

        setattr(plugin, f"fourfold_{hook}", hookimpl(implementation))
    return plugin


def entry(name, **fields):
    return ExecutorEntry(name=name, build=lambda context: None, **fields)


# --- what loads ---------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_with_its_origin(install):
    install("dist-a", "1.2", {"a": GOOD.replace("NAME", "alpha")})
    registry = load_plugins()
    assert "alpha" in registry.executors()
    assert ("a", "dist-a", "1.2") in [(row.plugin, row.distribution, row.version) for row in registry.manifest]


def test_core_is_a_plugin_like_any_other():
    registry = load_plugins()
    assert "core" in [row.plugin for row in registry.manifest]
    assert {"fcfs", "priority"} <= registry.schedulers().keys()
    assert load_plugins(entry_points=False).schedulers() == {}


def test_loading_twice_gives_the_same(install):
    install("dist-a", "1.2", {"a": GOOD.replace("NAME", "alpha")})
    first, second = load_plugins(), load_plugins()
    assert first.manifest == second.manifest
    assert [(one.kind, one.key, one.origin) for one in first.offered] == [
        (one.kind, one.key, one.origin) for one in second.offered
    ]
    assert "alpha" in second.executors()


def test_plugins_are_sorted_by_name_whatever_the_file_system_says(install):
    for name in ("zeta", "alpha", "mid"):
        install(f"dist-{name}", "1", {name: GOOD.replace("NAME", name)})
    registry = load_plugins()
    assert [row.plugin for row in registry.manifest] == sorted(row.plugin for row in registry.manifest)
    assert list(registry.executors()) == sorted(registry.executors())


def test_every_offer_has_a_typed_method_and_a_hook():
    registry = load_plugins(entry_points=False)
    for kind in OFFER_KINDS:
        assert getattr(registry, kind)() == {}, kind


def test_parallel_layers_are_unique_within_their_kind():
    layers = [ParallelLayerEntry(name="x", kind=kind, build=lambda context: None) for kind in ("row", "column")]
    registry = load_plugins(entry_points=False, extra={"mine": offering(parallel_layers=layers)})
    assert list(registry.parallel_layers()) == [("column", "x"), ("row", "x")]


# --- what is broken -----------------------------------------------------------------------------------------------


def test_a_plugin_that_cannot_be_imported_is_a_warning_and_the_rest_loads(install):
    install("dist-a", "1.2", {"a": GOOD.replace("NAME", "alpha")})
    install("dist-broken", "0.1", {"broken": "import no_such_module"})
    registry = load_plugins()
    assert "alpha" in registry.executors()
    [warning] = registry.warnings
    for part in ("'broken'", "dist-broken 0.1", "dist_broken_broken", "No module named 'no_such_module'", "uninstall"):
        assert part in warning


def test_a_plugin_that_leaves_the_process_is_a_warning(install):
    install("dist-broken", "0.1", {"broken": "raise SystemExit(3)"})
    assert "SystemExit: 3" in load_plugins().warnings[0]


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ("", "states no FOURFOLD_CONTRACT, and this core's contract is 1.0"),
        ('FOURFOLD_CONTRACT = ">=2,<3"', "written for contract >=2,<3, and this core's contract is 1.0"),
        ('FOURFOLD_CONTRACT = "soon"', "'soon', which is no version range"),
        ("FOURFOLD_CONTRACT = 1", "1, which is no version range"),
    ],
)
def test_a_contract_that_does_not_match_is_refused_with_both_versions(install, stated, says):
    install("dist-old", "0.9", {"old": stated})
    [warning] = load_plugins().warnings
    assert "plugin 'old' (dist-old 0.9)" in warning
    assert says in warning


def test_two_distributions_with_one_plugin_name_are_an_error_that_names_both(install, tmp_path):
    install("dist-one", "1.0", {"same": GOOD})
    install("dist-two", "2.0", {"same": GOOD})
    with pytest.raises(PluginError, match=r"'same' is claimed by dist-one 1.0 and dist-two 2.0; uninstall"):
        load_plugins()


def test_a_stale_second_installation_is_reported(install, tmp_path, monkeypatch):
    install("dist-a", "1.2", {"a": GOOD.replace("NAME", "alpha")})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "stale")])
    install("dist-a", "0.3", {"a": GOOD.replace("NAME", "alpha")}, folder=tmp_path / "stale")
    registry = load_plugins()
    assert ("dist-a", "1.2") in [(row.distribution, row.version) for row in registry.manifest]
    assert any("dist-a is installed twice, as 1.2 and as 0.3" in warning for warning in registry.warnings)


def test_two_plugins_with_one_entry_name_are_an_error_that_names_both():
    registry = load_plugins(
        entry_points=False, extra={"one": offering(executors=[entry("x")]), "two": offering(executors=[entry("x")])}
    )
    with pytest.raises(PluginError, match=r"two plugins offer executor 'x': plugin 'one' .* and plugin 'two'"):
        registry.executors()
    assert [line.partition(";")[0] for line in registry.clashes] == [
        "two plugins offer executor 'x': plugin 'one' (given in code) and plugin 'two' (given in code)"
    ]
    assert registry.communicators() == {}


def test_traces_are_shown_where_logging_is_not_set_up():
    code = "from fourfold.plugins import load_plugins\nload_plugins()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FOURFOLD_TRACE_HOOKS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "INFO fourfold_models of plugin 'core'" in result.stderr


def test_a_misspelt_hook_is_refused_with_the_right_one():
    message = refused(offering(executor=[]))
    assert "fourfold_executor, which is no hook" in message
    assert "did you mean fourfold_executors() -> list[ExecutorEntry]?" in message


def test_an_optional_hook_may_be_unknown():
    class Plugin:
        @hookimpl(optionalhook=True)
        def fourfold_hooks_of_tomorrow(self): ...

    assert load_plugins(entry_points=False, extra={"mine": Plugin()}).warnings == ()


def bad_keyword_only(*, config): ...


def bad_unknown(config, device): ...


def bad_collected(*args): ...


def bad_generator(config):
    yield


async def bad_coroutine(config): ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (bad_keyword_only, "'config' as keyword only"),
        (bad_unknown, "'device', which the hook does not give"),
        (bad_collected, "'*args', which hooks never fill"),
        (bad_generator, "generator or a coroutine"),
        (bad_coroutine, "generator or a coroutine"),
    ],
)
def test_a_hook_with_a_wrong_signature_is_refused_with_the_specification(function, says):
    class Plugin:
        fourfold_check_config = staticmethod(hookimpl(function))

    message = refused(Plugin())
    assert "plugin 'mine'" in message
    assert "Plugin.fourfold_check_config" in message
    assert says in message
    assert "the hook is fourfold_check_config(config: EngineConfig) -> None" in message


def test_wrappers_are_refused():
    class Plugin:
        @hookimpl(wrapper=True)
        def fourfold_step_finished(self, stats):
            yield

    assert "is a wrapper" in refused(Plugin())


def test_a_hook_without_its_mark_is_refused():
    class Plugin:
        def fourfold_executors(self):
            return []

    assert "not marked and would never be called; put @hookimpl" in refused(Plugin())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned NoneType, not list[ExecutorEntry]"),
        (entry("x"), "returned ExecutorEntry, not list[ExecutorEntry]"),
        (["x"], "an entry of type str; it must be list[ExecutorEntry]"),
        ([LoadBalancerEntry(name="x", build=print)], "an entry of type LoadBalancerEntry"),
        ([entry("My-Executor")], "offers the name 'My-Executor'; a name is lowercase letters"),
        ([entry("x"), entry("x")], "offers the name 'x' twice"),
        ([ExecutorEntry(name="x", build=None)], "must be functions"),
        ([ExecutorEntry(name="x", build=print, summary=None)], "summary of executor 'x' is None; it must be"),
        ([ExecutorEntry(name="x", build=print, capabilities=3)], "capabilities of executor 'x' is 3; it must be"),
    ],
)
def test_a_wrong_return_value_is_refused(returned, says):
    message = refused(offering(executors=returned))
    assert "plugin 'mine'" in message
    assert says in message


def test_a_hook_that_raises_is_refused_by_name():
    class Plugin:
        @hookimpl
        def fourfold_executors(self):
            raise KeyError("nothing")

    assert "plugin 'mine' (given in code): fourfold_executors raised KeyError: 'nothing'" in refused(Plugin())


def test_a_hook_cannot_end_the_process():
    class Plugin:
        @hookimpl
        def fourfold_executors(self):
            raise SystemExit(3)

    assert "fourfold_executors raised RuntimeError: SystemExit: 3" in refused(Plugin())


@pytest.mark.parametrize(("file", "content"), [("METADATA", "x\n"), ("entry_points.txt", "[fourfold]\nbroken\n")])
def test_damaged_metadata_is_a_warning_and_the_rest_loads(tmp_path, monkeypatch, file, content):
    folder = tmp_path / "damaged-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[fourfold]\ndamaged = damaged\n")
    (folder / file).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = load_plugins()
    assert any("has damaged metadata" in warning and str(tmp_path) in warning for warning in registry.warnings)
    assert "core" in [row.plugin for row in registry.manifest]


def test_a_broken_plugin_leaves_nothing_behind(install):
    install("dist-half", "1", {"half": GOOD + "\n@hookimpl\ndef fourfold_routes():\n    return 1\n"})
    registry = load_plugins()
    assert "half" not in [row.plugin for row in registry.manifest]
    assert "NAME" not in registry.executors()


@pytest.mark.parametrize("name", ["Mine", "my plugin", "-x"])
def test_a_plugin_name_is_lowercase_with_dashes(name):
    assert "lowercase letters, digits and dashes" in refused(offering(), name)


# --- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Good:
    threads: int = 1


@dataclass
class Changeable:
    threads: int = 1


@dataclass(frozen=True)
class Incomplete:
    threads: int


@dataclass(frozen=True)
class Unreadable:
    threads: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Unresolved:
    threads: Nowhere = 1  # noqa: F821


@dataclass(frozen=True)
class Mistyped:
    threads: int = "many"


@dataclass(frozen=True)
class Refusing:
    threads: int = 1

    def __post_init__(self):
        raise ValueError("never")


def test_settings_are_given_by_plugin_name():
    registry = load_plugins(entry_points=False, extra={"my-plugin": offering(settings=Good)})
    assert registry.settings() == {"my-plugin": Good}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Good(), "return a dataclass itself, not an instance"),
        (int, "returned int; return a dataclass"),
        (Changeable, "Changeable can be changed; make it @dataclass(frozen=True)"),
        (Incomplete, "Incomplete.threads has no default"),
        (Unreadable, "Unreadable.threads is of type <class 'dict'>, which no option can have"),
        (Unresolved, "the types of settings Unresolved cannot be read: name 'Nowhere' is not defined"),
        (Mistyped, "Mistyped.threads has the default 'many'; it must be a whole number"),
        (Refusing, "settings Refusing refuse their own defaults: ValueError: never"),
    ],
)
def test_settings_that_no_option_can_be_made_from_are_refused(settings, says):
    assert says in refused(offering(settings=settings))


# --- check and events ---------------------------------------------------------------------------------------------


class Checker:
    def __init__(self, error):
        self.error = error

    @hookimpl
    def fourfold_check_config(self, config):
        raise self.error


def test_a_check_refuses_a_config():
    registry = load_plugins(entry_points=False, extra={"mine": Checker(ConfigError("too large"))})
    with pytest.raises(ConfigError, match=r"^too large$"):
        registry.check_config(EngineConfig())


def test_a_check_that_breaks_is_attributed():
    registry = load_plugins(entry_points=False, extra={"mine": Checker(KeyError("x"))})
    with pytest.raises(PluginError, match=r"plugin 'mine' .*fourfold_check_config raised KeyError"):
        registry.check_config(EngineConfig())


class Listener:
    def __init__(self, error=None):
        self.heard = []
        self.error = error

    @hookimpl
    def fourfold_step_finished(self, stats):
        self.heard.append(stats)
        if self.error:
            raise self.error

    @hookimpl
    def fourfold_worker_lost(self, cause):
        self.heard.append(cause)


def test_events_reach_every_plugin_with_the_arguments_that_it_names():
    one, two = Listener(), Listener()
    events = load_plugins(entry_points=False, extra={"one": one, "two": two}).events
    stats = EngineStats(num_steps=3)
    events.step_finished(stats)
    events.worker_lost(1, "killed")
    events.engine_stopped(None)
    assert one.heard == two.heard == [stats, "killed"]


def test_an_event_that_raises_is_logged_once_and_disturbs_nobody(caplog):
    broken, fine = Listener(ValueError("no disk")), Listener()
    events = load_plugins(entry_points=False, extra={"broken": broken, "fine": fine}).events
    for _ in range(3):
        events.step_finished(EngineStats())
    assert len(broken.heard) == len(fine.heard) == 3
    [record] = caplog.records
    assert "plugin 'broken' (given in code): fourfold_step_finished raised ValueError: no disk" in record.message


def test_calls_of_hooks_are_traced_when_asked(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    load_plugins(entry_points=False, extra={"mine": offering(executors=[])})
    assert caplog.records == []
    monkeypatch.setenv("FOURFOLD_TRACE_HOOKS", "1")
    registry = load_plugins(entry_points=False, extra={"mine": offering(executors=[]), "listener": Listener()})
    registry.events.worker_lost(0, "killed")
    messages = [record.message for record in caplog.records]
    assert "fourfold_executors of plugin 'mine' (given in code) returned []" in messages
    assert "fourfold_worker_lost of plugin 'listener' (given in code) is called" in messages
