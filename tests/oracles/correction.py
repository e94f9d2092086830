"""The oracle: the definition once more, as loops over Python floats.

It shares no code with the package beyond the `Spec` it is given, and no cleverness: a sequence is a list of tokens,
a sum is `math.fsum`, an exponential is `math.exp`. Read it beside the definition. Metrics are in `metrics.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oracles import prefix
from oracles.ages import age_at, beside, decayed
from oracles.numbers import (
    D_RANGE,
    NAN,
    STAT_RANGE,
    add,
    clamp,
    exp,
    k3,
    largest,
    log,
    probability,
    reduced,
    saturate,
)

INF = math.inf


@dataclass
class Sequence:
    """One sequence. Lists of one length; `advantages` may be one number for the whole sequence."""

    train: list
    rollout: list
    mask: list
    advantages: list | float | None = None
    external: dict = field(default_factory=dict)
    mass: list | None = None  # log of the mass that truncated sampling kept
    renormalized: str = "rollout"
    versions: list | int | None = None  # of the policies that sampled, per token or for the whole sequence
    current_version: int = 0

    def __len__(self):
        return len(self.train)


@dataclass
class Token:
    """A valid token as the rest of the definition reads it. `measured` tokens enter sums, extrema and metrics."""

    train: float
    rollout: float
    d: float
    measured: bool
    finite: bool


@dataclass
class Outcome:
    """The outcome of one criterion: per unit its value, whether it was tested and failed, and the tokens dropped."""

    values: list  # per sequence: a value (or None), or a list of values (None at tokens not measured)
    tested: list
    failed: list
    dropped: list  # per sequence a list of bool


@dataclass
class Answer:
    weights: list | None
    mask: list  # per sequence, the values handed back
    mask_is_the_given: bool
    keep: list
    rejected: list  # per sequence, a bool per token
    raw: list  # per sequence, the weight before the bounds at each token (None where not defined)
    bounded: list  # the same after the bounds, before normalization
    outcomes: list
    tokens: list  # per sequence, a Token or None
    growths: list  # per sequence, by what the log of the bounds grows at each token
    ages: list  # per sequence, one per token; empty without versions
    entropies: list  # likewise, of the entropy given


# --- per token -------------------------------------------------------------------------------------------------------


def binary_kl(p, q, d, eps):
    """KL of the two-point distributions, p against q, where log p - log q = -d."""
    u, v = max(1.0 - p, eps), max(1.0 - q, eps)
    return -p * d + u * (log(u) - log(v))


def statistic(stat, token, spec_clamp, token_clamp=None, eps=1e-8, external=None):
    """The value of `stat` at a token."""
    d = clamp(token.d, token_clamp)
    bounded = clamp(d, spec_clamp)
    p, q = probability(token.rollout), probability(token.train)
    if stat == "ratio":
        return d  # ratios live in log space
    if stat == "k1":
        return -d
    if stat == "k2":
        return d * d / 2.0
    if stat == "abs":
        return abs(d)
    if stat == "k3":
        return k3(bounded)
    if stat == "k3_reverse":
        return k3(-bounded)
    if stat == "ratio_error":
        return exp(abs(bounded))
    if stat == "ratio_deviation":
        return abs(math.expm1(bounded))
    if stat == "prob_diff":
        return q - p
    if stat == "tv":
        return abs(q - p)
    if stat in ("age", "entropy"):
        return external
    if stat == "binary_kl":
        return binary_kl(p, q, token.d, eps)
    if stat == "binary_kl_reverse":
        return binary_kl(q, p, -token.d, eps)
    if stat == "binary_kl_symmetric":
        return largest([binary_kl(p, q, token.d, eps), binary_kl(q, p, -token.d, eps)])
    assert stat == "external", stat
    return external


def read_tokens(sequence, spec):
    """A Token for every valid position, None for the others."""
    tokens = []
    for t, (train, rollout, mask) in enumerate(zip(sequence.train, sequence.rollout, sequence.mask, strict=True)):
        if mask == 0:
            tokens.append(None)
            continue
        if sequence.mass is not None and sequence.renormalized == "rollout":
            train -= sequence.mass[t]
        elif sequence.mass is not None:
            rollout -= sequence.mass[t]
        d = train - rollout
        finite = math.isfinite(d)
        if not finite and spec.nonfinite == "neutral":
            train, rollout, d = 0.0, 0.0, 0.0
        measured = finite or spec.nonfinite != "reject"
        tokens.append(Token(train, rollout, d, measured, finite))
    return tokens


# --- weights ---------------------------------------------------------------------------------------------------------


def log_weight(weight, ds):
    """The log of a sequence-level weight from the D of the tokens that count."""
    total = add(saturate(clamp(d, weight.token_clamp), D_RANGE) for d in ds)
    if weight.kind == "geometric":
        return total / len(ds) if ds else 0.0
    return total


def bound(weight, raw, growth=1.0):
    lower, upper = (None if end is None else end**growth for end in (weight.lower, weight.upper))
    inside = (lower is None or raw >= lower) and (upper is None or raw <= upper)
    if inside:
        return raw
    if weight.outside == "zero":
        return 0.0
    if math.isnan(raw):
        return raw
    return lower if lower is not None and raw < lower else upper


def weigh(spec, tokens, survives):
    """Per sequence and position: the weight before and after the bounds, and the divisor of `normalize`."""
    weight = spec.weight
    raw = [[None] * len(row) for row in tokens]
    growths = [[1.0] * len(row) for row in tokens]
    units = []
    for s, row in enumerate(tokens):
        measured = [t for t in range(len(row)) if row[t] is not None and row[t].measured]
        if weight.over == "token":
            for t in measured:
                raw[s][t] = exp(clamp(clamp(row[t].d, weight.token_clamp), spec.clamp))
                units.append(bound(weight, raw[s][t]))
        elif weight.over == "prefix":
            counts = [t in measured and survives[s][t] for t in range(len(row))]
            ds = [None if token is None else clamp(token.d, weight.token_clamp) for token in row]
            logs, growths[s] = prefix.log_weights(weight, ds, counts), prefix.growths(weight.growth, counts)
            for t in measured:
                raw[s][t] = exp(clamp(logs[t], spec.clamp))
                units.append(bound(weight, raw[s][t], growths[s][t]))
        elif measured:
            counted = [row[t].d for t in measured if survives[s][t]]
            value = exp(clamp(log_weight(weight, counted), spec.clamp))
            for t in range(len(row)):
                if row[t] is not None:
                    raw[s][t] = value
            units.append(bound(weight, value))
    pairs = [zip(*rows, strict=True) for rows in zip(raw, growths, strict=True)]
    bounded = [[None if w is None else bound(weight, w, growth) for w, growth in row] for row in pairs]
    divisor = 1.0
    if weight.normalize == "batch" and units:
        mean = add(units) / len(units)
        if not mean <= 1e-8:
            divisor = mean
    return raw, bounded, growths, divisor


# --- criteria --------------------------------------------------------------------------------------------------------


def passes(criterion, value, growth=1.0):
    lower, upper = criterion.lower, criterion.upper
    if criterion.stat == "ratio":
        lower = None if lower is None else log(lower)
        upper = None if upper is None else log(upper)
    lower, upper = (None if end is None else end * growth for end in (lower, upper))
    return (lower is None or value >= lower) and (upper is None or value <= upper)


def advantage_at(sequence, t):
    return sequence.advantages[t] if isinstance(sequence.advantages, list) else sequence.advantages


def selects(criterion, sequence, token, t):
    """True if `when` selects a valid token."""
    if criterion.when == "any":
        return True
    advantage = advantage_at(sequence, t)
    if criterion.when == "negative_advantage":
        return advantage < 0
    if criterion.when == "positive_advantage":
        return advantage > 0
    return token.measured and ((advantage > 0 and token.d > 0) or (advantage < 0 and token.d < 0))


def selects_sequence(criterion, sequence, tokens):
    """True if `when` selects a sequence as a unit."""
    if criterion.when in ("any", "outward") or criterion.drop == "token":
        return any(t is not None and t.measured and selects(criterion, sequence, t, i) for i, t in enumerate(tokens))
    valid = [i for i, t in enumerate(tokens) if t is not None]
    mean = add(advantage_at(sequence, i) for i in valid) / len(valid) if valid else NAN
    return mean < 0 if criterion.when == "negative_advantage" else mean > 0


def decide(criterion, spec, sequences, tokens, survives):
    """One criterion over the whole batch."""
    outcome = Outcome([], [], [], [])
    for sequence, row, alive in zip(sequences, tokens, survives, strict=True):
        values = [
            None
            if token is None or not token.measured
            else statistic(
                criterion.stat,
                token,
                spec.clamp,
                criterion.token_clamp,
                criterion.eps,
                beside(criterion, sequence, t),
            )
            for t, token in enumerate(row)
        ]
        chosen = [
            token is not None and token.measured and selects(criterion, sequence, token, t)
            for t, token in enumerate(row)
        ]
        if criterion.over == "token":
            failed = [chosen[t] and not passes(criterion, values[t]) for t in range(len(row))]
            outcome.values.append(values)
            outcome.tested.append(chosen)
            outcome.failed.append(failed)
            outcome.dropped.append(
                [token is not None and any(failed) for token in row] if criterion.drop == "sequence" else failed
            )
            continue
        limit = D_RANGE if criterion.stat in ("ratio", "k1", "abs") else STAT_RANGE
        if criterion.over == "prefix":
            columns = prefix.decide(criterion, values, chosen, alive, limit, passes)
            for column, found in zip((outcome.values, outcome.tested, outcome.failed), columns, strict=False):
                column.append(found)
            outcome.dropped.append([token is not None and lost for token, lost in zip(row, columns[3], strict=True)])
            continue
        counted = [values[t] for t in range(len(row)) if values[t] is not None and alive[t]]
        value = reduced(criterion.reduce, counted, limit) if counted else None
        tested = value is not None and selects_sequence(criterion, sequence, row)
        failed = tested and not passes(criterion, value)
        outcome.values.append(value)
        outcome.tested.append(tested)
        outcome.failed.append(failed)
        outcome.dropped.append(
            [failed and (chosen[t] if criterion.drop == "token" else row[t] is not None) for t in range(len(row))]
        )
    return outcome


# --- the whole -------------------------------------------------------------------------------------------------------


def correct(sequences, spec):
    """Everything that `rollout_corr.correct` computes, from a list of Sequence."""
    tokens = [read_tokens(sequence, spec) for sequence in sequences]
    everything = [[True] * len(row) for row in tokens]
    over_tokens = [decide(c, spec, sequences, tokens, everything) if c.over == "token" else None for c in spec.criteria]

    survives = everything
    if spec.sums_over == "kept":
        survives = [
            [not any(v.dropped[s][t] for v in over_tokens if v is not None) for t in range(len(row))]
            for s, row in enumerate(tokens)
        ]
    outcomes = [
        decide(c, spec, sequences, tokens, survives) if early is None else early
        for c, early in zip(spec.criteria, over_tokens, strict=True)
    ]

    acts = spec.weight is not None or len(spec.criteria) > 0
    broken = [
        acts and spec.nonfinite == "reject" and any(t is not None and not t.finite for t in row) for row in tokens
    ]
    keep, rejected = [], []
    for s, row in enumerate(tokens):
        sequence_fails = broken[s]
        for criterion, outcome in zip(spec.criteria, outcomes, strict=True):
            if criterion.drops_sequences:
                failed = outcome.failed[s]
                sequence_fails = sequence_fails or (any(failed) if isinstance(failed, list) else failed)
        keep.append(not sequence_fails)
        rejected.append(
            [t is not None and (sequence_fails or any(v.dropped[s][i] for v in outcomes)) for i, t in enumerate(row)]
        )

    raw = bounded = growths = [[None] * len(row) for row in tokens]
    divisor = 1.0
    if spec.weight is not None:
        raw, bounded, growths, divisor = weigh(spec, tokens, survives)
    weights = None
    if spec.apply and (spec.weight is not None or spec.rejected != "mask"):
        weights = []
        for s, row in enumerate(tokens):
            weights.append([])
            for t, token in enumerate(row):
                w = 1.0 if spec.weight is None else bounded[s][t]
                zeroed = broken[s] or (rejected[s][t] and spec.rejected in ("zero", "both"))
                w = w / divisor if w and token is not None and token.measured and not zeroed else 0.0
                weights[s].append(decayed(w, spec, sequences[s], t))

    edits = spec.apply and spec.rejected in ("mask", "both")
    edits = edits and (len(spec.criteria) > 0 or (spec.weight is not None and spec.nonfinite == "reject"))
    mask = [[0 if edits and rejected[s][t] else m for t, m in enumerate(q.mask)] for s, q in enumerate(sequences)]
    ages = [[age_at(q, t) for t in range(len(q))] for q in sequences if q.versions is not None]
    entropies = [q.external["entropy"] for q in sequences if "entropy" in q.external]
    return Answer(weights, mask, not edits, keep, rejected, raw, bounded, outcomes, tokens, growths, ages, entropies)
