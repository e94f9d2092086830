"""The native statistics: additive sums and maxima of everything that a metric needs.

Token statistics are taken where the tokens are (per block of the CPU backend), sequence statistics once, from the
per-sequence facts of all blocks. Minima travel as maxima of the negated value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition import correction
from rollout_corr.definition.correction import Decision, Weighing
from rollout_corr.definition.histogram import histogram
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.thresholds import log_bound
from rollout_corr.definition.tokens import (
    LARGEST_D,
    LARGEST_LOG_PERPLEXITY,
    LARGEST_STATISTIC,
    Tokens,
    extrema,
    few_above,
    k3,
    probability,
    select,
)
from rollout_corr.spec.correction import Criterion, Spec

Named = dict[str, Tensor]


@dataclass
class CriterionFacts:
    """Per sequence, what one criterion did."""

    value: Tensor  # [S] the sequence's value, or [0] for token criteria
    measured: Tensor  # [S] bool
    tokens: Tensor  # [S] int64, valid tokens that it rejected


@dataclass
class SequenceFacts:
    """What the sequence statistics need; every tensor is [S]."""

    criteria: list[CriterionFacts]
    tokens: Tensor
    measured: Tensor
    nonfinite: Tensor
    kept: Tensor
    keep: Tensor
    train: Tensor
    rollout: Tensor
    d: Tensor
    raw: Tensor
    bounded: Tensor
    ratio: Tensor
    weight: Tensor
    log_weight: Tensor


@dataclass
class Block:
    """Some whole sequences and all that the definition found out about them; what a report collects from."""

    tokens: Tokens
    n_valid: Tensor  # [S] int64
    n_measured: Tensor  # [S] int64
    decision: Decision
    weighing: Weighing | None
    facts: SequenceFacts


class Beyond(NamedTuple):
    """The tokens beyond the bounds of a token weight, where they are few."""

    places: Tensor  # [k] int64
    sequences: Tensor  # [k] int64, the sequence of each
    above: int
    below: int


def few_beyond(tokens: Tokens, weighing: Weighing | None, spec: Spec) -> Beyond | None:
    """Find them, where values may be read; None where they are many.

    Not in float64: sums that are mended at these tokens lose what a ratio of e^20 swallows, up to 1e-7.
    """
    weight = spec.weight
    if weighing is None or weight is None or weight.level != "token" or tokens.largest is None:
        return None
    log_ratio = weighing.log_ratio
    if log_ratio.dtype == torch.float64 or not isinstance(tokens.sequences, Packed):
        return None
    low, high = correction.limits(log_ratio.dtype, log_bound(weight.lower), log_bound(weight.upper))
    nowhere = torch.zeros(0, dtype=torch.int64)
    above = nowhere if high is None else few_above(log_ratio, high)
    below = nowhere if low is None else few_above(-log_ratio, -low)
    if above is None or below is None:
        return None
    places = torch.cat([above, below])
    return Beyond(places, tokens.sequences.of(places), above.shape[0], below.shape[0])


def concatenate(parts: list[SequenceFacts]) -> SequenceFacts:
    """The facts of consecutive blocks as one."""
    if len(parts) == 1:
        return parts[0]

    def joined(items: Iterable[object], fields: Iterable[str]) -> list[Tensor]:
        rows = [vars(item) for item in items]
        return [torch.cat([row[name] for row in rows]) for name in fields]

    criteria = [
        CriterionFacts(*joined([part.criteria[i] for part in parts], CriterionFacts.__dataclass_fields__))
        for i in range(len(parts[0].criteria))
    ]
    plain = [name for name in SequenceFacts.__dataclass_fields__ if name != "criteria"]
    return SequenceFacts(criteria, *joined(parts, plain))


def sequence_facts(
    tokens: Tokens,
    n_valid: Tensor,
    n_measured: Tensor,
    decision: Decision,
    weighing: Weighing | None,
    spec: Spec,
    beyond: Beyond | None,
) -> SequenceFacts:
    """Gather what is known per sequence, with the segment sums that no verdict needed."""
    sequences = tokens.sequences
    nothing = torch.zeros(0, dtype=torch.float64, device=tokens.d.device)
    raw = bounded = ratio = weight = log_weight = nothing
    summands = [tokens.train]
    token_level = spec.weight is not None and spec.weight.level == "token"
    bounds = spec.weight is not None and (spec.weight.lower, spec.weight.upper) != (None, None)
    if weighing is not None:
        raw, bounded, log_weight = weighing.raw, weighing.bounded, weighing.log_ratio
        weight = weighing.weight
        if weighing.ratio is not None:
            ratio = weighing.ratio
        if token_level:
            both = bounds and beyond is None
            summands += [select(tokens.measured, x) for x in ([raw, bounded] if both else [raw])]
    sums = [sequences.sum(x) for x in summands]
    if beyond is not None and bounds:
        # Elsewhere the bounds change nothing.
        after, before = (x.index_select(0, beyond.places).double() for x in (bounded, raw))
        sums.append(sums[-1].index_add(0, beyond.sequences, after - before))
    if tokens.largest is not None and tokens.largest <= LARGEST_D:
        rollout = sums[0] - tokens.sum_d
    else:
        rollout = sequences.sum(tokens.rollout)
    if token_level:
        n = n_measured.clamp(min=1)
        raw, bounded = sums[1] / n, sums[-1] / n
        ratio, weight, log_weight = 1.0 + raw, 1.0 + bounded, raw.log1p()
    criteria = []
    for verdict in decision.outcomes:
        lost = torch.zeros_like(n_valid)
        if verdict.failed is not None:
            lost = torch.where(verdict.failed, n_valid, 0)
        elif verdict.struck is not None and verdict.selected is not None:
            lost = torch.where(verdict.struck, tokens.count(verdict.selected), 0)
        elif verdict.dropped is not None:
            lost = tokens.count(verdict.dropped)
        if verdict.criterion.over == "token" or verdict.among is None:
            criteria.append(CriterionFacts(nothing, nothing, lost))
        else:
            criteria.append(CriterionFacts(verdict.value, verdict.among, lost))
    return SequenceFacts(
        criteria=criteria,
        tokens=n_valid,
        measured=n_measured,
        nonfinite=torch.zeros_like(n_valid) if tokens.nonfinite is None else tokens.nonfinite,
        kept=tokens_kept(tokens, n_valid, decision),
        keep=decision.keep,
        train=sums[0],
        rollout=rollout,
        d=tokens.sum_d,
        raw=raw,
        bounded=bounded,
        ratio=ratio,
        weight=weight,
        log_weight=log_weight,
    )


def tokens_kept(tokens: Tokens, n_valid: Tensor, decision: Decision) -> Tensor:
    """[S] int64: valid tokens that are not rejected.

    What is counted must not depend on a verdict (see reference.survivors), so where failed sequences lose some of their
    tokens, all that they can be left with is counted, and their verdicts choose.
    """
    if decision.dropped is None:
        return torch.where(decision.keep, n_valid, 0)
    left = [torch.ones_like(tokens.d, dtype=torch.bool) if tokens.valid is None else tokens.valid]
    choice = torch.zeros_like(n_valid)
    for verdict in decision.outcomes:
        if verdict.struck is not None and verdict.selected is not None:
            choice = choice + verdict.struck * len(left)
            left += [which & ~verdict.selected for which in left]
        elif verdict.dropped is not None:
            left = [which & ~verdict.dropped for which in left]
    counts = torch.stack([tokens.count(which) for which in left])
    return torch.where(decision.keep, counts.gather(0, choice[None])[0], 0)


def token_statistics(
    tokens: Tokens,
    n_measured: Tensor,
    decision: Decision,
    weighing: Weighing | None,
    spec: Spec,
    beyond: Beyond | None,
) -> tuple[Named, Named]:
    """Sums and maxima over the measured tokens."""
    d, measured = tokens.d, tokens.measured
    n = n_measured.sum()
    saturated, ratio = tokens.saturated, tokens.excess
    sums: Named = {
        "tokens_measured": n,
        "abs_d": saturated.abs().sum(),
        "d2": _squares(saturated),
        "k3": tokens.k3.sum(),
        "ratio": ratio.sum(),
        "ratio2": _squares(ratio),
        "tokens_clamped": torch.count_nonzero(tokens.clamped() - d) if tokens.clamped() is not d else n * 0,
    }
    low, high = tokens.extrema
    maxima: Named = {"max_d": high, "-min_d": low}
    if weighing is not None and spec.weight is not None:
        bounds = log_bound(spec.weight.lower), log_bound(spec.weight.upper)
        raw, bounded, among = weighing.raw, weighing.bounded, measured
        if spec.weight.level == "token":
            squares = [sums["ratio2"] if x is ratio else _squares(select(measured, x)) for x in (raw, bounded)]
            if beyond is not None:
                counts = [n.new_tensor(beyond.above), n.new_tensor(beyond.below)]
            else:
                some = [spec.weight.upper is not None, spec.weight.lower is not None]
                chosen = [x if measured is None else x & measured for x in outside(weighing.log_ratio, *bounds)]
                counts = [torch.count_nonzero(x) if bound else n * 0 for x, bound in zip(chosen, some, strict=True)]
        else:
            among = n_measured > 0
            squares = [(n_measured * x * x).sum() for x in (raw, bounded)]
            counts = [(n_measured * x).sum() for x in outside(weighing.log_ratio, *bounds)]
        sums.update(dict(zip(("raw2", "weight2", "tokens_above", "tokens_below"), squares + counts, strict=True)))
        maxima["-min_raw"], maxima["max_raw"] = extrema(raw, among)
        maxima["-min_weight"], maxima["max_weight"] = extrema(bounded, among)
    for verdict in decision.outcomes:
        if verdict.criterion.over == "token":
            units = n
            if verdict.among is not None and verdict.among is not measured:
                units = tokens.count(verdict.among).sum()
            moments(verdict.criterion, verdict.value, verdict.among, units, spec, sums, maxima)
    if spec.detail == "full":
        # Around 1, where most probabilities are, and in float64, so that the correlation does not cancel.
        p, q = (select(measured, probability(x) - 1.0) for x in (tokens.rollout, tokens.train))
        gap, p, q = (p - q).abs(), p.double(), q.double()
        sums.update({"p": p.sum(), "q": q.sum(), "p2": _squares(p), "q2": _squares(q), "pq": (p * q).sum()})
        sums.update({"abs_prob_diff": gap.sum(), "histogram": histogram(d, measured)})
        maxima["max_abs_prob_diff"] = extrema(gap, measured)[1]
    return sums, maxima


def sequence_statistics(facts: SequenceFacts, outside_tokens: Tensor, spec: Spec) -> tuple[Named, Named]:
    """Sums and maxima over the non-empty sequences, each counting once."""
    n, some = facts.measured.clamp(min=1), facts.measured > 0
    train, rollout = -facts.train / n, -facts.rollout / n
    # From the sum of D, which is exact, and not from the difference of two large sums.
    gap, size = -facts.d / n, facts.d.abs()
    nonempty = facts.tokens > 0

    def perplexity(log_perplexity: Tensor) -> Tensor:
        return log_perplexity.clamp(max=LARGEST_LOG_PERPLEXITY).exp()

    counted: Named = {
        "tokens": facts.tokens,
        "tokens_nonfinite": facts.nonfinite,
        "tokens_kept": facts.kept,
        "sequences": nonempty,
        "sequences_measured": some,
        "sequences_kept": facts.keep & nonempty,
        "sequences_without_survivors": facts.keep & nonempty & (facts.kept == 0),
    }
    measured: Named = {
        "d": facts.d,
        "train_ppl": perplexity(train),
        "rollout_ppl": perplexity(rollout),
        "train_log_ppl": train,
        "rollout_log_ppl": rollout,
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": perplexity(gap),
        "chi2_sequence": (2.0 * facts.d.clamp(-spec.clamp, spec.clamp)).expm1(),
        "abs_sum_d": size,
        "sequences_clamped": size > spec.clamp,
    }
    spread: Named = {"log_ppl_diff": gap}
    if spec.weight is not None:
        # The 1 that raw and bounded are centred on counts once per token here, and once per sequence below.
        measured.update({"raw": facts.raw * facts.measured, "weight": facts.bounded * facts.measured})
        for name, x, plain in (("raw", facts.raw, facts.ratio), ("weight", facts.bounded, facts.weight)):
            measured.update({f"sequence_{name}": x, f"sequence_{name}2": x * x})
            measured.update({f"sequence_{name}_plain": plain, f"sequence_{name}_plain2": plain * plain})
            spread[f"sequence_{name}"] = x
            if spec.weight.level != "token":
                each = facts.measured * plain
                measured.update({f"{name}_plain": each, f"{name}_plain2": each * plain})
        beyond = outside(facts.log_weight, log_bound(spec.weight.lower), log_bound(spec.weight.upper))
        measured.update({"sequences_above": beyond[0], "sequences_below": beyond[1]})
    for criterion, found in zip(ordered_criteria(spec), facts.criteria, strict=True):
        counted.update({f"{criterion.label}/tokens": found.tokens, f"{criterion.label}/sequences": found.tokens > 0})
    sums = totals(counted, None) | totals(measured, some) | {"tokens_outside": outside_tokens}
    maxima = {"max_abs_sum_d": extrema(size, some)[1]}
    for name, x in spread.items():
        maxima[f"-min_{name}"], maxima[f"max_{name}"] = extrema(x, some)
    for criterion, found in zip(ordered_criteria(spec), facts.criteria, strict=True):
        if criterion.over == "sequence":
            moments(criterion, found.value, found.measured, found.measured.sum(), spec, sums, maxima)
    return sums, maxima


def totals(per_sequence: Named, among: Tensor | None) -> Named:
    """The sum of each [S] tensor over the chosen sequences, in float64."""
    stacked = select(among, torch.stack([x.double() for x in per_sequence.values()]))
    return dict(zip(per_sequence, stacked.sum(1).unbind(), strict=True))


def ordered_criteria(spec: Spec) -> list[Criterion]:
    """The criteria in the order in which they are run: over tokens, then over sequences."""
    return sorted(spec.criteria, key=lambda criterion: criterion.over != "token")


def moments(
    criterion: Criterion, value: Tensor, among: Tensor | None, units: Tensor, spec: Spec, sums: Named, maxima: Named
) -> None:
    """A criterion's own statistic over its units: a ratio around 1, everything else around 0."""
    if criterion.statistic.log_space:
        value = value.clamp(-spec.clamp, spec.clamp)
        value = value.expm1() if criterion.over == "sequence" else value + k3(value)
    if criterion.statistic.source == "caller":
        finite = value.isfinite()
        among = finite if among is None else among & finite
    # Squares of what is larger would overflow float32.
    label, counted = criterion.label, select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
    sums.update(
        {f"{label}/units": units, f"{label}/value": counted.sum(), f"{label}/value2": (counted * counted).sum()}
    )
    maxima[f"-min_{label}/value"], maxima[f"max_{label}/value"] = extrema(value, among)


def _squares(x: Tensor) -> Tensor:
    return (x * x).sum()


def outside(log_ratio: Tensor, below: float | None, above: float | None) -> tuple[Tensor, Tensor]:
    """Bool per unit: beyond the upper bound, and beyond the lower one."""
    nowhere = torch.zeros((), dtype=torch.bool, device=log_ratio.device).expand(log_ratio.shape)
    return (
        nowhere if above is None else ~correction.within(log_ratio, None, above),
        nowhere if below is None else ~correction.within(log_ratio, below, None),
    )
