"""Makes the folder `benchmarks` of the checkout importable, by its path.

The root of the checkout must not be on sys.path, because its `kernels` is not the package of that name, and `tests` is,
where `benchmarks` would be this folder.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

if "benchmarks" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["benchmarks"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
