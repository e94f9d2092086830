"""Statistics by label of a sequence: the sums and maxima of the whole batch, a set a label.

Every sum of tokens is taken per sequence first, so that a batch is passed over once, however many labels there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.facts import Named
from rollout_corr.definition.findings import Findings, above, below
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.tokens import LARGEST_STATISTIC, select, tensor_of
from rollout_corr.metrics.aggregates import moment_values, rows_at, weighs_sequences
from rollout_corr.metrics.all_sequences import AllSequences
from rollout_corr.metrics.labels import (
    BEYOND,
    SQUARES,
    Labelled,
    columns_of,
    criteria_of,
    places_of,
    sorted_by,
    weighs,
)
from rollout_corr.metrics.rows import Aggregate
from rollout_corr.spec.caches import cached


class Taken(NamedTuple):
    """Sums and maxima of the tokens of each sequence, by name."""

    sums: Named
    maxima: Named


class PerSequence(NamedTuple):
    """Values of each sequence that labels sum, [columns, S] float64.

    Attributes:
        sums, maxima: In the order of `Columns`.
    """

    sums: Tensor
    maxima: Tensor


def stacked(taken: Named, names: tuple[str, ...]) -> Tensor:
    """Put tensors of any dtypes in order, [columns, S] float64: one operation a dtype, not one a tensor."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name in names:
        kinds.setdefault(taken[name].dtype, []).append(name)
    parts = [torch.stack([taken[name] for name in same]).double() for same in kinds.values()]
    if len(parts) == 1:
        return parts[0]
    joined, held = torch.cat(parts), tuple(name for same in kinds.values() for name in same)
    if joined.device.type == "cpu" and not torch.compiler.is_compiling():
        return joined.index_select(0, _order(held, names))
    # An index would be copied to a device, which waits.
    rows = dict(zip(held, joined.unbind(), strict=True))
    return torch.stack([rows[name] for name in names])


@cached(maxsize=256)
def _order(names: tuple[str, ...], wanted: tuple[str, ...]) -> Tensor:
    """Find the places of names that are wanted in another order."""
    with torch.inference_mode(False):
        return torch.tensor([names.index(name) for name in wanted], device="cpu")


def of_block(f: Findings) -> PerSequence:
    """Sum the tokens of each sequence of a block."""
    columns, taken = columns_of(f.spec, "sequences"), _of_block(f)
    return PerSequence(stacked(taken.sums, columns.sums), stacked(taken.maxima, columns.maxima))


def _of_block(f: Findings) -> Taken:
    tokens, spec, sequences = f.tokens, f.spec, f.tokens.sequences
    sums = {"abs_d": sequences.sum(tokens.size), "tokens_clamped": _clamped(f)}
    each = tokens.saturated * tokens.saturated, tokens.k3, tokens.excess * tokens.excess
    sums |= {name: sequences.sum(x) for name, x in zip(("d2", "k3", "ratio2"), each, strict=True)}
    sums["ratio"] = tokens.excess_of_sequences
    maxima = _ends("d", tokens.d, f, tokens.measured)
    weight, weighing = spec.weight, f.weighing
    if weight is not None and weighing is not None and spec.weighs_tokens:
        raw, bounded = weighing.raw, weighing.bounded
        counted = [select(tokens.measured, x) for x in (raw, bounded)]
        sums |= {name: sequences.sum(x * x) for name, x in zip(("raw2", "weight2"), counted, strict=True)}
        maxima |= _ends("raw", raw, f, tokens.measured) | _ends("weight", bounded, f, tokens.measured)
        if not spec.weighs_prefixes:
            for name, which in (
                ("tokens_above", above(weighing.log_ratio, weighing.bounds.high)),
                ("tokens_below", below(weighing.log_ratio, weighing.bounds.low)),
            ):
                sums[name] = tokens.count(which if tokens.measured is None else which & tokens.measured)
    for outcome in f.decision.outcomes:
        if outcome.criterion.per_token:
            value, among = moment_values(outcome.criterion, outcome.value, outcome.among, spec)
            name = f"{outcome.criterion.label}/value"
            counted_value = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
            sums |= {name: sequences.sum(counted_value), f"{name}2": sequences.sum(counted_value * counted_value)}
            maxima |= _ends(name, value, f, among)
    return Taken(sums, maxima)


def _clamped(f: Findings) -> Tensor:
    clamped, d = f.tokens.clamped(), f.tokens.d
    if clamped is d:
        return torch.zeros_like(f.tokens.sum_d)
    return f.tokens.count(clamped != d)


def _ends(name: str, x: Tensor, f: Findings, among: Tensor | None) -> Named:
    """The maximum and the negated minimum of each sequence."""
    sequences = f.tokens.sequences
    if among is None:
        high, low = sequences.ends(x)
    else:
        high, low = (sequences.max(torch.where(among, side, -torch.inf)) for side in (x, -x))
    return {f"max_{name}": high, f"-min_{name}": low}


