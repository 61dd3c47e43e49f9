"""Options of a config, generated from its dataclasses: names, variables, file keys, and how values are merged.

Knows no plugin and no command; ``click_options`` draws these for the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from fourfold.config.engine_config import EngineConfig
from fourfold.config.field_docs import field_docs
from fourfold.config.option_values import ValueRefusedError, field_types, is_list, parse_value, split_list
from fourfold.errors import ConfigError, PluginError

T = TypeVar("T")
_log = logging.getLogger(__name__)
ENVIRONMENT_PREFIX: Final = "FOURFOLD_"
COMMAND_LINE: Final = "the command line"
ARGUMENT: Final = "an argument"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One field of one config dataclass, as users set it."""

    name: str
    """Unique among all options: the field's name, for a plugin's with the plugin's name before it."""
    field: str
    owner: type[Any]
    section: str
    """What it belongs to: Model, Cache, ..., or the plugin's name."""
    annotation: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """As on the command line: ``--max-num-seqs``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment: ``FOURFOLD_MAX_NUM_SEQS``."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which may be written as 2GiB."""
        return self.field.endswith("_memory")

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return self.field.endswith(("_key", "_secret"))

    def parse(self, value: object, source: str) -> Setting:
        """``value`` as the field's type; raises ConfigError naming option, value (unless a secret) and source."""
        try:
            return Setting(value=parse_value(self.annotation, value, is_size=self.is_size), source=source)
        except ValueRefusedError as problem:
            shown = f"of type {type(value).__name__}" if self.is_secret else repr(value)
            raise ConfigError(f"{self.flag} is {shown} (from {source}); it {problem}") from problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value that somebody set, and where."""

    value: Any
    source: str


class OptionSet:
    """All options of some config dataclasses and of plugins' settings.

    ``roots`` are dataclasses such as EngineConfig; their fields that are dataclasses themselves become sections.
    ``settings`` maps plugin names to settings dataclasses, as ``registry.settings()`` does.
    """

    def __init__(self, roots: Iterable[type[Any]], settings: Mapping[str, type[Any]] | None = None) -> None:
        self._settings = dict(settings or {})
        self.options: dict[str, Option] = {}
        for root in roots:
            for _, owner in _sections(root):
                self._add(owner, owner.__name__.removesuffix("Config"))
        for plugin, owner in self._settings.items():
            self._add(owner, plugin, prefix=plugin.replace("-", "_") + "_")

    def read(
        self,
        given: Mapping[str, object],
        *,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Setting]:
        """Merge what was set: command line, then environment, then ``file`` (YAML), each by option name.

        A value of None, and an empty tuple, in ``given`` means that the option was not on the command line; a tuple
        has one text for each time that it was, with commas between items. Without ``file``, FOURFOLD_CONFIG may name
        one. Raises ConfigError naming option, value and source.
        """
        environment = os.environ if environment is None else environment
        file = file or (Path(path) if (path := environment.get(ENVIRONMENT_PREFIX + "CONFIG")) else None)
        merged = self._from_file(file) if file else {}
        self._warn_of_misspelt(environment)
        for option in self.options.values():
            if option.variable in environment:
                merged[option.name] = option.parse(environment[option.variable], option.variable)
        typed = {name: value for name, value in given.items() if value is not None and value != ()}
        for name, value in typed.items():
            if isinstance(value, tuple) and is_list(self._option(name, COMMAND_LINE).annotation):
                typed[name] = tuple(item for text in value for item in split_list(text))
        return merged | self.parse(typed, COMMAND_LINE)

    def parse(self, values: Mapping[str, object], source: str) -> dict[str, Setting]:
        """Check ``values`` by option name; unknown names are refused with a suggestion."""
        return {name: self._option(name, source).parse(value, source) for name, value in values.items()}

    def build(self, root: type[T], settings: Mapping[str, Setting]) -> T:
        """A ``root`` with everything that was set, its sections and plugins' settings included.

        Raises ConfigError; one about a value that did not come from the command line says where it came from.
        """
        parts: dict[str, Any] = {}
        for name, owner in _sections(root):
            if owner is not root:
                parts[name] = self._construct(owner, settings)
        if any(field.name == "plugins" for field in dataclasses.fields(root)):  # type: ignore[arg-type]
            parts["plugins"] = {plugin: self._construct(owner, settings) for plugin, owner in self._settings.items()}
        return self._construct(root, settings, parts)

    def _add(self, owner: type[Any], section: str, *, prefix: str = "") -> None:
        docs = field_docs(owner)
        types = field_types(owner)
        for field in dataclasses.fields(owner):
            if dataclasses.is_dataclass(types[field.name]) or field.name == "plugins":
                continue
            name = prefix + field.name
            if name in self.options:
                other = self.options[name]
                raise PluginError(
                    f"{owner.__qualname__}.{field.name} ({section}) and {other.owner.__qualname__}.{other.field} "
                    f"({other.section}) both make the option --{name.replace('_', '-')}; rename one field, "
                    "or uninstall the plugin"
                )
            factory = field.default_factory
            self.options[name] = Option(
                name=name,
                field=field.name,
                owner=owner,
                section=section,
                annotation=types[field.name],
                default=field.default if factory is dataclasses.MISSING else factory(),
                help=docs.get(field.name, ""),
            )

    def _warn_of_misspelt(self, environment: Mapping[str, str]) -> None:
        """Only a warning, and only for what is almost an option: others may use the prefix, as Kubernetes does."""
        variables = {option.variable for option in self.options.values()} | {ENVIRONMENT_PREFIX + "CONFIG"}
        for variable in sorted(environment):
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in variables:
                close = difflib.get_close_matches(variable, variables, n=1, cutoff=0.85)
                if close:
                    _log.warning("the variable %s is no option and has no effect; did you mean %s?", variable, close[0])

    def _option(self, name: str, source: str) -> Option:
        if name in self.options:
            return self.options[name]
        close = difflib.get_close_matches(name, self.options, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(sorted(self.options))}"
        raise ConfigError(f"no option {name!r} (from {source}); {hint}")

    def _from_file(self, file: Path) -> dict[str, Setting]:
        import yaml  # only who uses a file pays for the reader

        from fourfold.config.yaml_mapping import load_yaml

        try:
            content = load_yaml(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {str(file)!r} cannot be read: {error}") from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"--config {str(file)!r} is no YAML: {' '.join(str(error).split())}") from error
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise ConfigError(
                f"--config {str(file)!r} holds a {type(content).__name__}; write one 'option: value' a line"
            )
        values: dict[str, object] = {}
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if isinstance(value, dict):
                inner = next(iter(value), "max_num_seqs")
                raise ConfigError(
                    f"--config {str(file)!r} has a section {str(key)!r}; options stand at the top, without sections, "
                    f"as in '{inner}: ...'"
                )
            if name in values:
                raise ConfigError(f"--config {str(file)!r} has {name!r} twice, with - and with _; remove one")
            values[name] = value
        return self.parse(values, str(file))

    def _construct(self, owner: type[T], settings: Mapping[str, Setting], parts: Mapping[str, Any] | None = None) -> T:
        mine = {option.name: option for option in self.options.values() if option.owner is owner}
        values = {mine[name].field: setting.value for name, setting in settings.items() if name in mine}
        try:
            return owner(**values, **(parts or {}))
        except (ValueError, TypeError) as error:  # from a plugin's settings; core's own raise ConfigError
            plugin = next(iter(mine.values())).section
            raise ConfigError(f"the settings of plugin {plugin!r} are refused: {error}") from error
        except ConfigError as error:
            sources = sorted(
                f"{mine[name].flag} is from {setting.source}"
                for name, setting in settings.items()
                if name in mine and mine[name].flag in str(error) and setting.source not in (COMMAND_LINE, ARGUMENT)
            )
            if not sources:
                raise
            raise type(error)(f"{error} ({', '.join(sources)})") from error


def build_engine_config(settings: Mapping[str, type[Any]] | None = None, /, **flat: object) -> EngineConfig:
    """An EngineConfig from flat names, as in ``build_engine_config(model="smollm2", max_num_seqs=8)``.

    ``settings`` (of plugins, as ``registry.settings()`` gives them) adds names such as ``<plugin>_<field>``.
    Raises ConfigError for unknown names, with a suggestion, and for values that cannot be.
    """
    options = OptionSet((EngineConfig,), settings)
    return options.build(EngineConfig, options.parse(flat, ARGUMENT))


def _sections(root: type[Any]) -> Sequence[tuple[str, type[Any]]]:
    """``root``'s nested config dataclasses by field name, and itself if it has plain fields."""
    types = field_types(root)
    nested: list[tuple[str, type[Any]]] = [
        (name, kind) for name, kind in types.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    plain = [name for name, kind in types.items() if not dataclasses.is_dataclass(kind) and name != "plugins"]
    return [*nested, *([("", root)] if plain else [])]
