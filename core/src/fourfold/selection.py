"""Picks one entry of a kind: by name, or the one that suits best. Says why, and what to do when none can be had."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.contracts.parallel_layer import LayerKind
from fourfold.entries import Entry, ParallelLayerEntry, Suitability
from fourfold.errors import ConfigError, PluginError
from fourfold.offers import OFFER_KINDS, Offers
from fourfold.plugins import PluginRegistry

E = TypeVar("E", bound=Entry[Any])
AUTO: Final = "auto"
COMM_GROUPS: Final = ("tp", "pp", "dp", "ep")
LAYER_KINDS: Final[tuple[LayerKind, ...]] = typing.get_args(LayerKind)
_OPTIONS: Final = {kind.noun: kind.option for kind in OFFER_KINDS.values()}
_DEFAULTS: Final = {"--" + field.name.replace("_", "-"): field.default for field in dataclasses.fields(BackendConfig)}
"""Names that nobody has to ask for, by option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection(Generic[E]):
    """The entry that was picked, and why, in one line."""

    entry: E
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One entry, and what it says of a config."""

    name: str
    package: str
    """Distribution and version."""
    summary: str
    score: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a config picks of one kind, and why."""

    kind: str
    """As in ``load balancer``, ``qkv parallel layer``."""
    asked: str
    """The name that the config gives, or ``auto``."""
    candidates: tuple[Candidate, ...]
    chosen: str | None
    reason: str
    """Why it is chosen, or why nothing can be."""


def select(kind: str, entries: Mapping[Any, E], name: str, config: EngineConfig) -> Selection[E]:
    """The entry called ``name``, or for ``auto`` the one that suits ``config`` best.

    ``kind`` is a noun for messages, such as ``executor``. Raises PluginError for a name that is not installed (with a
    suggestion, and what is broken), ConfigError for one that cannot run here, for a tie, and when nothing suits.
    """
    noun = kind.replace("_", " ")
    if name != AUTO:
        return _by_name(noun, entries, name, config)
    scored = {key: suitability(entry, config) for key, entry in entries.items()}
    best = max((suits.score for suits in scored.values()), default=0)
    winners = [key for key, suits in scored.items() if suits.score == best]
    if best <= 0:
        reasons = "; ".join(f"{key}: {suits.reason}" for key, suits in scored.items()) or "none is installed"
        raise ConfigError(f"no {noun} can run here: {reasons}{_broken(entries)}")
    if len(winners) > 1:
        names = " and ".join(repr(key) for key in winners)
        option = _OPTIONS.get(noun, "")
        how = f"name one with {option}" if option else "uninstall one of them"
        raise ConfigError(f"{names} suit equally well as {noun} (score {best}); {how}")
    chosen = winners[0]
    return Selection(entry=entries[chosen], reason=f"{noun} {chosen!r} (auto): {scored[chosen].reason}")


def select_parallel_layers(
    entries: Mapping[tuple[LayerKind, str], ParallelLayerEntry], kinds: Sequence[LayerKind], config: EngineConfig
) -> dict[LayerKind, Selection[ParallelLayerEntry]]:
    """One parallel layer of each of ``kinds``, as ``--parallel-layer`` says. Raises as ``select`` does."""
    asked = config.backends.parallel_layer
    names = names_by_key("--parallel-layer", asked, LAYER_KINDS)
    having = [kind for kind in LAYER_KINDS if (kind, asked) in entries]
    lacking = next((kind for kind in kinds if asked != AUTO and kind not in having), None)
    if having and lacking:
        keyed = ",".join(f"{kind}={asked}" for kind in having)
        raise ConfigError(f"--parallel-layer is {asked!r}, and {lacking} has no layer of that name; write {keyed}")
    return {
        kind: select(f"{kind} parallel layer", _of_layer_kind(entries, kind), names[kind], config) for kind in kinds
    }


def names_by_key(option: str, value: str, keys: Sequence[str]) -> dict[str, str]:
    """``tp=shm,pp=gloo`` as {"tp": "shm", "pp": "gloo"}, with ``auto`` for the other keys; one name goes to all keys.

    Raises ConfigError for keys that are not among ``keys``, and for a key that is there twice.
    """
    if "=" not in value:
        return dict.fromkeys(keys, value)
    given: dict[str, str] = {}
    for part in value.split(","):
        key, _, name = (word.strip() for word in part.partition("="))
        if key not in keys or not name or key in given:
            raise ConfigError(
                f"{option} is {value!r}, and {part.strip()!r} is wrong in it; write {keys[0]}=NAME, "
                f"each of {', '.join(keys)} once at most"
            )
        given[key] = name
    return dict.fromkeys(keys, AUTO) | given


