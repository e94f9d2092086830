"""Metrics under other frameworks' names, by their formulas. A scheme is a module of this package.

Each has `columns(spec, names)`, its statistics by name (prefixed with its own name and a slash); `collect(block, spec)`
giving those for some whole sequences; and `finish(values, spec)` giving the framework's keys. What a framework computes
per call rather than per token or sequence is added by `per_call(sums, maxima, spec)`. The kernels also need to know
what a criterion is to the scheme, `role(criterion)`, and `intervals(spec, names)`, the bounds that it counts beyond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from rollout_corr.spec.correction import Criterion, Spec

if TYPE_CHECKING:
    from rollout_corr.definition.statistics import Block

Named = dict[str, Tensor]
Interval = tuple[float | None, float | None]


class Columns(NamedTuple):
    """Names of statistics, in order, by where they are taken: from tokens, from sequences, from a call's own totals."""

    token_sums: tuple[str, ...] = ()
    sequence_sums: tuple[str, ...] = ()
    call_sums: tuple[str, ...] = ()
    token_maxima: tuple[str, ...] = ()
    sequence_maxima: tuple[str, ...] = ()
    call_maxima: tuple[str, ...] = ()

    def joined(self, other: Columns) -> Columns:
        """These and then the other's, each where it is taken."""
        return Columns(*(mine + more for mine, more in zip(self, other, strict=True)))

    def prefixed(self, scheme: str) -> Columns:
        """Names as they stand in the statistics."""
        return Columns(*(tuple(f"{scheme}/{name}" for name in names) for names in self))


_LOADED: dict[str, ModuleType] = {}


def load(spec: Spec) -> None:
    """Import the schemes that a Spec asks for; apart from `schemes`, because a compiled region cannot import."""
    for name in spec.report:
        if name != "native" and name not in _LOADED:
            _LOADED[name] = import_module(f"rollout_corr.frameworks.{name}.metrics")


def schemes(spec: Spec) -> list[ModuleType]:
    """The modules of the schemes that a Spec asks for beside the native one, once loaded."""
    return [_LOADED[name] for name in spec.report if name != "native"]


def columns(spec: Spec, names: Sequence[str]) -> Columns:
    """All schemes' statistics.

    Args:
        spec: What to do.
        names: What the criteria are called in names of statistics.
    """
    load(spec)
    found = Columns()
    for scheme in schemes(spec):
        found = found.joined(scheme.columns(spec, names))
    return found


def role(criterion: Criterion, spec: Spec) -> str | None:
    """What a criterion is to one of the schemes; its label says it, and no label says two things."""
    load(spec)
    return next((found for scheme in schemes(spec) if (found := scheme.role(criterion)) is not None), None)


def intervals(spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
    """The bounds that all schemes count beyond; None: that side is open."""
    load(spec)
    found: dict[str, Interval] = {}
    for scheme in schemes(spec):
        found |= scheme.intervals(spec, names)
    return found


def collect(block: Block, spec: Spec) -> tuple[Named, Named]:
    """All schemes' sums and maxima over some whole sequences."""
    sums: Named = {}
    maxima: Named = {}
    for scheme in schemes(spec):
        more_sums, more_maxima = scheme.collect(block, spec)
        sums.update(more_sums)
        maxima.update(more_maxima)
    return sums, maxima


def per_call(sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
    """What schemes add once per call, from the call's own sums."""
    more_sums: Named = {}
    more_maxima: Named = {}
    for scheme in schemes(spec):
        found = scheme.per_call(sums, maxima, spec)
        more_sums.update(found[0])
        more_maxima.update(found[1])
    return more_sums, more_maxima


def finish(values: Mapping[str, float], spec: Spec, names: str) -> dict[str, float]:
    """A scheme's metrics from raw statistics."""
    finished: dict[str, float] = import_module(f"rollout_corr.frameworks.{names}.metrics").finish(values, spec)
    return finished