def of_facts(view: AllSequences) -> PerSequence:
    """Give the values of each sequence of a batch that are not sums over its tokens.

    Args:
        view: Of all sequences; what statistics of the batch were made of it is not made again.
    """
    facts, spec, known = view.facts, view.spec, view.each
    unread, among = view.unread(), view.among

    def value(row: Aggregate) -> Tensor:
        assert row.each is not None
        found = known.get(row.sums[0])
        return found if isinstance(found, Tensor) else tensor_of(row.each(unread))

    sums: Named = {row.sums[0]: value(row) for row in rows_at(spec, "sequences") if row.each}
    over = {row.sums[0]: value(row) for row in rows_at(spec, "measured") if row.each}
    if among is not None:
        # Chosen in one operation for all of them.
        chosen = select(among, stacked(over, tuple(over)))
        over = dict(zip(over, chosen.unbind(), strict=True))
    sums |= over
    extreme = {"log_ppl_diff": (tensor_of(unread.column("gap")), among)}
    if weighs_sequences(spec) and spec.weight is not None:
        upper, lower = view.bounds.high, view.bounds.low
        squares = [facts.measured * facts.raw * facts.raw, facts.measured * facts.bounded * facts.bounded]
        beyond = [facts.measured * side(facts.log_weight, bound) for side, bound in ((above, upper), (below, lower))]
        # Of a sequence without measured tokens each of them is 0: its weight is finite.
        sums |= dict(zip((*SQUARES, *BEYOND), squares + beyond, strict=True))
        extreme |= {"raw": (facts.raw, among), "weight": (facts.bounded, among)}
    if weighs(spec):
        extreme |= {"sequence_raw": (facts.raw, among), "sequence_weight": (facts.bounded, among)}
    for criterion in criteria_of(spec):
        if not criterion.per_token:
            found, name = view.criteria[criterion.label], f"{criterion.label}/value"
            of_units, which = moment_values(criterion, found.value, found.units, spec)
            counted = select(which, of_units).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
            sums |= {name: counted, f"{name}2": counted * counted}
            extreme[name] = of_units, which
    columns = columns_of(spec, "sequences")
    return PerSequence(stacked(sums, columns.more_sums), _ends_of_sequences(unread, extreme))


def _ends_of_sequences(view: AllSequences, extreme: dict[str, tuple[Tensor, Tensor | None]]) -> Tensor:
    """The columns of `Columns.more_maxima`: the largest |sum of D|, then each value and then each negated value."""
    ends = stacked({name: x for name, (x, _) in extreme.items()}, tuple(extreme))
    ends = torch.cat([tensor_of(view.column("size"))[None], ends, -ends])
    if all(which is None for _, which in extreme.values()):
        return ends
    measured = view.facts.measured > 0
    every = [measured if which is None else which for _, which in extreme.values()]
    return torch.where(torch.stack([measured, *every, *every]), ends, -torch.inf)


def joined(blocks: list[PerSequence], view: AllSequences) -> PerSequence:
    """Put together what the blocks of a batch gave, and what its sequences give, in the order of `Columns`."""
    whole, sums, maxima = of_facts(view), [part.sums for part in blocks], [part.maxima for part in blocks]
    return PerSequence(
        torch.cat([torch.cat(sums, 1) if sums[1:] else sums[0], whole.sums]),
        torch.cat([torch.cat(maxima, 1) if maxima[1:] else maxima[0], whole.maxima]),
    )


def by_label(labelled: Labelled, found: PerSequence, look: bool) -> tuple[Tensor, Tensor]:
    """The sums and maxima of every label, in the order of `sums_of` and `maxima_of`.

    Args:
        labelled: Labels, and the id of each sequence.
        found: Of `joined`.
        look: Read values, as `evaluate` does: it is on the CPU, where a scatter adds up in order.
    """
    many, place = len(labelled.labels.every), places_of(labelled)
    sums, maxima = found
    if look:
        added = sums.new_zeros(sums.shape[0], many).scatter_add_(1, place.expand_as(sums), sums)
        highest = maxima.new_full((maxima.shape[0], many), -torch.inf)
        highest.scatter_reduce_(1, place.expand_as(maxima), maxima, "amax")
        return added.view(-1), highest.view(-1)
    order, units = sorted_by(place, many)
    return _reduced(sums.index_select(1, order), units, False), _reduced(maxima.index_select(1, order), units, True)


def _reduced(table: Tensor, units: Packed, largest: bool) -> Tensor:
    """Add up each row of a table, [columns, S], by label, or take the largest: [columns * labels]."""
    columns, count = table.shape
    starts = torch.arange(columns, device=table.device)[:, None] * count
    offsets = torch.cat([(starts + units.offsets[:-1]).view(-1), units.offsets.new_full((1,), columns * count)])
    everywhere = Packed(offsets, columns * count)
    return everywhere.max(table.view(-1)) if largest else everywhere.sum(table.view(-1))
