"""Which framework it is that a process imports or would import: version, place, and whether it has some modules.

A checkout on the path hides an installed distribution, and the distribution's metadata says nothing about it. Nothing
is imported here.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

from rollout_corr.frameworks.shared.after_import import executed, find
from rollout_corr.frameworks.shared.places import space_of


class Origin(NamedTuple):
    """A framework as this process has it.

    Attributes:
        version: Of the imported module, by its `__version__`; before its import that of the distribution which holds
            it; None where neither says.
        location: Folder or file of the module; None where it is not known.
        distribution: The installed distribution of that name.
        foreign: Whether there is such a distribution, and it does not hold the module.
    """

    version: str | None
    location: str | None
    distribution: str | None
    foreign: bool


def origin_of(framework: str) -> Origin:
    """Look up where a top-level package lies and which version it is."""
    location = _location(framework)
    try:
        distribution = metadata.distribution(framework)
    except metadata.PackageNotFoundError:
        return Origin(_says(framework), location, None, False)
    holds = location is None or _holds(distribution, framework, Path(location))
    version = _says(framework)
    if version is None and holds:
        version = distribution.version
    return Origin(version, location, distribution.version, not holds)


def present(framework: str) -> bool:
    """Tell whether a top-level package is imported or can be."""
    return sys.modules.get(framework) is not None or find(framework, None) is not None


def lacks(module: str) -> str | None:
    """Find the first part of a module's name that the framework does not have; None if it has all, or nobody knows."""
    top, *rest = module.split(".")
    path, called = _path(top), top
    for part in rest:
        called = f"{called}.{part}"
        if not path:
            return None
        if sys.modules.get(called) is not None:
            path = _path(called)
            continue
        spec = find(called, path)
        if spec is None:
            return called
        path = list(spec.submodule_search_locations or ())
    return None


def _says(framework: str) -> str | None:
    """The version that the imported module says it is."""
    if not executed(framework):
        return None
    found = getattr(sys.modules[framework], "__version__", None)
    return found if isinstance(found, str) else None


def _spec(name: str) -> ModuleSpec | None:
    """The spec of an imported module, or of a top-level one that could be imported."""
    module = sys.modules.get(name)
    if module is None:
        return None if "." in name else find(name, None)
    spec = (space_of(module) or {}).get("__spec__")
    return spec if isinstance(spec, ModuleSpec) else None


def _path(name: str) -> list[str]:
    """Where the submodules of a package are looked for."""
    given = (space_of(sys.modules.get(name)) or {}).get("__path__")
    if given is None:
        spec = _spec(name)
        given = None if spec is None else spec.submodule_search_locations
    return list(given or ())


def _location(framework: str) -> str | None:
    if path := _path(framework):
        return str(path[0])
    spec = _spec(framework)
    origin = (space_of(sys.modules.get(framework)) or {}).get("__file__") or (None if spec is None else spec.origin)
    return origin if isinstance(origin, str) else None


def _holds(distribution: metadata.Distribution, framework: str, location: Path) -> bool:
    """Tell whether a module at a location is the distribution's: installed beside its metadata, or as editable."""
    location = location.resolve()
    beside = Path(str(distribution.locate_file(framework))).resolve()
    if location in (beside, beside.with_suffix(".py")):
        return True
    text = distribution.read_text("direct_url.json")
    direct = json.loads(text) if text else {}
    if not direct.get("dir_info", {}).get("editable"):
        return False
    return Path(url2pathname(urlparse(direct["url"]).path)).resolve() in location.parents
