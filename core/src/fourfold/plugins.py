"""Finds plugins, checks them one by one, and hands out what they offer, typed. Alone in touching plugin hooks."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from fourfold import entries, hookspecs
from fourfold.errors import ConfigError, PluginError
from fourfold.hook_checks import check_contract, check_hooks, check_offer, check_settings, hook_specifications
from fourfold.markers import ENTRY_POINT_GROUP
from fourfold.offers import OFFER_KINDS, Offered, Offers, Origin, clashes
from fourfold.plugin_entry_points import import_plugin, origin_of, sorted_entry_points

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.parallel_layer import LayerKind
    from fourfold.messages import EngineReady, EngineStats, RequestOutput

E = TypeVar("E", bound=entries.Entry[Any])
_log = logging.getLogger(__name__)
_trace = logging.getLogger("fourfold.hooks")


def load_plugins(*, entry_points: bool = True, extra: Mapping[str, object] | None = None) -> PluginRegistry:
    """Load every installed plugin, by name, and ask each what it offers.

    A plugin that is broken is left out, whole, and explained in ``registry.warnings``. ``extra`` adds plugin objects
    by name, for tests and programs that embed the runtime; a broken one of these is a PluginError.

    Raises PluginError when two distributions claim one plugin name.
    """
    loader = _Loader()
    if entry_points:
        for point in sorted_entry_points(loader.warnings):
            loader.load(point)
    for name, plugin in sorted((extra or {}).items()):
        loader.add(plugin, Origin(plugin=name, distribution="given in code", version=""))
    return loader.registry()


class PluginRegistry:
    """What all loaded plugins offer. Read only; the same in every process with the same distributions."""

    def __init__(
        self,
        hooks: _Hooks,
        origins: Mapping[str, Origin],
        offered: list[Offered],
        settings: Mapping[str, type[Any]],
        warnings: tuple[str, ...],
    ) -> None:
        self._hooks = hooks
        self._settings = dict(sorted(settings.items()))
        self.offered = tuple(sorted(offered, key=lambda one: (one.kind, one.key)))
        """Every entry of every kind, sorted."""
        self.manifest: tuple[Origin, ...] = tuple(sorted(origins.values()))
        """The plugins that are loaded; ranks compare this before they meet."""
        self.warnings = warnings
        """Why plugins were left out, one line each; the command logs them once."""
        self.clashes = clashes(self.offered)
        """Names that two plugins offer, one line each; asking for entries of such a kind is a PluginError."""
        self.events = PluginEvents(hooks)
        """Tells plugins what has happened."""

    def executors(self) -> dict[str, entries.ExecutorEntry]:
        """Executors by name."""
        return self._offers(entries.ExecutorEntry)

    def communicators(self) -> dict[str, entries.CommunicatorEntry]:
        """Communicators by name."""
        return self._offers(entries.CommunicatorEntry)

    def parallel_layers(self) -> dict[tuple[LayerKind, str], entries.ParallelLayerEntry]:
        """Parallel layers by (kind, name)."""
        return self._offers(entries.ParallelLayerEntry)

    def load_balancers(self) -> dict[str, entries.LoadBalancerEntry]:
        """Load balancers by name."""
        return self._offers(entries.LoadBalancerEntry)

    def schedulers(self) -> dict[str, entries.SchedulerEntry]:
        """Scheduling policies by name."""
        return self._offers(entries.SchedulerEntry)

    def linear_methods(self) -> dict[str, entries.LinearMethodEntry]:
        """Linear methods by name."""
        return self._offers(entries.LinearMethodEntry)

    def attention_backends(self) -> dict[str, entries.AttentionBackendEntry]:
        """Attention backends by name."""
        return self._offers(entries.AttentionBackendEntry)

    def operators(self) -> dict[str, entries.OperatorsEntry]:
        """Operators by name."""
        return self._offers(entries.OperatorsEntry)

    def models(self) -> dict[str, entries.ModelEntry]:
        """Model descriptions by name."""
        return self._offers(entries.ModelEntry)

    def checkpoint_formats(self) -> dict[str, entries.CheckpointFormatEntry]:
        """Checkpoint formats by name."""
        return self._offers(entries.CheckpointFormatEntry)

    def checkpoint_sources(self) -> dict[str, entries.CheckpointSourceEntry]:
        """Checkpoint sources by name."""
        return self._offers(entries.CheckpointSourceEntry)

    def tokenizers(self) -> dict[str, entries.TokenizerEntry]:
        """Tokenizers by name."""
        return self._offers(entries.TokenizerEntry)

    def tool_parsers(self) -> dict[str, entries.ToolParserEntry]:
        """Tool parsers by name."""
        return self._offers(entries.ToolParserEntry)

    def reasoning_parsers(self) -> dict[str, entries.ReasoningParserEntry]:
        """Reasoning parsers by name."""
        return self._offers(entries.ReasoningParserEntry)

    def routes(self) -> dict[str, entries.RoutesEntry]:
        """HTTP routes by name."""
        return self._offers(entries.RoutesEntry)

    def all_to_alls(self) -> dict[str, entries.AllToAllEntry]:
        """All-to-alls by name."""
        return self._offers(entries.AllToAllEntry)

    def experts(self) -> dict[str, entries.ExpertsEntry]:
        """Experts by name."""
        return self._offers(entries.ExpertsEntry)

    def expert_placements(self) -> dict[str, entries.ExpertPlacementEntry]:
        """Expert placements by name."""
        return self._offers(entries.ExpertPlacementEntry)

    def rebalancers(self) -> dict[str, entries.RebalancerEntry]:
        """Rebalancers by name."""
        return self._offers(entries.RebalancerEntry)

    def settings(self) -> dict[str, type[Any]]:
        """Each plugin's settings dataclass, by the plugin's name."""
        return dict(self._settings)

    def check_config(self, config: EngineConfig) -> None:
        """Let every plugin refuse ``config``.

        Raises the plugin's ConfigError, or PluginError naming the plugin whose check broke.
        """
        for hook in self._hooks.of("check_config"):
            try:
                hook.call({"config": config})
            except ConfigError:
                raise
            except Exception as error:
                raise PluginError(hook.blame(error)) from error

    def _offers(self, entry_type: type[E]) -> Offers[Any, E]:
        clashing = clashes(one for one in self.offered if isinstance(one.entry, entry_type))
        if clashing:
            raise PluginError(clashing[0])
        table: dict[Any, E] = {}
        origins: dict[Any, Origin] = {}
        for one in self.offered:
            if not isinstance(one.entry, entry_type):
                continue
            table[one.key] = one.entry
            origins[one.key] = one.origin
        return Offers(table, origins, self.warnings)


class PluginEvents:
    """Tells plugins what has happened. A plugin that raises is logged once, by name, and disturbs nobody."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks = {
            event: hooks.of(event)
            for event in ("engine_started", "step_finished", "request_finished", "worker_lost", "engine_stopped")
        }
        self._reported: set[tuple[str, str]] = set()

    def engine_started(self, info: EngineReady) -> None:
        """An engine takes requests."""
        self._tell("engine_started", info=info)

    def step_finished(self, stats: EngineStats) -> None:
        """A step is done."""
        self._tell("step_finished", stats=stats)

    def request_finished(self, output: RequestOutput) -> None:
        """A request has ended."""
        self._tell("request_finished", output=output)

    def worker_lost(self, rank: int, cause: str) -> None:
        """A worker is gone."""
        self._tell("worker_lost", rank=rank, cause=cause)

    def engine_stopped(self, info: EngineReady) -> None:
        """An engine is about to leave."""
        self._tell("engine_stopped", info=info)

    def _tell(self, event: str, **arguments: object) -> None:
        for hook in self._hooks[event]:
            try:
                hook.call(arguments)
            except Exception as error:  # an event must never break the engine that reports it
                if (event, hook.origin.plugin) not in self._reported:
                    self._reported.add((event, hook.origin.plugin))
                    _log.exception("%s; later failures of this hook are not logged", hook.blame(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hook:
    """One plugin's implementation of one hook."""

    name: str
    origin: Origin
    function: Callable[..., object]
    arguments: tuple[str, ...]
    traced: bool

    def call(self, arguments: Mapping[str, object]) -> object:
        if not self.traced:
            return self._call(arguments)
        _trace.info("%s of %s is called", self.name, self.origin)
        returned = self._call(arguments)
        _trace.info("%s of %s returned %r", self.name, self.origin, returned)
        return returned

    def _call(self, arguments: Mapping[str, object]) -> object:
        try:
            return self.function(**{name: arguments[name] for name in self.arguments})
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin must not end the process, with SystemExit say
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def blame(self, error: Exception) -> str:
        return f"{self.origin}: {self.name} raised {type(error).__name__}: {error}"


class _Hooks:
    """The plugin manager, asked for one hook's implementations at a time so that each keeps its origin."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(ENTRY_POINT_GROUP)
        for module in hookspecs.MODULES:
            self._manager.add_hookspecs(module)
        self._origins: dict[str, Origin] = {}
        self._traced = os.environ.get("FOURFOLD_TRACE_HOOKS") == "1"
        if self._traced:
            _show_traces()

    def register(self, plugin: object, origin: Origin) -> None:
        """Take a plugin in, or leave everything as it was and raise."""
        self._origins[origin.plugin] = origin
        try:
            self._manager.register(plugin, name=origin.plugin)
            self._manager.check_pending()
        except Exception:
            self.unregister(origin)
            raise

    def unregister(self, origin: Origin) -> None:
        """Forget a plugin."""
        self._origins.pop(origin.plugin, None)
        if self._manager.has_plugin(origin.plugin):
            self._manager.unregister(name=origin.plugin)

    def of(self, hook: str, plugin: str | None = None) -> tuple[_Hook, ...]:
        """The implementations of ``fourfold_<hook>``, or only ``plugin``'s, in the order of calls."""
        name = f"{ENTRY_POINT_GROUP}_{hook}"
        found = reversed(getattr(self._manager.hook, name).get_hookimpls())  # the manager calls the last one first
        return tuple(
            _Hook(
                name=name,
                origin=self._origins[one.plugin_name],
                function=one.function,
                arguments=tuple(one.argnames),
                traced=self._traced,
            )
            for one in found
            if plugin in (None, one.plugin_name)
        )


def _show_traces() -> None:
    """Who asks for traces sees them, in programs too that have not set up logging, or have not yet."""
    _trace.setLevel(logging.INFO)
    if not _trace.hasHandlers():
        logging.basicConfig(format="%(levelname)s %(message)s")


class _Loader:
    """Takes plugins in one by one; a broken one leaves a warning and nothing else."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._hooks = _Hooks()
        self._specifications = hook_specifications()
        self._origins: dict[str, Origin] = {}
        self._offered: list[Offered] = []
        self._settings: dict[str, type[Any]] = {}

    def load(self, point: metadata.EntryPoint) -> None:
        """Import one entry point and take it in, or note why not."""
        origin = origin_of(point)
        try:
            plugin = import_plugin(point, origin)
            check_contract(sys.modules[point.module], origin)
            self.add(plugin, origin)
        except PluginError as error:
            self.warnings.append(str(error))

    def add(self, plugin: object, origin: Origin) -> None:
        """Check a plugin and ask it what it offers; raises PluginError and keeps nothing of a broken one."""
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", origin.plugin):
            raise PluginError(f"{origin}: a plugin's name is lowercase letters, digits and dashes, as in 'executor-mp'")
        if origin.plugin in self._origins:
            raise PluginError(f"{origin} has the name of {self._origins[origin.plugin]}; rename one of them")
        check_hooks(plugin, origin, self._specifications)
        try:
            self._hooks.register(plugin, origin)
        except Exception as error:
            raise PluginError(f"{origin} cannot be registered: {error}") from error
        try:
            offered = [one for kind in OFFER_KINDS for one in self._ask(kind, origin)]
            settings = [check_settings(_answer(h), origin) for h in self._hooks.of("settings", plugin=origin.plugin)]
        except PluginError:
            self._hooks.unregister(origin)
            raise
        self._origins[origin.plugin] = origin
        self._offered += offered
        self._settings.update((origin.plugin, one) for one in settings)

    def registry(self) -> PluginRegistry:
        """Everything that was taken in."""
        return PluginRegistry(self._hooks, self._origins, self._offered, self._settings, tuple(self.warnings))

    def _ask(self, kind: str, origin: Origin) -> Iterator[Offered]:
        for hook in self._hooks.of(kind, plugin=origin.plugin):
            for entry in check_offer(_answer(hook), hook.name, OFFER_KINDS[kind], origin):
                yield Offered(kind=kind, entry=entry, origin=origin)


def _answer(hook: _Hook) -> object:
    try:
        return hook.call({})
    except Exception as error:
        raise PluginError(hook.blame(error)) from error
