"""Metrics under other frameworks' names, by their formulas. A scheme is a module of this package.

Each has `sum_names(spec)`, `max_names(spec)` (prefixed with its name and a slash), `collect(block, spec)` giving those
sums and maxima for some whole sequences, and `finish(values, spec)` giving the framework's keys. What a framework
computes per call rather than per token or sequence is added by `per_call(sums, maxima, spec)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from rollout_corr.spec import Spec

if TYPE_CHECKING:
    from rollout_corr.measures import Block

Named = dict[str, Tensor]


_LOADED: dict[str, ModuleType] = {}


def load(spec: Spec) -> None:
    """Import the schemes that a Spec asks for; apart from `schemes`, because a compiled region cannot import."""
    for name in spec.report:
        if name != "native" and name not in _LOADED:
            _LOADED[name] = import_module(f"rollout_corr.reports.{name}")


def schemes(spec: Spec) -> list[ModuleType]:
    """The modules of the schemes that a Spec asks for beside the native one, once loaded."""
    return [_LOADED[name] for name in spec.report if name != "native"]


def sum_names(spec: Spec) -> tuple[str, ...]:
    """Names of all schemes' sums, in order."""
    load(spec)
    return tuple(name for scheme in schemes(spec) for name in scheme.sum_names(spec))


def max_names(spec: Spec) -> tuple[str, ...]:
    """Names of all schemes' maxima, in order."""
    load(spec)
    return tuple(name for scheme in schemes(spec) for name in scheme.max_names(spec))


def collect(block: Block, spec: Spec) -> tuple[Named, Named]:
    """All schemes' sums and maxima over some whole sequences."""
    sums: Named = {}
    maxima: Named = {}
    for scheme in schemes(spec):
        more_sums, more_maxima = scheme.collect(block, spec)
        sums |= more_sums
        maxima |= more_maxima
    return sums, maxima


def per_call(sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
    """What schemes add once per call, from the call's own sums."""
    more_sums: Named = {}
    more_maxima: Named = {}
    for scheme in schemes(spec):
        found = scheme.per_call(sums, maxima, spec)
        more_sums |= found[0]
        more_maxima |= found[1]
    return more_sums, more_maxima


def finish(values: Mapping[str, float], spec: Spec, names: str) -> dict[str, float]:
    """A scheme's metrics from raw statistics."""
    finished: dict[str, float] = import_module(f"rollout_corr.reports.{names}").finish(values, spec)
    return finished
