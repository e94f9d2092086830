"""Statistics by label of a sequence, such as its environment: the sums and maxima of the whole batch, a set a label.

Every sum of tokens is taken per sequence first, so that a batch is passed over once, however many labels there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.facts import Named, SequenceFacts
from rollout_corr.definition.few import FewBounded
from rollout_corr.definition.findings import Findings, above, below
from rollout_corr.definition.near import Near
from rollout_corr.definition.tokens import LARGEST_STATISTIC, select
from rollout_corr.metrics import native
from rollout_corr.metrics.aggregates import AllSequences, aggregates_of, moment_values, weighs_sequences
from rollout_corr.metrics.rows import Metric
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.thresholds import log_bound


@dataclass(frozen=True)
class Labels:
    """What sequences are told apart by.

    Attributes:
        name: Such as "environment".
        values: The name of each label, in the order of the ids.
    """

    name: str
    values: tuple[str, ...]

    @property
    def outside(self) -> str:
        """The name of the sum of sequences whose id names no label."""
        return f"{self.name}=?/sequences"

    def own(self, value: str) -> str:
        """What the names of a label's statistics begin with."""
        return f"{self.name}={value}/"


class Labelled(NamedTuple):
    """Labels, and those of the sequences of a batch.

    Attributes:
        labels: Their names.
        ids: [S] integers.
    """

    labels: Labels
    ids: Tensor


# --- names ---


class Columns(NamedTuple):
    """Names of the sums and maxima of a label."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]


OF_TOKENS = ("abs_d", "d2", "k3", "ratio", "ratio2", "tokens_clamped")


@lru_cache(maxsize=256)
def columns_of(spec: Spec) -> Columns:
    """Name the statistics of a label, in order: of tokens, of sequences."""
    sums, maxima = list(OF_TOKENS), ["max_d", "-min_d"]
    if _weighs(spec):
        sums += ["raw2", "weight2"]
        maxima += ["max_raw", "-min_raw", "max_weight", "-min_weight"]
        maxima += ["max_sequence_raw", "-min_sequence_raw", "max_sequence_weight", "-min_sequence_weight"]
        sums += ["tokens_above", "tokens_below"] * (not spec.weighs_prefixes)
    maxima += ["max_log_ppl_diff", "-min_log_ppl_diff", "max_abs_sum_d"]
    for criterion in _criteria(spec):
        value = f"{criterion.label}/value"
        sums += [value, f"{value}2"]
        maxima += [f"max_{value}", f"-min_{value}"]
    sums += [row.sums[0] for row in aggregates_of(spec) if row.at in ("sequences", "measured")]
    return Columns(tuple(sums), tuple(maxima))


def _weighs(spec: Spec) -> bool:
    return spec.weighs_tokens or weighs_sequences(spec)


def _criteria(spec: Spec) -> list[Criterion]:
    """The criteria whose values are measured by label: not those of turns."""
    return [criterion for criterion in spec.criteria if criterion.over != "turn"]


def sums_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all sums, label after label."""
    return (labels.outside, *(labels.own(value) + name for value in labels.values for name in columns_of(spec).sums))


