"""Rollout correction for LLM reinforcement learning: from two log-probs of each token to weights, metrics and the loss.

Importing needs torch alone: no GPU, no Triton, no driver query. Where torch is imported already, all that a correction
needs is imported with the package, and its operators are registered, else with the first name that is used:
`rollout-corr --help` needs no torch. What a correction does not need is imported when it is first used: `policy_loss`,
its surrogates, specs and recipes by name, `dump`, `doctor`, `suggest`, `warmup`. `__init__.pyi` lists the names.
"""

import ast
import sys
import warnings
from importlib import import_module
from pkgutil import get_data

from ._version import __version__ as __version__

_IMPORTS = [
    node for node in ast.parse(get_data(__name__, "__init__.pyi") or b"").body if isinstance(node, ast.ImportFrom)
]
_MODULES = {alias.name: f"{__name__}.{node.module}" for node in _IMPORTS for alias in node.names}

__all__ = [name for name in _MODULES if name != "__version__"]

# Names of other libraries, and of commits before the release, for a Spec by a framework's name.
_MEANT = {
    **dict.fromkeys(("preset", "get_preset", "from_preset"), "rc.spec(name)"),
    **dict.fromkeys(("presets", "list_presets", "preset_names"), "rc.spec_names(), and rc.spec(name)"),
    **dict.fromkeys(("from_config", "spec_from_config"), "rc.spec(framework, config)"),
    "recipe_from_config": "rc.recipe(framework, config)",
}


def _import_correction() -> None:
    """Import all that a correction needs. A compiler that traces a call finds these names without `__getattr__`."""
    with warnings.catch_warnings():
        # Where NumPy is not installed, torch says so at its import, and nothing here needs it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        import torch  # noqa: F401 - its first import, under the filter
    import_module(f"{__name__}.api.correct")
    for name, module in _MODULES.items():
        # A name that a caller exchanged stays, and another thread may be in the middle of a module.
        if name not in globals() and hasattr(loaded := sys.modules.get(module), name):
            globals()[name] = getattr(loaded, name)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        hint = f"; write {_MEANT[name]}" if name in _MEANT else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    _import_correction()
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


if "torch" in sys.modules:
    _import_correction()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
