"""The oracle of a correction: docs/math.md once more, as loops over Python floats, for units of every kind.

It shares no code with the package beyond the `Spec` that it is given, and no cleverness: a sequence is a list of
tokens, a unit a list of their places, a sum is `math.fsum`. Metrics are in `metrics.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

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
    smallest,
)


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
    turns: list | None = None  # lengths that add up to the tokens
    others: dict = field(default_factory=dict)  # two log-probs by `Criterion.of`, of other pairs of policies

    def __len__(self):
        return len(self.train)

    def units(self, over):
        """The places of each turn, or of the sequence."""
        lengths = self.turns if over == "turn" else [len(self)]
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]

    def age(self, t):
        version = self.versions[t] if isinstance(self.versions, list) else self.versions
        return float(self.current_version - version)

    def advantage(self, t):
        return self.advantages[t] if isinstance(self.advantages, list) else self.advantages


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
    """The outcome of one criterion: per sequence a list of its units, or of tokens."""

    criterion: Any
    values: list  # None for a unit without a token that counts
    tested: list
    failed: list
    dropped: list  # per token


@dataclass
class Answer:
    sequences: list
    weights: list | None
    mask: list  # per sequence, the values handed back
    mask_is_the_given: bool
    keep: list
    keep_turns: list  # per sequence, a bool for each turn
    rejected: list  # per sequence, a bool per token
    raw: list  # per sequence, the weight before the bounds at each token (None where there is none)
    bounded: list  # the same after the bounds, before normalization
    growths: list  # by what the log of the bounds grows at each token
    units: list  # per sequence, the raw and the bounded weight of each of its units
    divided: list  # per sequence, the mean that its weights are divided by; None: there is none
    outcomes: list
    tokens: list  # per sequence, a Token or None


# --- tokens ---


def binary_kl(log_p, log_q, d, eps):
    """KL of the two-point distributions, p against q, where log p - log q = -d."""
    u, v = (max(-math.expm1(smallest([x, 0.0])), eps) for x in (log_p, log_q))
    return -probability(log_p) * d + u * (log(u) - log(v))


def finite_or_nan(x):
    return x if math.isfinite(x) else math.nan


def statistic(criterion, spec, sequence, token, t):
    """The statistic of a token; a ratio is in log space."""
    d = clamp(token.d, criterion.token_clamp)
    near, p, q = clamp(d, spec.clamp), probability(token.rollout), probability(token.train)
    kl = binary_kl(token.rollout, token.train, token.d, criterion.eps)
    back = binary_kl(token.train, token.rollout, -token.d, criterion.eps)
    return {
        "ratio": lambda: d,
        "k1": lambda: -d,
        "k2": lambda: d * d / 2.0,
        "abs": lambda: abs(d),
        "k3": lambda: k3(near),
        "k3_reverse": lambda: k3(-near),
        "ratio_error": lambda: exp(abs(near)),
        "ratio_deviation": lambda: abs(math.expm1(near)),
        "prob_diff": lambda: q - p,
        "tv": lambda: abs(q - p),
        "binary_kl": lambda: kl,
        "binary_kl_reverse": lambda: back,
        "binary_kl_symmetric": lambda: largest([kl, back]),
        "age": lambda: sequence.age(t),
        "entropy": lambda: finite_or_nan(sequence.external["entropy"][t]),
        "external": lambda: sequence.external[criterion.name][t],
    }[criterion.stat]()


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
        tokens.append(Token(train, rollout, d, finite or spec.nonfinite != "reject", finite))
    return tokens


def read_pairs(sequence, spec):
    """The tokens of every pair of policies by `Criterion.of`; no kept mass lies between new and old."""
    found = {"train/rollout": read_tokens(sequence, spec)}
    for of, (train, rollout) in sequence.others.items():
        mass = None if of == "new/old" else sequence.mass
        found[of] = read_tokens(replace(sequence, train=train, rollout=rollout, mass=mass), spec)
    return found


def measured(row, places):
    return [t for t in places if row[t] is not None and row[t].measured]


def rejects_nonfinite(spec, rows):
    """Whether a token that is not finite, for one of the pairs of policies, rejects its sequence."""
    acts = spec.weight is not None or len(spec.criteria) > 0
    return acts and spec.nonfinite == "reject" and any(t is not None and not t.finite for row in rows for t in row)


# --- criteria ---


def passes(criterion, value, count=1):
    """Whether a value, of a prefix of so many tokens where bounds grow, is within the bounds."""
    growth = 1.0 if criterion.growth is None else math.sqrt(count)
    ends = criterion.lower, criterion.upper
    if criterion.stat == "ratio":
        ends = [None if end is None else log(end) for end in ends]
    low, high = (None if end is None else end * growth for end in ends)
    return (low is None or value >= low) and (high is None or value <= high)


def selects(criterion, sequence, token, t):
    """Whether `when` selects a measured token."""
    a = sequence.advantage(t)
    return {
        "any": lambda: True,
        "negative_advantage": lambda: a < 0,
        "positive_advantage": lambda: a > 0,
        "outward": lambda: (a > 0 and token.d > 0) or (a < 0 and token.d < 0),
    }[criterion.when]()


def selects_unit(criterion, sequence, row, places, chosen):
    """Whether `when` selects a turn or sequence: by the mean of its finite advantages, or by a token of it."""
    if criterion.drop == "token" or criterion.when in ("any", "outward"):
        return any(chosen[t] for t in places)
    valid = [sequence.advantage(t) for t in places if row[t] is not None]
    if isinstance(sequence.advantages, list):
        valid = [a for a in valid if math.isfinite(a)]
    mean = add(valid) / len(valid) if valid else NAN
    return mean < 0 if criterion.when == "negative_advantage" else mean > 0


def decide(criterion, spec, sequence, row, alive):
    """Values, tests, failures and the tokens dropped of one criterion in one sequence; sums run over what is alive."""
    each = [
        statistic(criterion, spec, sequence, token, t) if token is not None and token.measured else None
        for t, token in enumerate(row)
    ]
    chosen = [
        each[t] is not None and selects(criterion, sequence, token, t) for t, token in enumerate(row)
    ]  # fmt: skip
    limit = D_RANGE if criterion.stat in ("ratio", "k1", "abs") else STAT_RANGE
    values, tested, failed, dropped = [], [], [], [False] * len(row)
    if criterion.over in ("token", "prefix"):
        for stretch in sequence.units(criterion.within):
            stopped = False
            for t in stretch:
                counted = [each[i] for i in stretch if i <= t and each[i] is not None and alive[i]]
                if criterion.over == "token":
                    value = each[t]
                else:
                    here = each[t] is not None and alive[t]
                    value = reduced(criterion.reduce, counted, limit) if here else None
                values.append(value)
                tested.append(chosen[t] and value is not None)
                failed.append(tested[t] and not passes(criterion, value, len(counted)))
                stopped = stopped or failed[t]
                dropped[t] = failed[t] or (criterion.drop == "rest" and stopped and row[t] is not None)
    else:
        for places in sequence.units(criterion.over):
            counted = [each[t] for t in places if each[t] is not None and alive[t]]
            values.append(reduced(criterion.reduce, counted, limit) if counted else None)
            tested.append(bool(counted) and selects_unit(criterion, sequence, row, places, chosen))
            failed.append(tested[-1] and not passes(criterion, values[-1]))
            for t in places if failed[-1] else []:
                dropped[t] = chosen[t] if criterion.drop == "token" else row[t] is not None
    if criterion.drop == "sequence" and any(failed):
        dropped = [token is not None for token in row]
    return values, tested, failed, dropped


# --- weights ---


def log_weight(weight, row, places, counted, t):
    """The log of the weight at a token of a unit: of the unit, or of the prefix that ends there."""
    ds = {i: clamp(row[i].d, weight.token_clamp) for i in places}
    if weight.over == "token":
        return ds[t]
    if weight.over == "prefix":
        counted = [i for i in counted if i <= t]
        if weight.reduce == "min":
            before = [ds[i] for i in counted if i != t]
            return (ds[t] if t in counted else 0.0) + (smallest(before) if before else 0.0)
    total = add(saturate(ds[i], D_RANGE) for i in counted)
    return total / max(len(counted), 1) if weight.reduce == "mean" else total


def bound(weight, raw, growth=1.0):
    low, high = (None if end is None else end**growth for end in (weight.lower, weight.upper))
    if weight.outside == "zero":
        inside = (low is None or raw >= low) and (high is None or raw <= high)
        return raw if inside else 0.0
    # Where two bounds cross, the upper one holds.
    raw = low if low is not None and raw < low else raw
    return high if high is not None and raw > high else raw


def weigh(spec, sequence, row, alive):
    """Raw weights and growths by place, and the raw and bounded weight of every unit of one sequence."""
    weight, raw, growths, units = spec.weight, [None] * len(row), [1.0] * len(row), []
    over = weight.within if weight.over == "prefix" else weight.over
    for places in sequence.units(over):
        some = measured(row, places)
        counted = [t for t in some if alive[t]]
        for t in some:
            raw[t] = exp(clamp(log_weight(weight, row, some, counted, t), spec.clamp))
            if weight.over == "prefix" and weight.growth is not None:
                growths[t] = math.sqrt(max(1, sum(i <= t for i in counted)))
            if weight.over in ("token", "prefix") or t == some[0]:
                units.append((raw[t], bound(weight, raw[t], growths[t])))
    return raw, growths, units


def divisor(spec, tokens, broken, bounded, units, s, groups):
    """The mean that the weights of a sequence are divided by; None: there is none."""
    normalize = spec.weight.normalize
    together = {
        None: [],
        "batch": list(range(len(tokens))),
        "sequence": [s],
        "group": [i for i in range(len(tokens)) if groups is not None and groups[i] == groups[s]],
    }[normalize]
    values = []
    for i in together:
        if normalize == "sequence":
            counted = [bounded[i][t] for t in measured(tokens[i], range(len(tokens[i])))]
        else:
            counted = [weight for _, weight in units[i]]
        if normalize == "batch" or not broken[i]:
            values += counted
    return add(values) / len(values) if values else None


# --- the whole ---


def correct(sequences, spec, groups=None):
    """Everything that `rollout_corr.correct` computes, from a list of Sequence and their groups."""
    pairs = [read_pairs(sequence, spec) for sequence in sequences]
    tokens = [rows["train/rollout"] for rows in pairs]
    # Any pair rejects the sequence; a weight is of train and rollout alone.
    broken = [rejects_nonfinite(spec, [row]) for row in tokens]
    alive = [[True] * len(row) for row in tokens]
    outcomes = {}
    for early in (True, False):
        for criterion in spec.criteria:
            if (criterion.over == "token") == early:
                rows = [of.get(criterion.of, of["train/rollout"]) for of in pairs]
                found = [decide(criterion, spec, *one) for one in zip(sequences, rows, alive, strict=True)]
                outcomes[criterion.label] = Outcome(criterion, *([one[i] for one in found] for i in range(4)))
        if early and spec.sums_over == "kept":
            taken = [outcome.dropped for outcome in outcomes.values()]
            alive = [[not any(x[s][t] for x in taken) for t in range(len(row))] for s, row in enumerate(tokens)]
    outcomes = [outcomes[criterion.label] for criterion in spec.criteria]

    keep, keep_turns, rejected = [], [], []
    for s, (sequence, row) in enumerate(zip(sequences, tokens, strict=True)):
        falls, lost_turns = rejects_nonfinite(spec, pairs[s].values()), set()
        for outcome in outcomes:
            over, drop, failed = outcome.criterion.over, outcome.criterion.drop, outcome.failed[s]
            falls = falls or (any(failed) and (drop == "sequence" or (drop == "unit" and over == "sequence")))
            if over == "turn" and drop == "unit":
                lost_turns |= {u for u, one in enumerate(failed) if one}
        turns = [any(row[t] is not None for t in places) for places in sequence.units("turn")] if sequence.turns else []
        keep.append(not falls)
        keep_turns.append([not (some and (falls or u in lost_turns)) for u, some in enumerate(turns)])
        lost = [any(outcome.dropped[s][t] for outcome in outcomes) for t in range(len(row))]
        rejected.append([token is not None and (falls or lost[t]) for t, token in enumerate(row)])

    raw = bounded = growths = [[None] * len(row) for row in tokens]
    units, divided = [[] for _ in tokens], [None for _ in tokens]
    weight = spec.weight
    if weight is not None:
        found = [weigh(spec, *one) for one in zip(sequences, tokens, alive, strict=True)]
        raw, growths, units = ([one[i] for one in found] for i in range(3))
        bounded = [
            [None if w is None else bound(weight, w, growth) for w, growth in zip(*rows, strict=True)]
            for rows in zip(raw, growths, strict=True)
        ]
        divided = [divisor(spec, tokens, broken, bounded, units, s, groups) for s in range(len(tokens))]
    weights = None
    if spec.apply and (weight is not None or spec.rejected != "mask"):
        weights = []
        for s, (sequence, row) in enumerate(zip(sequences, tokens, strict=True)):
            weights.append([0.0] * len(row))
            for t in measured(row, range(len(row))):
                if broken[s] or (rejected[s][t] and spec.rejected != "mask"):
                    continue
                w = 1.0 if weight is None else bounded[s][t]
                if w and divided[s] is not None and not divided[s] <= 1e-8:
                    w /= divided[s]
                if w and weight is not None and weight.decay is not None:
                    w *= weight.decay ** max(sequence.age(t), 0.0)
                weights[s][t] = w

    edits = spec.apply and spec.rejected != "zero"
    edits = edits and (len(spec.criteria) > 0 or (weight is not None and spec.nonfinite == "reject"))
    mask = [[0 if edits and rejected[s][t] else m for t, m in enumerate(q.mask)] for s, q in enumerate(sequences)]
    return Answer(
        sequences, weights, mask, not edits, keep, keep_turns, rejected, raw, bounded, growths, units, divided,
        outcomes, tokens,
    )  # fmt: skip


# --- bounds that the batch decides ---


def kept(rule, side, values):
    """True for each value that a rule keeps; NaN is kept by none.

    Args:
        rule: A rule of the package; its fields are read.
        side: "lower" or "upper".
        values: Floats.
    """
    numbers = [x for x in values if not math.isnan(x)]
    good = set()
    # The kept values grow by one distinct value after another, from the end that the side keeps.
    for candidate in sorted(set(numbers), reverse=side == "lower"):
        up_to = [x for x in numbers if (x >= candidate if side == "lower" else x <= candidate)]
        if type(rule).__name__ == "MeanBelow":
            if good and not mean_is_below(up_to, rule.below):
                break
            good.add(candidate)
            if not mean_is_below(up_to, rule.below):
                break
            continue
        good.add(candidate)
        if enough(rule, side, len(up_to), len(numbers)):
            break
    return [x in good for x in values]


def enough(rule, side, count, n):
    if type(rule).__name__ == "Quantile":
        return count / n >= rule.q if side == "upper" else (n - count) / n <= rule.q
    return count / n >= rule.share if rule.count is None else count >= rule.count


def mean_is_below(values, below):
    """Exactly, without rounding; an infinite value is never below."""
    if math.inf in values:
        return False
    if -math.inf in values:
        return True
    return sum(map(Fraction, values)) < Fraction(below) * len(values)


def sample_size(weights, bound):
    """(sum of w)^2 / (n sum of w^2) of weights clamped at a bound."""
    clamped = [min(w, bound) for w in weights]
    return math.fsum(clamped) ** 2 / (len(clamped) * math.fsum(w * w for w in clamped))
