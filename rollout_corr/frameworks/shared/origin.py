"""Which framework it is that a process imports or would import: version, place, and whether it has some modules.

A checkout on the path hides an installed distribution, and the distribution's metadata says nothing about it. Nothing
is imported here.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

from rollout_corr.frameworks.shared.after_import import find, space_of, state_of


class Origin(NamedTuple):
    """A framework as this process has it.

    Attributes:
        version: Of the imported module, by its `__version__`; before its import that of the distribution which holds
            it; None where neither says.
        location: Folder of the package; None where it is not known.
        distribution: The installed distribution of that name.
        foreign: Whether there is such a distribution, and it does not hold the module.
    """

    version: str | None
    location: str | None
    distribution: str | None
    foreign: bool


def origin_of(framework: str) -> Origin:
    """Look up where a top-level package lies and which version it is."""
    location = next(iter(_path(framework) or ()), None)
    said = space_of(sys.modules[framework]).get("__version__") if state_of(framework) == "whole" else None
    version = said if isinstance(said, str) else None
    try:
        distribution = metadata.distribution(framework)
    except metadata.PackageNotFoundError:
        return Origin(version, location, None, False)
    holds = location is None or _holds(distribution, framework, Path(location))
    if version is None and holds:
        version = distribution.version
    return Origin(version, location, distribution.version, not holds)


def present(framework: str) -> bool:
    """Tell whether a top-level package is imported or can be."""
    return sys.modules.get(framework) is not None or find(framework, None) is not None


def lacks(module: str) -> str | None:
    """Find the first part of a module's name that the framework does not have; None if it has all, or nobody knows."""
    called, *rest = module.split(".")
    path = _path(called)
    for part in rest:
        if not path:
            return None
        called = f"{called}.{part}"
        path = _path(called, path)
        if path is None:
            return called
    return None


def _path(name: str, within: list[str] | None = None) -> list[str] | None:
    """Where the submodules of a package are looked for; None if there is no such module."""
    module = sys.modules.get(name)
    given = space_of(module).get("__path__")
    if module is None:
        spec = find(name, within)
        if spec is None:
            return None
        given = spec.submodule_search_locations
    return list(given or ())


def _holds(distribution: metadata.Distribution, framework: str, location: Path) -> bool:
    """Tell whether a package at a location is the distribution's: installed with its metadata, or as editable."""
    location = location.resolve()
    if location == Path(str(distribution.locate_file(framework))).resolve():
        return True
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not direct.get("dir_info", {}).get("editable"):
        return False
    return Path(url2pathname(urlparse(direct["url"]).path)).resolve() in location.parents
