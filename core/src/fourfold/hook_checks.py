"""Checks a plugin against the hook specifications before anything of it runs; says what is wrong and how to mend it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fourfold.config.option_values import ValueRefusedError, check_field_types, describe, field_types, parse_value
from fourfold.contracts.parallel_layer import LayerKind
from fourfold.entries import Entry
from fourfold.errors import ConfigError, PluginError
from fourfold.hookspecs import CONTRACT_VERSION, MODULES
from fourfold.markers import ENTRY_POINT_GROUP
from fourfold.offers import OfferKind, Origin

_ENTRY_FIELDS: Mapping[str, Any] = {
    "summary": str,
    "capabilities": frozenset[str],
    "kind": LayerKind,
    "architectures": tuple[str, ...],
    "order": int,
}
"""Fields that some or all kinds of entries have beside ``name`` and functions."""
_SPEC_MARK = f"{ENTRY_POINT_GROUP}_spec"
_IMPLEMENTATION_MARK = f"{ENTRY_POINT_GROUP}_impl"


def hook_specifications() -> dict[str, inspect.Signature]:
    """The signature of every hook by its name."""
    return {
        name: inspect.signature(function)
        for module in MODULES
        for name, function in vars(module).items()
        if hasattr(function, _SPEC_MARK)
    }


def check_contract(plugin: object, origin: Origin) -> None:
    """Raise PluginError unless ``plugin`` states a FOURFOLD_CONTRACT that this core meets."""
    stated = getattr(plugin, "FOURFOLD_CONTRACT", None)
    if stated is None:
        raise PluginError(
            f"{origin} states no FOURFOLD_CONTRACT, and this core's contract is {CONTRACT_VERSION}; "
            f'add FOURFOLD_CONTRACT = ">={CONTRACT_VERSION},<2" to its entry-point module'
        )
    try:
        accepted = SpecifierSet(stated)
        if not len(accepted):
            raise InvalidSpecifier(stated)
    except (InvalidSpecifier, AttributeError, TypeError) as error:
        raise PluginError(
            f"{origin} states FOURFOLD_CONTRACT = {stated!r}, which is no version range; "
            f'write one such as ">={CONTRACT_VERSION},<2"'
        ) from error
    if CONTRACT_VERSION not in accepted:
        raise PluginError(
            f"{origin} is written for contract {stated}, and this core's contract is {CONTRACT_VERSION}; "
            f"install a version of {origin.distribution} that accepts {CONTRACT_VERSION}"
        )


def check_hooks(plugin: object, origin: Origin, specifications: Mapping[str, inspect.Signature]) -> None:
    """Raise PluginError for the first hook of ``plugin`` that does not fit its specification."""
    for attribute, function, options in _marked_functions(plugin):
        hook = options.get("specname") or attribute
        if hook not in specifications:
            if options.get("optionalhook"):
                continue
            raise PluginError(f"{origin} implements {hook}, which is no hook; {_close_hooks(hook, specifications)}")
        problem = _signature_problem(function, options, specifications[hook])
        if problem:
            wanted = f"{hook}{specifications[hook]}".replace("'", "")
            raise PluginError(f"{origin}: {_dotted(plugin, attribute)} {problem}; the hook is {wanted}")
    for attribute in specifications:
        unmarked = getattr(plugin, attribute, None)
        if inspect.isroutine(unmarked) and not hasattr(unmarked, _IMPLEMENTATION_MARK):
            raise PluginError(
                f"{origin}: {_dotted(plugin, attribute)} is not marked and would never be called; "
                "put @hookimpl (from fourfold import hookimpl) above it"
            )


def check_offer(returned: object, hook: str, kind: OfferKind, origin: Origin) -> list[Entry[Any]]:
    """``returned`` as the list of entries that ``hook`` promises; raises PluginError for anything else."""
    wanted = f"list[{kind.entry.__name__}]"
    if not isinstance(returned, (list, tuple)):
        raise PluginError(f"{origin}: {hook} returned {_type_name(returned)}, not {wanted}; return [...]")
    names: list[object] = []
    for entry in returned:
        if not isinstance(entry, kind.entry):
            raise PluginError(f"{origin}: {hook} returned an entry of type {_type_name(entry)}; it must be {wanted}")
        if not isinstance(entry.name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", entry.name):
            raise PluginError(
                f"{origin}: {hook} offers the name {entry.name!r}; "
                "a name is lowercase letters, digits, dashes and underscores, such as 'my-backend'"
            )
        if not callable(entry.build) or not callable(entry.suits):
            raise PluginError(f"{origin}: build and suits of {kind.noun} {entry.name!r} must be functions")
        for field, annotation in _ENTRY_FIELDS.items():
            if hasattr(entry, field) and not _fits(getattr(entry, field), annotation):
                raise PluginError(
                    f"{origin}: {field} of {kind.noun} {entry.name!r} is {getattr(entry, field)!r}; "
                    f"it must be {annotation}"
                )
        key = getattr(entry, "kind", None), entry.name
        if key in names:
            raise PluginError(f"{origin}: {hook} offers the name {entry.name!r} twice; rename one of them")
        names.append(key)
    return list(returned)


def check_settings(returned: object, origin: Origin) -> type[Any]:
    """``returned`` as a dataclass that options can be made from; raises PluginError for anything else."""
    if not isinstance(returned, type) or not dataclasses.is_dataclass(returned):
        raise PluginError(
            f"{origin}: fourfold_settings returned {_type_name(returned)}; return a dataclass itself, not an instance"
        )
    parameters = getattr(returned, "__dataclass_params__", None)
    if not getattr(parameters, "frozen", False):
        raise PluginError(f"{origin}: settings {returned.__name__} can be changed; make it @dataclass(frozen=True)")
    for field in dataclasses.fields(returned):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise PluginError(f"{origin}: settings {returned.__name__}.{field.name} has no default; give it one")
    try:
        check_field_types(returned)
    except ConfigError as error:
        raise PluginError(f"{origin}: {error}") from error
    except (NameError, AttributeError, TypeError) as error:  # a name that is imported for type checkers alone, say
        raise PluginError(f"{origin}: the types of settings {returned.__name__} cannot be read: {error}") from error
    _check_defaults(returned, origin)
    return returned


def _check_defaults(settings: type[Any], origin: Origin) -> None:
    try:
        defaults = settings()
    except Exception as error:
        raise PluginError(
            f"{origin}: settings {settings.__name__} refuse their own defaults: {type(error).__name__}: {error}"
        ) from error
    for name, annotation in field_types(settings).items():
        value = getattr(defaults, name)
        with contextlib.suppress(ValueRefusedError):
            if parse_value(annotation, value) == value:
                continue
        raise PluginError(
            f"{origin}: settings {settings.__name__}.{name} has the default {value!r}; "
            f"it must be {describe(annotation)}"
        )


def _fits(value: object, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _marked_functions(plugin: object) -> Iterator[tuple[str, Callable[..., object], Mapping[str, Any]]]:
    for attribute in dir(plugin):
        # getattr_static does not run properties of plugins that are objects
        found = inspect.getattr_static(plugin, attribute, None)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        if not hasattr(found, _IMPLEMENTATION_MARK):
            continue
        function = getattr(plugin, attribute)
        yield attribute, function, getattr(function, _IMPLEMENTATION_MARK)


def _signature_problem(
    function: Callable[..., object], options: Mapping[str, Any], specification: inspect.Signature
) -> str | None:
    if options.get("wrapper") or options.get("hookwrapper"):
        return "is a wrapper, and hooks take none (FOURFOLD_TRACE_HOOKS=1 shows calls)"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return "is a generator or a coroutine; make it a plain function"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            return f"takes {parameter.name!r} as keyword only; drop the '*'"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"takes {str(parameter)!r}, which hooks never fill; name the arguments that it uses"
        if parameter.name not in specification.parameters and parameter.default is parameter.empty:
            return f"takes {parameter.name!r}, which the hook does not give"
    return None


def _close_hooks(hook: str, specifications: Mapping[str, inspect.Signature]) -> str:
    close = difflib.get_close_matches(hook, specifications, n=1, cutoff=0.6)
    if not close:
        return f"hooks are {', '.join(sorted(specifications))}"
    wanted = f"{close[0]}{specifications[close[0]]}".replace("'", "")
    return f"did you mean {wanted}?"


def _dotted(plugin: object, attribute: str) -> str:
    owner = plugin.__name__ if isinstance(plugin, (ModuleType, type)) else type(plugin).__qualname__
    return f"{owner}.{attribute}"


def _type_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