def maxima_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all maxima, label after label."""
    return tuple(labels.own(value) + name for value in labels.values for name in columns_of(spec).maxima)


# --- values ---


class PerSequence(NamedTuple):
    """Sums and maxima of the tokens of each sequence, [S] float64 by name."""

    sums: Named
    maxima: Named


def of_block(f: Findings) -> PerSequence:
    """Sum the tokens of each sequence of a block."""
    tokens, spec, sequences = f.tokens, f.spec, f.tokens.sequences
    near = tokens.near
    sums = {
        "abs_d": sequences.sum(tokens.size),
        "ratio": tokens.excess_of_sequences,
        "tokens_clamped": _clamped(f),
    }
    if near is not None:
        squares = near.d2_of_sequences(), near.k3_of_sequences(), near.excess2_of_sequences(near.few_excess)
    else:
        each = tokens.saturated * tokens.saturated, tokens.k3, tokens.excess * tokens.excess
        squares = sequences.sum(each[0]), sequences.sum(each[1]), sequences.sum(each[2])
    sums |= dict(zip(("d2", "k3", "ratio2"), squares, strict=True))
    maxima = _ends("d", tokens.d, f, tokens.measured)
    weight, weighing = spec.weight, f.weighing
    if near is not None and f.few is not None and weight is not None and weight.outside == "clamp":
        more = _near_weights(near, f.few, weight, sums["ratio2"], maxima)
        sums, maxima = sums | more.sums, maxima | more.maxima
    elif weight is not None and weighing is not None and spec.weighs_tokens:
        raw, bounded = weighing.raw, weighing.bounded
        counted = [select(tokens.measured, x) for x in (raw, bounded)]
        sums |= {name: sequences.sum(x * x) for name, x in zip(("raw2", "weight2"), counted, strict=True)}
        maxima |= _ends("raw", raw, f, tokens.measured) | _ends("weight", bounded, f, tokens.measured)
        if not spec.weighs_prefixes:
            for name, which in (
                ("tokens_above", above(weighing.log_ratio, log_bound(weight.upper))),
                ("tokens_below", below(weighing.log_ratio, log_bound(weight.lower))),
            ):
                sums[name] = tokens.count(which if tokens.measured is None else which & tokens.measured).double()
    for outcome in f.decision.outcomes:
        if outcome.criterion.per_token:
            value, among = moment_values(outcome.criterion, outcome.value, outcome.among, spec)
            name = f"{outcome.criterion.label}/value"
            counted_value = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
            sums |= {name: sequences.sum(counted_value), f"{name}2": sequences.sum(counted_value * counted_value)}
            maxima |= _ends(name, value, f, among)
    return PerSequence(sums, maxima)


def _near_weights(near: Near, few: FewBounded, weight: Weight, raw2: Tensor, of_d: Named) -> PerSequence:
    """Give the sums of token weights where all but a few tokens are near 1, within the bounds, which clamp the rest."""
    low, high = log_bound(weight.lower), log_bound(weight.upper)
    nothing = torch.zeros_like(raw2)
    sums = {
        "raw2": raw2,
        "weight2": near.excess2_of_sequences(few.few),
        "tokens_above": nothing if high is None else near.added(nothing, (near.few > high).double()),
        "tokens_below": nothing if low is None else near.added(nothing, (near.few < low).double()),
    }
    least = None if weight.lower is None else weight.lower - 1.0
    most = None if weight.upper is None else weight.upper - 1.0
    maxima: Named = {}
    for name, sign in (("max", 1.0), ("-min", -1.0)):
        # Rounded as the value of a token is; infinite where a sequence has none.
        d = sign * of_d[f"{name}_d"]
        raw = d.clamp(-near.clamp, near.clamp).expm1().to(near.d.dtype).double()
        bounded = raw if not weight.bounded else raw.clamp(least, most).to(near.d.dtype).double()
        maxima[f"{name}_raw"] = torch.where(d.isfinite(), sign * raw, -torch.inf)
        maxima[f"{name}_weight"] = torch.where(d.isfinite(), sign * bounded, -torch.inf)
    return PerSequence(sums, maxima)


def _clamped(f: Findings) -> Tensor:
    clamped, d = f.tokens.clamped(), f.tokens.d
    if clamped is d:
        return torch.zeros_like(f.tokens.sum_d)
    return f.tokens.count(clamped != d).double()


def _ends(name: str, x: Tensor, f: Findings, among: Tensor | None) -> Named:
    """The maximum and the negated minimum of each sequence."""
    sequences = f.tokens.sequences
    if among is None:
        high, low = sequences.ends(x)
    else:
        high, low = (sequences.max(torch.where(among, side, -torch.inf)) for side in (x, -x))
    return {f"max_{name}": high.double(), f"-min_{name}": low.double()}


def of_facts(facts: SequenceFacts, spec: Spec) -> PerSequence:
    """Give the values of each sequence of a batch that are not sums over its tokens."""
    view = AllSequences(facts, 0.0, spec, False)
    measured = facts.measured > 0
    rows = aggregates_of(spec)
    sums: Named = {row.sums[0]: torch.as_tensor(row.value(view)[0]) for row in rows if row.at == "sequences"}
    # Chosen in one operation for all of them.
    over = {row.sums[0]: torch.as_tensor(row.value(view)[0]).double() for row in rows if row.at == "measured"}
    sums |= zip(over, torch.where(measured, torch.stack(list(over.values())), 0.0).unbind(), strict=True)
    extreme = {"log_ppl_diff": (view.gap, measured)}
    if _weighs(spec):
        extreme |= {"sequence_raw": (facts.raw, measured), "sequence_weight": (facts.bounded, measured)}
    if weighs_sequences(spec) and spec.weight is not None:
        upper, lower = log_bound(spec.weight.upper), log_bound(spec.weight.lower)
        each = {"raw2": facts.raw * facts.raw, "weight2": facts.bounded * facts.bounded}
        each |= {"tokens_above": above(facts.log_weight, upper), "tokens_below": below(facts.log_weight, lower)}
        sums |= {name: torch.where(measured, facts.measured * x, 0.0) for name, x in each.items()}
        extreme |= {"raw": (facts.raw, measured), "weight": (facts.bounded, measured)}
    for criterion in _criteria(spec):
        if not criterion.per_token:
            found, name = view.criteria[criterion.label], f"{criterion.label}/value"
            value, among = moment_values(criterion, found.value, found.units, spec)
            counted = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
            sums |= {name: counted, f"{name}2": counted * counted}
            extreme[name] = value, found.units if among is None else among
    maxima = {"max_abs_sum_d": torch.where(measured, view.size, -torch.inf)}
    ends = torch.stack([x.double() for x, _ in extreme.values()])
    every = torch.stack([among for _, among in extreme.values()])
    for sign, x in (("max", ends), ("-min", -ends)):
        rows_of_ends = torch.where(every, x, -torch.inf).unbind()
        maxima |= {f"{sign}_{name}": values for name, values in zip(extreme, rows_of_ends, strict=True)}
    return PerSequence(sums, maxima)


def by_label(labelled: Labelled, blocks: list[PerSequence], facts: SequenceFacts, spec: Spec) -> tuple[Tensor, Tensor]:
    """The sums and maxima of every label, in the order of `sums_of` and `maxima_of`.

    Args:
        labelled: Labels, and the id of each sequence.
        blocks: Those of the blocks, in order.
        facts: Of all sequences.
        spec: The Spec.
    """
    columns, whole = columns_of(spec), of_facts(facts, spec)
    many = len(labelled.labels.values)
    ids = labelled.ids.long()
    # A label of its own for ids that name none: an index out of range would end a process on a device.
    place = torch.where((ids >= 0) & (ids < many), ids, many)

    def table(names: tuple[str, ...], of: list[Mapping[str, Tensor]], given: Mapping[str, Tensor]) -> Tensor:
        rows = [given[name] if name in given else torch.cat([part[name] for part in of]) for name in names]
        return torch.stack([row.double() for row in rows])

    sums = table(columns.sums, [part.sums for part in blocks], whole.sums)
    maxima = table(columns.maxima, [part.maxima for part in blocks], whole.maxima)
    added = sums.new_zeros(len(columns.sums), many + 1).scatter_add_(1, place.expand_as(sums), sums)
    highest = maxima.new_full((len(columns.maxima), many + 1), -torch.inf)
    highest.scatter_reduce_(1, place.expand_as(maxima), maxima, "amax")
    outside = added[columns.sums.index("sequences"), many:]
    return torch.cat([outside, added[:, :many].T.reshape(-1)]), highest[:, :many].T.reshape(-1)


# --- metrics ---


@lru_cache(maxsize=256)
def metrics_of(spec: Spec) -> tuple[Metric, ...]:
    """The rows of the native metrics that a label has: those whose statistics it has."""
    columns = columns_of(spec)
    known = dict.fromkeys((*columns.sums, *columns.maxima), 1.0)

    def has(row: Metric) -> bool:
        try:
            row.read(known)
        except KeyError:
            return False
        return True

    return tuple(row for row in native.metrics_of(spec) if has(row))


def unit_of(row: Metric) -> str:
    """The units that a metric counts or is a mean over: "tokens" or "sequences"."""
    return "sequences" if "sequence" in (row.unit if row.over.units is None else row.over.words) else "tokens"


def read(labels: Labels, spec: Spec, values: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of every label, under "environment/LABEL/tokens/kl_k3", from statistics by name."""
    found = {f"{labels.name}/outside/sequences": values[labels.outside]}
    names = [name for part in columns_of(spec) for name in part]
    for value in labels.values:
        own = labels.own(value)
        of_label = {name: values[own + name] for name in names}
        for row in metrics_of(spec):
            found[f"{labels.name}/{value}/{unit_of(row)}/{row.key}"] = row.read(of_label)
    return found
