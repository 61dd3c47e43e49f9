"""Finds the entry points of plugins among what is installed, in one order, and imports them. Knows no hook."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib import metadata
from typing import cast

from fourfold.errors import PluginError
from fourfold.markers import ENTRY_POINT_GROUP
from fourfold.offers import Origin


def sorted_entry_points(warnings: list[str]) -> list[metadata.EntryPoint]:
    """The group's entry points by name: the order of the file system differs between hosts.

    What is damaged is left out with a line in ``warnings``. Raises PluginError when two distributions claim one name.
    """
    found: dict[str, list[metadata.EntryPoint]] = defaultdict(list)
    seen: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        try:
            points = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
            if not points:
                continue
            if not distribution.name:
                raise ValueError("its metadata has no name")
        except Exception as error:  # whatever reading a damaged file raises
            warnings.append(
                f"a distribution in {distribution.locate_file('')} has damaged metadata or entry points: "
                f"{type(error).__name__}: {error}; repair or remove it"
            )
            continue
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        first = seen.setdefault(name, distribution)
        if first is not distribution:  # later on sys.path, so its code is never imported
            if first.version != distribution.version:
                warnings.append(
                    f"distribution {name} is installed twice, as {first.version} and as {distribution.version} "
                    f"(in {distribution.locate_file('')}); {first.version} is used, uninstall the other"
                )
            continue
        for point in points:
            found[point.name].append(point)
    for name, same in sorted(found.items()):
        if len(same) > 1:
            claims = " and ".join(sorted(origin_of(point).package for point in same))
            raise PluginError(f"plugin name {name!r} is claimed by {claims}; uninstall all but one")
    return [found[name][0] for name in sorted(found)]


def origin_of(point: metadata.EntryPoint) -> Origin:
    """Where an entry point comes from."""
    distribution = cast("metadata.Distribution", point.dist)
    return Origin(plugin=point.name, distribution=distribution.name, version=distribution.version)


def import_plugin(point: metadata.EntryPoint, origin: Origin) -> object:
    """What an entry point names. Raises PluginError, whatever its import raised."""
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what libraries derive beside Exception
        raise PluginError(
            f"{origin} failed to load: {type(error).__name__}: {error} (entry point {point.value}); "
            f"repair it or run: pip uninstall {origin.distribution}"
        ) from error
