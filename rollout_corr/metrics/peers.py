"""Metrics under other frameworks' names, by their formulas: the core's one slot for peers.

A scheme of names is a module with the functions of `SchemeModule`, imported by the first Spec whose `report` asks for
it. Its statistics follow the native ones, and its metrics may read both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from ..definition.facts import Named
from ..definition.findings import Findings
from ..specs.correction import WHEN_REPORTING, Criterion, Spec
from .formulas import compiled
from .rows import EACH, Metric

# The module of each scheme.
SCHEMES = {name: f"{__name__.partition('.')[0]}.frameworks.{name}.metrics" for name in ("verl", "xtuner", "skyrl")}

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
        """Append the names of another scheme to these, field by field."""
        return Columns(*(mine + more for mine, more in zip(self, other, strict=True)))

    def prefixed(self, scheme: str) -> Columns:
        """The names as they stand in the statistics."""
        return Columns(*(tuple(f"{scheme}/{name}" for name in names) for names in self))


class SchemeModule(Protocol):
    """A framework's metrics. All names of its statistics begin with its own name and a slash.

    Attributes:
        LOCAL_SUMS: Names of its sums of sequences and calls to which every rank of `Ranks.sequence` adds its own
            tokens. Its other sums, sums over tokens apart, are taken from the first rank.
    """

    LOCAL_SUMS: tuple[str, ...]

    def columns(self, spec: Spec, names: Sequence[str]) -> Columns:
        """Names of its statistics; `names` names the criteria in them, in the order of the Spec."""

    def role(self, criterion: Criterion) -> str | None:
        """Name the part that a criterion, known by its label, plays in the scheme, for the kernels; None: no part."""

    def intervals(self, spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
        """The bounds that its statistics count beyond, by name; None: that side is open. The kernels need them."""

    def collect(self, findings: Findings, spec: Spec) -> tuple[Named, Named]:
        """Sums and maxima over tokens and sequences of some whole sequences, 0-d each."""

    def per_call(self, sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
        """Sums and maxima to add once a call, from those so far and "rows" and "slots", the sizes of the batch."""

    def formulas(self, spec: Spec) -> Mapping[str, str]:
        """The framework's keys, each with its formula (see formulas.py), in which every name is quoted."""


_LOADED: dict[str, SchemeModule] = {}


def load(spec: Spec) -> None:
    """Import the schemes that a Spec asks for; apart from `schemes`, because a compiled region cannot import."""
    for name in spec.report:
        if name in SCHEMES and name not in _LOADED:
            _LOADED[name] = cast(SchemeModule, import_module(SCHEMES[name]))


WHEN_REPORTING.append(load)


def schemes(spec: Spec) -> list[SchemeModule]:
    """The schemes that a Spec asks for in addition to the native one, once loaded."""
    return [_LOADED[name] for name in spec.report if name in SCHEMES]


def columns(spec: Spec, names: Sequence[str]) -> Columns:
    """Names of all schemes' statistics; `names` names the criteria in them."""
    load(spec)
    every = Columns()
    for scheme in schemes(spec):
        every = every.joined(scheme.columns(spec, names))
    return every


def local_sums(spec: Spec) -> set[str]:
    """All schemes' sums that every rank of `Ranks.sequence` counts where its tokens lie."""
    load(spec)
    return {name for scheme in schemes(spec) for name in scheme.LOCAL_SUMS}


def role(criterion: Criterion, spec: Spec) -> str | None:
    """Name the part that a criterion plays in one of the schemes. Labels decide it, and no label has two parts."""
    load(spec)
    return next((part for scheme in schemes(spec) if (part := scheme.role(criterion)) is not None), None)


def intervals(spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
    """The bounds that all schemes count beyond; None: that side is open."""
    load(spec)
    bounds: dict[str, Interval] = {}
    for scheme in schemes(spec):
        bounds |= scheme.intervals(spec, names)
    return bounds


def collect(findings: Findings, spec: Spec) -> tuple[Named, Named]:
    """All schemes' sums and maxima over some whole sequences."""
    return _joined([scheme.collect(findings, spec) for scheme in schemes(spec)])


def per_call(sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], spec: Spec) -> tuple[Named, Named]:
    """All schemes' sums and maxima that are added once a call."""
    return _joined([scheme.per_call(dict(sums), dict(maxima), spec) for scheme in schemes(spec)])


def _joined(parts: list[tuple[Named, Named]]) -> tuple[Named, Named]:
    sums: Named = {}
    maxima: Named = {}
    for more_sums, more_maxima in parts:
        sums.update(more_sums)
        maxima.update(more_maxima)
    return sums, maxima


def read(formulas: Mapping[str, str], values: Mapping[str, float]) -> dict[str, float]:
    """Compute metrics by their formulas, from merged statistics by name."""
    return {key: float(compiled(formula).value(values, 0.0)) for key, formula in formulas.items()}


def metrics(values: Mapping[str, float], spec: Spec, name: str) -> dict[str, float]:
    """A scheme's metrics from merged statistics by name."""
    load(spec)
    return read(_LOADED[name].formulas(spec), values)


def rows(spec: Spec) -> dict[str, Metric]:
    """The metrics of all schemes by their keys."""
    load(spec)
    return {
        key: Metric(key, f"{name}'s, by its formula", "", EACH, "-", formula)
        for name in spec.report
        if name in SCHEMES
        for key, formula in _LOADED[name].formulas(spec).items()
    }