def suitability(entry: Entry[Any], config: EngineConfig) -> Suitability:
    """What ``entry`` says of ``config``; an entry that breaks when asked cannot run, and the reason says so."""
    try:
        answer = entry.suits(config)
    except (Exception, SystemExit) as error:  # one broken plugin must not keep the others from being picked
        return Suitability(score=0, reason=f"its suits() raised {type(error).__name__}: {error}")
    if not isinstance(answer, Suitability):
        return Suitability(score=0, reason=f"its suits() returned {type(answer).__name__}, not Suitability")
    if type(answer.score) not in (int, float) or not math.isfinite(answer.score) or not isinstance(answer.reason, str):
        return Suitability(
            score=0,
            reason=f"its suits() returned score {answer.score!r} and reason {answer.reason!r}; a number and text",
        )
    return answer


def explain(config: EngineConfig, registry: PluginRegistry) -> list[Explanation]:
    """For every kind that is picked by name: its entries with their scores, and what ``config`` picks.

    ``config`` as ``fourfold.config.resolution.settle`` leaves it.
    """
    backends = config.backends
    layers = registry.parallel_layers()
    kinds = [kind for kind in LAYER_KINDS if any(kind == other for other, _ in layers)]
    layer_names = names_by_key("--parallel-layer", backends.parallel_layer, LAYER_KINDS)
    comm_names = names_by_key("--comm", backends.comm, COMM_GROUPS)
    communicators = registry.communicators()
    comm_rows = (
        [(f"communicator of {group}", communicators, name) for group, name in comm_names.items()]
        if len(set(comm_names.values())) > 1
        else [("communicator", communicators, comm_names["tp"])]
    )
    rows: list[tuple[str, Mapping[Any, Entry[Any]], str]] = [
        ("executor", registry.executors(), backends.executor),
        *comm_rows,
        ("load balancer", registry.load_balancers(), backends.load_balancer),
        ("scheduler", registry.schedulers(), backends.scheduler),
        ("attention backend", registry.attention_backends(), backends.attention),
        ("linear method", registry.linear_methods(), backends.linear_method),
        ("operators", registry.operators(), backends.operators),
        ("experts", registry.experts(), backends.experts),
        *((f"{kind} parallel layer", _of_layer_kind(layers, kind), layer_names[kind]) for kind in kinds),
        ("tokenizer", registry.tokenizers(), config.model.tokenizer),
    ]
    if config.parallel.enable_expert_parallel:
        rows.append(("expert placement", registry.expert_placements(), backends.expert_placement))
        rows.append(("rebalancer", registry.rebalancers(), backends.rebalancer))
        if config.parallel.lockstep or backends.all_to_all != AUTO:  # else ranks have each other's tokens
            rows.append(("all-to-all", registry.all_to_alls(), backends.all_to_all))
    return [_explain(noun, entries, name, config) for noun, entries, name in rows]


def _explain(noun: str, entries: Mapping[Any, Entry[Any]], asked: str, config: EngineConfig) -> Explanation:
    candidates = []
    for key, entry in entries.items():
        suits = suitability(entry, config)
        candidates.append(
            Candidate(
                name=str(key),
                package=_package(entries, key),
                summary=entry.summary,
                score=suits.score,
                reason=suits.reason,
            )
        )
    chosen: str | None = None
    try:
        selection = select(noun, entries, asked, config)
        chosen, reason = selection.entry.name, selection.reason
    except (ConfigError, PluginError) as error:
        reason = str(error)
    return Explanation(kind=noun, asked=asked, candidates=tuple(candidates), chosen=chosen, reason=reason)


def _by_name(noun: str, entries: Mapping[Any, E], name: str, config: EngineConfig) -> Selection[E]:
    if name not in entries:
        close = difflib.get_close_matches(name, [str(key) for key in entries], n=1)
        suggestion = f"; did you mean {close[0]!r}?" if close else ";"
        installed = ", ".join(f"{key} ({_package(entries, key)})" for key in entries) or "none"
        raise PluginError(f"no {noun} called {name!r}{suggestion} installed: {installed}{_broken(entries)}")
    suits = suitability(entries[name], config)
    if suits.score <= 0:
        able = [str(key) for key, other in entries.items() if key != name and suitability(other, config).score > 0]
        others = f"; installed and able to run here: {', '.join(able)}" if able else ""
        raise ConfigError(f"{noun} {name!r} cannot run here: {suits.reason}{others}")
    why = " (default)" if name == _DEFAULTS.get(_OPTIONS.get(noun, "")) else ": asked for by name"
    return Selection(entry=entries[name], reason=f"{noun} {name!r}{why}")


def _of_layer_kind(entries: Mapping[Any, ParallelLayerEntry], kind: LayerKind) -> Mapping[str, ParallelLayerEntry]:
    table = {name: entry for (other, name), entry in entries.items() if other == kind}
    if not isinstance(entries, Offers):
        return table
    return Offers(table, {name: entries.origins[kind, name] for name in table}, entries.broken)


def _package(entries: Mapping[Any, Any], key: object) -> str:
    return entries.origins[key].package if isinstance(entries, Offers) else "given in code"


def _broken(entries: Mapping[Any, Any]) -> str:
    """What failed to load, for whoever misses a name that it might have offered."""
    broken = entries.broken if isinstance(entries, Offers) else ()
    return "".join(f"; {why}" for why in broken)
