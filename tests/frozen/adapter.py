"""Everything that a redesign may rename: how calls are written, which code runs them, what statistics are called.

A redesign changes this file, and nothing else, until `python -m frozen` runs again.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import torch

PATHS = ("blocks", "whole", "interpreter")
# Sizes by which the blocks divide work: as they stand, for a few tokens, and for thousands.
SIZES: tuple[dict[str, int], ...] = ({}, {"BLOCK": 16, "CHUNK": 16}, {"SMALL": 2})
LARGE_SIZES = {"BLOCK": 600, "CHUNK": 64, "SMALL": 300, "TILED": 256}


def prepare() -> None:
    """Import everything, so that a size which is patched is bound nowhere else; call it before the package is used."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for room in ("api", "backends", "definition", "metrics", "specs"):
        package = import_module(f"rollout_corr.{room}")
        for module in pkgutil.iter_modules(package.__path__):
            if "kernels" not in module.name and module.name != "docs":
                import_module(f"{package.__name__}.{module.name}")


@contextlib.contextmanager
def on_path(path: str, seed: int, large: bool) -> Iterator[None]:
    """Let calls go one path; blocks have other sizes than those that stand in the code, by the seed."""
    sizes = {} if path != "blocks" else LARGE_SIZES if large else SIZES[seed % 3]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (*_sizes(tuple(sizes.items())), *_ways(path)):
            on_keys = isinstance(owner, dict)
            exchanged = mock.patch.dict(owner, {name: value}) if on_keys else mock.patch.object(owner, name, value)
            stack.enter_context(exchanged)
        yield


@cache
def _sizes(sizes: tuple[tuple[str, int], ...]) -> list[tuple[Any, str, Any]]:
    """Every module that holds one of these names."""
    known = [module for name, module in sorted(sys.modules.items()) if name.startswith("rollout_corr.")]
    return [(module, name, value) for name, value in sizes for module in known if name in vars(module)]


def _ways(path: str) -> list[tuple[Any, str, Any]]:
    """What is exchanged for a path: (owner, name, value)."""
    if path == "whole":
        from rollout_corr.backends import bounds_of_batch, loss_blocks, run, sees_batch, whole

        return [
            (run.CORRECTIONS, "blocks", whole.run_whole),
            (sys.modules["rollout_corr.api.policy_loss"].LOSSES, "blocks", loss_blocks.run_whole),
            (bounds_of_batch, "in_blocks", lambda batch: False),
            (sees_batch, "in_blocks", lambda batch: False),
        ]
    return []


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """The interpreter of kernels without its repeated work, and tiles that a few tokens fill."""
    from builders import interpreter
    from rollout_corr.kernels import grid

    shape = grid.Shape(tile=16, lanes=4, sequences=8, chunk=1)
    with (
        interpreter.quick(),
        mock.patch.object(grid, "SHAPES", ((0, shape),)),
        mock.patch.object(grid, "LEAST_PART", 3),
    ):
        grid.divided.cache_clear()
        yield
    grid.divided.cache_clear()


def correct(path: str, arguments: dict[str, Any]) -> Any:
    """Call `correct`."""
    import rollout_corr as rc
    from builders.calls import bundled

    return rc.correct(**bundled(backend=_backend(path), **arguments))


def policy_loss(path: str, arguments: dict[str, Any]) -> Any:
    """Call `policy_loss`."""
    import rollout_corr as rc
    from builders.calls import bundled_loss

    return rc.policy_loss(**bundled_loss(backend=_backend(path), **arguments))


def _backend(path: str) -> str:
    return "triton" if path == "interpreter" else "torch"


def is_refusal(error: Exception) -> bool:
    """Tell whether the kernels leave a call to plain torch."""
    return isinstance(error, ValueError) and str(error).startswith("backend:")


def needs_of_recipe(name: str) -> tuple[str, ...]:
    """The log-probs that a recipe needs besides new_logp."""
    from rollout_corr.frameworks.shared import lookup

    return lookup.every_recipe()[name].needs


def settings_of_loss(loss: Any) -> dict[str, Any]:
    """The fields of a Loss that are given, by the names of `policy_loss`."""
    found = {name: getattr(loss, name) for name in ("surrogate", "mean", "kl", "regularizer", "entropy_bonus")}
    return {name: value for name, value in found.items() if value is not None}


def settings_of_batch(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Batch that a recipe asks for, by the names of `policy_loss`."""
    return {"group_size" if name == "groups" else name: getattr(x, "size", x) for name, x in fields.items()}


def statistics_of(out: Any) -> dict[str, float]:
    """Sums and maxima by name."""
    from rollout_corr.metrics import schema

    found = out.statistics
    names = itertools.chain(*schema.layout(found.spec, found.objective, found.extra))
    return dict(zip(names, [*found.sums.tolist(), *found.maxima.tolist()], strict=True))


def metrics_of(out: Any, labels: tuple[str, ...]) -> dict[str, float]:
    """Metrics by name, in every naming that the Spec asks for, and by label."""
    spec = out.statistics.spec
    schemes = () if spec is None else [name for name in spec.report if name != "native"]
    found = dict(out.metrics())
    for scheme in schemes:
        found |= {f"{scheme}:{name}": value for name, value in out.metrics(names=scheme).items()}
    for label in labels:
        found |= {f"by {label}:{name}": value for name, value in out.metrics(by=label).items()}
    return found
