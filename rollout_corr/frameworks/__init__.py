"""Everything named after a framework, one folder or file each: presets, configuration, losses, metrics and drop-in.

`rollout_corr.frameworks.NAME.install()` replaces the framework's own functions by ones with the same names, arguments
and results. Importing a framework's folder changes nothing and imports nothing of the framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str, **names: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose presets are read without importing its drop-in.

    The public names are given by the submodule that defines them; `dir` of the package names them.
    """
    homes = {name: f"{package}.{module}" for module, in_module in names.items() for name in in_module}

    vars(sys.modules[package])["__dir__"] = lambda: sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get
