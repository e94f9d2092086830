"""The oracle of all units in one Spec, tokens, turns, prefixes and sequences, from docs/math.md.

Units are lists of places in their sequence. Beside numbers.py it shares nothing with the other oracles, which know one
kind of unit each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

from oracles.numbers import D_RANGE, STAT_RANGE, add, clamp, exp, k3, log, reduced, saturate, smallest


@dataclass
class Told:
    """A sequence as the caller tells it; `turns` are lengths that add up to its tokens."""

    d: list  # in the dtype that computes
    mask: list
    turns: list
    advantages: list | float = 0.0
    ages: list = field(default_factory=list)
    entropy: list = field(default_factory=list)
    label: int = 0


def stretches(lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]


def value_of(criterion, spec, told, d, t):
    """A criterion's statistic of one token; a ratio as its logarithm."""
    of_d = clamp(d, criterion.token_clamp)
    near = clamp(of_d, spec.clamp)
    return {
        "ratio": lambda: of_d,
        "k1": lambda: -of_d,
        "k2": lambda: of_d * of_d / 2,
        "abs": lambda: abs(of_d),
        "k3": lambda: k3(near),
        "k3_reverse": lambda: k3(-near),
        "ratio_error": lambda: exp(abs(near)),
        "ratio_deviation": lambda: abs(math.expm1(near)),
        "age": lambda: told.ages[t],
        "external": lambda: told.entropy[t],
    }[criterion.stat]()


def fails(criterion, value, t=1):
    """Tell whether a value, at the t-th token of its prefix where bounds grow, is out of bounds."""
    growth = 1.0 if criterion.growth is None else math.sqrt(t)
    ends = criterion.lower, criterion.upper
    if criterion.stat == "ratio":
        ends = [None if end is None else log(end) for end in ends]
    low, high = (None if end is None else end * growth for end in ends)
    return not ((low is None or value >= low) and (high is None or value <= high))


def advantage_of(told, t):
    return told.advantages[t] if isinstance(told.advantages, list) else told.advantages


def selected(criterion, told, d, t):
    """Tell whether `when` selects a measured token."""
    a = advantage_of(told, t)
    return {
        "any": True,
        "negative_advantage": a < 0,
        "positive_advantage": a > 0,
        "outward": (a > 0 and d > 0) or (a < 0 and d < 0),
    }[criterion.when]


class Sequence:
    """One sequence while it is corrected: places of valid and of measured tokens, and what is lost of them."""

    def __init__(self, told, spec):
        self.told, self.spec = told, spec
        self.d = list(told.d)
        self.valid = [t for t, m in enumerate(told.mask) if m]
        self.nonfinite = [t for t in self.valid if not math.isfinite(self.d[t])]
        self.measured = list(self.valid)
        if spec.nonfinite == "reject":
            self.measured = [t for t in self.valid if t not in self.nonfinite]
        elif spec.nonfinite == "neutral":
            for t in self.nonfinite:
                self.d[t] = 0.0
        self.counts = set(self.measured)  # what sums run over
        self.turns = stretches(told.turns)
        self.lost, self.lost_turns, self.fell = set(), set(), False
        self.lost_to = {}  # by label of a criterion, the tokens that it took

    def take(self, criterion, tokens):
        self.lost_to.setdefault(criterion.label, set()).update(tokens)
        self.lost |= set(tokens)

    def fall(self, criterion):
        self.take(criterion, self.valid)
        self.fell = True

    def value(self, criterion, t):
        return value_of(criterion, self.spec, self.told, self.d[t], t)

    def run(self, criterion):
        limit = D_RANGE if criterion.stat in ("ratio", "k1", "abs") else STAT_RANGE
        chosen = {t for t in self.measured if selected(criterion, self.told, self.d[t], t)}
        self.lost_to.setdefault(criterion.label, set())
        if criterion.over == "token":
            bad = [t for t in sorted(chosen) if fails(criterion, self.value(criterion, t))]
            if criterion.drop == "sequence" and bad:
                self.fall(criterion)
            elif criterion.drop != "sequence":
                self.take(criterion, bad)
        elif criterion.over == "prefix":
            for places in self.turns if criterion.within == "turn" else [range(len(self.d))]:
                self.run_prefix(criterion, list(places), chosen, limit)
        else:
            units = self.turns if criterion.over == "turn" else [range(len(self.d))]
            for u, places in enumerate(units):
                self.run_unit(criterion, u, list(places), chosen, limit)

    def run_prefix(self, criterion, places, chosen, limit):
        before, stopped = [], False
        for t in places:
            failed = False
            if t in self.counts:
                before.append(self.value(criterion, t))
                value = reduced(criterion.reduce, before, limit)
                failed = t in chosen and fails(criterion, value, len(before))
            stopped = stopped or failed
            if criterion.drop == "sequence" and failed:
                self.fall(criterion)
            elif (criterion.drop == "rest" and stopped and t in self.valid) or failed:
                self.take(criterion, [t])

    def run_unit(self, criterion, u, places, chosen, limit):
        counted = [self.value(criterion, t) for t in places if t in self.counts]
        if not counted or not fails(criterion, reduced(criterion.reduce, counted, limit)):
            return
        if criterion.drop == "token":
            self.take(criterion, [t for t in places if t in chosen])
            return
        if criterion.when == "outward" and not any(t in chosen for t in places):
            return
        if criterion.when in ("negative_advantage", "positive_advantage"):
            valid = [advantage_of(self.told, t) for t in places if t in self.valid]
            mean = add(valid) / len(valid)
            if not (mean < 0 if criterion.when == "negative_advantage" else mean > 0):
                return
        if criterion.over == "sequence" or criterion.drop == "sequence":
            self.fall(criterion)
        else:
            self.take(criterion, [t for t in places if t in self.valid])
            self.lost_turns.add(u)

    def weights(self):
        """Raw weights by place, and those of units that the batch's mean is over: pairs of raw weight and growth."""
        weight, spec = self.spec.weight, self.spec
        raw, units = {}, []
        if weight.over == "token":
            raw = {t: (exp(clamp(clamp(self.d[t], weight.token_clamp), spec.clamp)), 1.0) for t in self.measured}
            return raw, list(raw.values())
        for places in self.turns if weight.over == "turn" else [range(len(self.d))]:
            here = [t for t in places if t in self.measured]
            ds = {t: clamp(self.d[t], weight.token_clamp) for t in here}
            counted = [t for t in here if t in self.counts]
            if weight.over == "prefix":
                for t in here:
                    prefix = [i for i in counted if i <= t]
                    raw[t] = exp(clamp(self.log_of_prefix(ds, t, prefix), spec.clamp)), max(1, len(prefix))
                continue
            if here:
                total = add(saturate(ds[t], D_RANGE) for t in counted)
                total = total / max(1, len(counted)) if weight.kind == "geometric" else total
                units.append((exp(clamp(total, spec.clamp)), 1.0))
                raw |= dict.fromkeys(here, units[-1])
        return raw, units if weight.over != "prefix" else list(raw.values())

    def log_of_prefix(self, ds, t, prefix):
        reduce = self.spec.weight.reduce
        if reduce == "min":
            before = [ds[i] for i in prefix if i != t]
            return (ds[t] if t in prefix else 0.0) + (smallest(before) if before else 0.0)
        total = add(saturate(ds[i], D_RANGE) for i in prefix)
        return total if reduce == "sum" else total / max(1, len(prefix))


