"""The folder of benchmarks as a package, for tests of its own logic."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def imported() -> Iterator[ModuleType]:
    """Import the folder by its path: with the root of the checkout on sys.path, `kernels` would be the wrong one."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def load(name: str) -> ModuleType:
    """A module of it."""
    return importlib.import_module(f"benchmarks.{name}")


def tiny(name: str) -> Any:
    """A case of the device benchmark, of a size that a CPU does in no time."""
    return load("batches").named(name).tiny()


def compiled_ones_left_out(batch: Any, operation: Any) -> list[Any]:
    """Everybody who needs no compiler."""
    contenders = load("device_contenders")
    return [who for who in contenders.contenders(batch, operation) if who.name != load("contenders").COMPILED]