def bounded(weight, pair):
    raw, t = pair
    growth = 1.0 if weight.growth is None else math.sqrt(t)
    low, high = (None if end is None else end**growth for end in (weight.lower, weight.upper))
    if low is not None and raw < low:
        return 0.0 if weight.outside == "zero" else low
    if high is not None and raw > high:
        return 0.0 if weight.outside == "zero" else high
    return raw


def correct(sequences, spec):
    """Weights, mask, keep and keep_turns of every sequence, and counts by the names of metrics."""
    every = [Sequence(told, spec) for told in sequences]
    for criterion in spec.criteria:
        if criterion.over == "token":
            for one in every:
                one.run(criterion)
    if spec.sums_over == "kept":
        for one in every:
            one.counts -= one.lost
    for criterion in spec.criteria:
        if criterion.over != "token":
            for one in every:
                one.run(criterion)
    acts = spec.weight is not None or spec.criteria
    broken = [bool(acts and spec.nonfinite == "reject" and one.nonfinite) for one in every]
    for one, bad in zip(every, broken, strict=True):
        if bad:
            one.fell, one.lost = True, one.lost | set(one.valid)

    divisor, found = 1.0, [one.weights() if spec.weight is not None else ({}, []) for one in every]
    if spec.weight is not None and spec.weight.normalize == "batch":
        units = [bounded(spec.weight, pair) for _, pairs in found for pair in pairs]
        mean = add(units) / max(1, len(units))
        divisor = mean if mean > 1e-8 else 1.0
    weights, mask, keep_turns = [], [], []
    edits = spec.apply and spec.rejected != "zero"
    for one, bad, (raw, _) in zip(every, broken, found, strict=True):
        row = [0.0] * len(one.d)
        for t in one.measured:
            if bad or (spec.rejected != "mask" and t in one.lost):
                continue
            row[t] = 1.0 if spec.weight is None else bounded(spec.weight, raw[t]) / divisor
            if spec.weight is not None and spec.weight.decay is not None:
                row[t] *= spec.weight.decay ** max(one.told.ages[t], 0)
        weights.append(row)
        mask.append([0 if edits and t in one.lost else m for t, m in enumerate(one.told.mask)])
        for u, places in enumerate(one.turns):
            some = any(t in one.valid for t in places)
            keep_turns.append(not (some and (one.fell or u in one.lost_turns)))
    if not spec.apply or (spec.weight is None and spec.rejected == "mask"):
        weights = None
    return SimpleNamespace(
        weights=weights, mask=mask, keep=[not one.fell for one in every], keep_turns=keep_turns,
        counts=counts(every, spec), by={n: counts([o for o in every if o.told.label == n], spec) for n in range(3)},
        every=every, ages=[one.told.ages[t] for one in every for t in one.valid if one.told.ages],
    )  # fmt: skip


def counts(every, spec):
    """Metrics that are counts, of some of the sequences."""
    some = [one for one in every if one.valid]
    tokens = sum(len(one.valid) for one in some)
    turns = [(one, u) for one in some for u, row in enumerate(one.turns) if any(t in one.valid for t in row)]
    found = {
        "tokens": tokens,
        "tokens_nonfinite": sum(len(one.nonfinite) for one in some),
        "tokens_kept": sum(len(set(one.valid) - one.lost) for one in some),
        "sequences": len(some),
        "sequences_kept": sum(not one.fell for one in some),
        "sequences_without_survivors": sum(not one.fell and one.lost >= set(one.valid) for one in some),
        "turns": len(turns),
        "turns_kept": sum(not one.fell and u not in one.lost_turns for one, u in turns),
    }
    for criterion in spec.criteria:
        lost = [one.lost_to[criterion.label] for one in some]
        found[f"{criterion.label}/tokens_rejected_fraction"] = sum(map(len, lost)) / max(1, tokens)
        found[f"{criterion.label}/sequences_rejected_fraction"] = sum(map(bool, lost)) / max(1, len(some))
    return found
