"""The oracle of the policy loss: its formulas as loops over Python floats, whose slopes follow from `numbers.Moving`.

`sg` in a formula means: computed from the log-probs as they are, and not from the ones in which one moves. It shares no
code with the package beyond the frozen types that it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from oracles.numbers import D_RANGE, Moving, exp, fsum, k3, larger, log, slope_of, smaller, value_of
from rollout_corr import GPG


@dataclass
class Sequence:
    """One sequence. Lists of one length; None for what is not given. `advantages` may be one number."""

    new: list
    mask: list
    advantages: list | float
    old: list | None = None
    rollout: list | None = None
    ref: list | None = None
    weights: list | None = None
    train_mask: list | None = None
    scale: list | None = None  # factors of all that a token adds
    external: dict = field(default_factory=dict)
    mass: list | None = None  # log of the mass that truncated sampling kept
    renormalized: str = "rollout"
    entropy: list | None = None
    group: int | None = None
    number: int | None = None  # what draws know it by; None: its place in the batch

    def __len__(self):
        return len(self.new)


def base_of(sequence, surrogate, t):
    of = surrogate.of
    if of is None:
        of = "new/old" if sequence.old is not None else "new/rollout"
    base = sequence.old if of == "new/old" else sequence.rollout
    if base is None:
        return None
    if sequence.mass is None or of == "new/old":
        return base[t]
    # new - mass - rollout, or new - (rollout - mass).
    return base[t] + sequence.mass[t] * (1 if sequence.renormalized == "rollout" else -1)


def over_kept_set(sequence, surrogate, t, log_probs):
    """The policy that a ratio to the rollout compares: a log-prob over the tokens that could have been sampled."""
    of = surrogate.of or ("new/old" if sequence.old is not None else "new/rollout")
    if sequence.mass is None or of == "new/old" or sequence.renormalized == "train":
        return log_probs[t]
    return log_probs[t] - sequence.mass[t]


def is_finite(sequence, surrogate, t):
    base = base_of(sequence, surrogate, t)
    needed = [sequence.new[t], advantage(sequence, t)]
    needed += [x for x in (base,) if x is not None]
    needed += [x[t] for x in (sequence.ref, sequence.weights, sequence.scale) if x is not None]
    return all(math.isfinite(x) for x in needed)


def advantage(sequence, t):
    return sequence.advantages[t] if isinstance(sequence.advantages, list) else sequence.advantages


def valid(sequence):
    return [t for t in range(len(sequence)) if sequence.mask[t] != 0]


def known(sequence, surrogate):
    return [t for t in valid(sequence) if is_finite(sequence, surrogate, t)]


def trained(sequence, surrogate):
    return [t for t in known(sequence, surrogate) if sequence.train_mask is None or sequence.train_mask[t] != 0]


def clip(x, low, high):
    return smaller(larger(x, low), high)


def mean(values):
    values = list(values)
    return fsum(values) / len(values) if values else 0.0


def mean_log_ratio(values):
    """The mean of log-ratios, each within the range in which sums take it."""
    return mean(clip(x, -D_RANGE, D_RANGE) for x in values)


def ppo(s, r, a):
    if s.delta is not None:
        r = smaller(r, s.delta)
    loss = larger(-a * r, -a * clip(r, 1 - s.low, 1 + s.high))
    if a < 0 and s.dual is not None:
        loss = smaller(loss, -a * s.dual)
    return loss


def at_level(s, x, all_x):
    """The log-ratio of a token, of its sequence, or of one of the two means of both, each clamped."""
    if s.level == "token":
        return x
    whole = mean_log_ratio(all_x)
    if s.level == "sequence":
        return whole
    x, whole = clip(x, -s.clamp, s.clamp), clip(whole, -s.clamp, s.clamp)
    return (x + whole) / 2 if s.level == "geometric_average" else log((exp(x) + exp(whole)) / 2)


def rec_keeps(s, r, a):
    below, above = r < 1 - s.low, r > 1 + s.high
    if s.mask == "one_side":
        return not ((a > 0 and above) or (a < 0 and below))
    outside = below or above
    if s.mask == "two_side":
        return not outside
    return not outside or (a >= 0 and r <= 1 - s.far_low) or (a <= 0 and r >= 1 + s.far_high)


def vespo_log_ratio(s, all_x, weights):
    """The logarithm of the product of ratios and weights."""
    least = math.log(1e-8)
    parts = [clip(x, -s.clamp, s.clamp) for x in all_x]
    if weights is not None:
        parts += [clip(math.log(w) if w > 0 else least, least, s.clamp) for w in weights]
    return clip(math.fsum(parts), max(least, -s.clamp), s.clamp)


def level_of(s, x, all_x, weights):
    """The log-ratio that a surrogate's ratio is made of."""
    kind = type(s).__name__
    if kind in ("GSPO", "REAL"):
        return mean_log_ratio(all_x)
    if kind == "VESPO":
        return vespo_log_ratio(s, all_x, weights)
    if kind == "DRO" and s.level == "sequence":
        return math.fsum(clip(y, -1024, 1024) for y in all_x)
    return at_level(s, x, all_x) if kind in ("Score", "REC", "AveragePPO") else x


# --- surrogates -------------------------------------------------------------------------------------------------------


def surrogate_losses(s, sequence, new, stopped, weights_are_ratio, looked=None):
    """Per trained token: the surrogate's loss before weights.

    `looked` is what a surrogate that looks at the batch has seen.
    """
    tokens = trained(sequence, s)
    kind = type(s).__name__

    def x_of(t, log_probs):
        base = base_of(sequence, s, t)
        return log_probs[t] - (stopped[t] if base is None else base)

    def ratio(x):
        return exp(clip(x, -s.clamp, s.clamp))

    found = {}
    whole = contrast(s, looked, [x_of(u, new) for u in tokens]) if kind == "REAL" else 0.0
    for t in tokens:
        a, x, sg_x = advantage(sequence, t), x_of(t, new), x_of(t, stopped)
        if kind == "REAL":
            found[t] = whole if slope_of(new[t]) else value_of(whole)
        elif kind == "ClipCov":
            found[t] = 0.0 if t in looked else ppo(s, ratio(x), a)
        elif kind == "KLCov":
            found[t] = -ratio(x) * a + s.penalty * (t in looked) * smaller(abs(x), D_RANGE)
        elif kind == "PPO":
            found[t] = ppo(s, ratio(x), a)
        elif kind == "GSPO":
            level = mean_log_ratio(x_of(u, new) for u in tokens)
            if s.through == "token":
                level = mean_log_ratio(x_of(u, stopped) for u in tokens) + (new[t] - stopped[t])
            found[t] = ppo(s, ratio(level), a)
        elif kind == "AveragePPO":
            found[t] = ppo(s, ratio(at_level(s, x, [x_of(u, new) for u in tokens])), a)
        elif kind == "Reinforce":
            found[t] = -ratio(x) * a
        elif kind == "Score":
            r = ratio(at_level(s, sg_x, [x_of(u, stopped) for u in tokens]))
            inside = (s.lower is None or r >= s.lower) and (s.upper is None or r <= s.upper)
            if not inside:
                r = 0.0 if s.outside == "zero" else (s.lower if s.lower is not None and r < s.lower else s.upper)
            found[t] = -(1.0 if weights_are_ratio else r) * a * new[t]
        elif kind == "DPPO":
            r = 1.0 if weights_are_ratio else ratio(sg_x)
            r = r if s.upper is None else min(r, s.upper)
            found[t] = 0.0 if is_masked(s, sequence, t, stopped, sg_x) else -r * a * new[t]
        elif kind == "SAPO":
            tau = s.positive if a > 0 else s.negative
            of_gate = sg_x if s.gate == "stopped" else x
            found[t] = -(4 / tau) / (1 + exp(-tau * (ratio(of_gate) - 1))) * a
            if s.gate == "stopped":
                found[t] *= new[t]
        elif kind == "GMPO":
            parts = []
            for u in tokens:
                b, y = advantage(sequence, u), clip(x_of(u, new), -s.clamp, s.clamp)
                parts.append(smaller(y, s.high) if b > 0 else larger(y, -s.low) if b < 0 else y)
            found[t] = -mean(advantage(sequence, u) for u in tokens) * exp(mean(parts))
        elif kind == "TOPR":
            factor = s.positive if a > s.threshold else s.negative * min(ratio(sg_x), s.upper)
            found[t] = -factor * a * new[t]
        elif kind == "REC":
            r = ratio(at_level(s, sg_x, [x_of(u, stopped) for u in tokens]))
            factor = (r if s.weight == "ratio" else 1.0) * rec_keeps(s, r, a)
            found[t] = -factor * a * new[t]
        elif kind == "VESPO":
            weights = None if sequence.weights is None else [sequence.weights[u] for u in tokens]
            w = exp(vespo_log_ratio(s, [x_of(u, stopped) for u in tokens], weights))
            k, rate = (s.k_positive, s.rate_positive) if a >= 0 else (s.k_negative, s.rate_negative)
            found[t] = -math.exp(k * math.log(w) + rate * (1 - w)) * a * new[t]
        elif kind == "GPG":
            found[t] = -a * new[t]
        else:
            assert kind == "DRO", kind
            square = clip(x, -1024, 1024) ** 2
            if s.level == "sequence":
                # The square of the sum, shared out; its derivative by each x is twice the sum, and 0 beyond the bound.
                total = math.fsum(clip(x_of(u, stopped), -1024, 1024) for u in tokens)
                whole = clip(total, -1024, 1024)
                square = whole * (clip(sg_x, -1024, 1024) + (2 * (x - sg_x) if whole == total else 0))
            found[t] = -(a * new[t] - s.beta / 2 * square)
    return found


def is_masked(s, sequence, t, log_probs, x):
    """Whether DPPO masks a token of a log-ratio."""
    a, there = advantage(sequence, t), over_kept_set(sequence, s, t, log_probs)
    log_q, log_p = min(there, 0.0), min(there - x, 0.0)
    q, p = exp(log_q), exp(log_p)
    if s.divergence == "tv":
        moved = abs(q - p)
    else:
        u, v = max(1 - p, s.eps), max(1 - q, s.eps)
        # x is log q - log p, also where a log-prob above 0 saturates its probability.
        moved = u * math.log(u / v) - p * x
    return (a > 0 and q > p and moved > s.high) or (a < 0 and q < p and moved > s.low)


def kl_value(kind, term, k):
    if term.bound is not None:
        return clip(kl_value(kind, replace(term, bound=None), k), -term.bound, term.bound)
    k = clip(-k if term.swapped else k, -1024.0, 1024.0)
    if kind == "k1":
        return k
    if kind == "abs":
        return abs(k)
    if kind == "k2":
        return k * k / 2
    k = clip(k, -term.log_clamp, term.log_clamp)
    value = k3(-k)
    return value if term.value_clamp is None else smaller(value, term.value_clamp)


# --- surrogates that look at the batch or at a group of sequences -----------------------------------------------------

BITS = 2**64


@dataclass
class Token:
    """A token that trains: its sequence and index, its place among the valid ones, and its numbers."""

    s: int
    t: int
    place: int
    new: float
    x: float
    a: float


def tokens_of(surrogate, sequences: list[Sequence]) -> list[Token]:
    """All trained tokens."""
    found = []
    for s, q in enumerate(sequences):
        order = valid(q)
        for t in trained(q, surrogate):
            base = base_of(q, surrogate, t)
            x = 0.0 if base is None else q.new[t] - base
            found.append(Token(s, t, order.index(t) + 1, q.new[t], x, advantage(q, t)))
    return found


def look(s, sequences: list[Sequence]) -> list:
    """Per sequence what a surrogate that looks has seen: the places of the tokens that it chooses, or a contrast.

    A contrast is the sequence's number and the scores of its group; None where there is none.
    """
    if type(s).__name__ in ("ClipCov", "KLCov"):
        picked = chosen(s, sequences)
        return [{t for i, t in picked if i == place} for place in range(len(sequences))]
    found: list = [None for _ in sequences]
    if type(s).__name__ == "REAL":
        for both in contrasts(s, sequences).values():
            for i in (*both[0], *both[1]):
                found[i] = i, both
    return found


def splitmix(state: int) -> int:
    """The output of SplitMix64 in a state."""
    z = (state + 0x9E3779B97F4A7C15) % BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % BITS
    return z ^ (z >> 31)


def drawn(seed: int, number: int, place: int) -> float:
    """A random number of a token, in [0, 1)."""
    return (splitmix(splitmix(splitmix(seed) ^ (number % BITS)) ^ place) >> 11) / 2**53


def covariances(tokens: list[Token]) -> list[float]:
    middle, level = mean(q.a for q in tokens), mean(q.new for q in tokens)
    return [(q.a - middle) * (q.new - level) for q in tokens]


def clipped(s, q: Token) -> bool:
    r = exp(clip(q.x, -s.clamp, s.clamp))
    furthest = min(x for x in (s.dual, s.delta, math.inf) if x is not None)
    most = min(1.0 + s.high, math.inf if s.delta is None else s.delta)
    return (q.a > 0 and r > most) or (q.a < 0 and (r < 1.0 - s.low or r > furthest))


def eligible(s, tokens: list[Token]) -> list[int]:
    """The places in the list that ClipCov draws from."""
    values = covariances(tokens)
    return [i for i, q in enumerate(tokens) if s.lower < values[i] < s.upper and not clipped(s, q)]


def many(s, tokens: list[Token]) -> int:
    """How many tokens ClipCov or KLCov chooses."""
    return max(int(s.share * len(tokens)), 1)


def chosen(s, sequences: list[Sequence]) -> set[tuple[int, int]]:
    """The tokens that ClipCov or KLCov chooses, by sequence and index."""
    tokens = tokens_of(s, sequences)
    if not tokens:
        return set()
    if type(s).__name__ == "ClipCov":
        ids = [i if q.number is None else q.number for i, q in enumerate(sequences)]
        order = sorted(eligible(s, tokens), key=lambda i: drawn(s.seed, ids[tokens[i].s], tokens[i].place))
        places = order[: many(s, tokens)]
    else:
        values = covariances(tokens)
        last = sorted(values, reverse=True)[many(s, tokens) - 1]
        places = [i for i, value in enumerate(values) if value >= last]
    return {(tokens[i].s, tokens[i].t) for i in places}


Scores = dict[int, float]


def contrasts(s, sequences: list[Sequence]) -> dict[int, tuple[Scores, Scores]]:
    """The mean log-ratios of sequences by number, those with A <= 0 and the good ones, of each group that has both."""
    found: dict[int, tuple[Scores, Scores]] = {}
    for i, sequence in enumerate(sequences):
        tokens = [q for q in tokens_of(s, sequences) if q.s == i]
        if tokens:
            good = mean(q.a for q in tokens) > 0
            found.setdefault(sequence.group, ({}, {}))[good][i] = mean_log_ratio(q.x for q in tokens)
    return {group: both for group, both in found.items() if both[0] and both[1]}


def contrast(s, looked, all_x):
    """REAL's loss of each token of a sequence.

    Its slope is the derivative of the sum of the group's mean token losses, times the tokens of the sequence.
    """
    if looked is None:
        return 0.0
    own, (bad, good) = looked
    scores = bad | good | {own: mean_log_ratio(all_x)}
    powers = {i: clip(x, -s.clamp, s.clamp) / s.tau for i, x in scores.items()}
    found = log(1.0 + fsum(exp(powers[i]) for i in bad)) + log(1.0 + fsum(exp(-powers[i]) for i in good))
    return Moving(value_of(found), slope_of(found) * len(powers) * len(all_x))


def metrics_of_look(s, sequences: list[Sequence]) -> dict[str, float]:
    """What a surrogate reports of its look."""
    tokens, kind = tokens_of(s, sequences), type(s).__name__
    n = max(len(tokens), 1)
    if kind == "REAL":
        compared = [i for both in contrasts(s, sequences).values() for part in both for i in part]
        return {"sequence_group_contrast_fraction": len(compared) / max(len({q.s for q in tokens}), 1)}
    picked = chosen(s, sequences)
    some = [x for x, q in zip(covariances(tokens), tokens, strict=True) if (q.s, q.t) in picked]
    found = {"cov_chosen_fraction": len(picked) / n, "cov_chosen_mean": mean(some)}
    return found | ({"cov_eligible_fraction": len(eligible(s, tokens)) / n} if kind == "ClipCov" else {})


# --- the whole --------------------------------------------------------------------------------------------------------


def factor(s, weights, tokens, t):
    """What the weights multiply the loss of a token by."""
    kind = type(s).__name__
    if weights is None or kind == "VESPO":
        return 1.0
    return exp(mean(math.log(max(weights[u], 1e-10)) for u in tokens)) if kind == "GMPO" else weights[t]


def policy_losses(objective, sequence, new, stopped, looked):
    """Per trained token: the surrogate's loss times its weight."""
    s = objective.surrogate
    losses = surrogate_losses(s, sequence, new, stopped, objective.weights_are_the_ratio, looked)
    return {t: s.coef * factor(s, sequence.weights, losses, t) * loss for t, loss in losses.items()}


def token_totals(objective, sequence, new, stopped, looked):
    """Per token: policy, KL and regularizer together."""
    s = objective.surrogate
    weights = sequence.weights
    losses = policy_losses(objective, sequence, new, stopped, looked)
    totals = dict.fromkeys(range(len(sequence)), 0.0) | losses
    term = objective.kl
    if term is not None:
        for t in known(sequence, s) if term.scope == "all" else losses:
            here, at = new[t] - sequence.ref[t], stopped[t] - sequence.ref[t]
            value = kl_value(term.kind, term, here)
            if term.gradient is not None and term.gradient != term.kind:
                value = kl_value(term.kind, term, at)
                value += kl_value(term.gradient, term, here) - kl_value(term.gradient, term, at)
            if term.weight == "weights" and weights is not None:
                value *= weights[t]
            if term.weight == "ratio":
                base = base_of(sequence, s, t)
                value *= exp(clip(new[t] - (stopped[t] if base is None else base), -s.clamp, s.clamp))
            totals[t] += term.coef * value
    term = objective.regularizer
    if term is not None:
        for t in known(sequence, s) if term.scope == "all" else losses:
            base = base_of(sequence, s, t)
            x = new[t] - (stopped[t] if base is None else base)
            totals[t] += term.coef * clip(x, -1024.0, 1024.0) ** 2
    if sequence.scale is not None:
        totals = {t: sequence.scale[t] * x if x != 0.0 else 0.0 for t, x in totals.items()}
    return totals


def counts(objective, sequences):
    """Per sequence: how many tokens its mean counts."""
    if objective.mean.over == "kept":
        return [len(trained(q, objective.surrogate)) for q in sequences]
    return [len(valid(q)) for q in sequences]


def sequence_terms(objective, sequence, n, new, stopped, looked):
    """What each token adds to the sum over sequences."""
    totals = token_totals(objective, sequence, new, stopped, looked).values()
    # Where nothing trains, a term with scope="all" is a plain sum.
    each = max(n, 1) if objective.mean.of == "sequence" else 1
    return [total / each for total in totals]


def divisor(objective, sequences, given):
    n = counts(objective, sequences)
    if objective.mean.of == "sum":
        return 1.0
    found = sum(n) if objective.mean.of == "token" else sum(c > 0 for c in n)
    found = (found if given is None else given) or 1
    return found * (objective.mean.length or 1)


def apart(objective, sequences):
    """A loss without its KL, and the KL under its own mean, added to GPG of advantages 0; the rows that divide it."""
    kl, s = objective.kl, objective.surrogate
    rest = replace(objective, kl=None)
    by_rows = kl.mean.over == "rows"
    mean = replace(kl.mean, over="original") if by_rows else kl.mean
    nothing = GPG(of=s.of, clamp=s.clamp)
    term = replace(objective, surrogate=nothing, kl=replace(kl, mean=None), mean=mean, regularizer=None)
    zero = [
        replace(q, advantages=[a * 0 for a in q.advantages] if isinstance(q.advantages, list) else q.advantages * 0)
        for q in sequences
    ]
    return rest, term, zero, (len(sequences) if by_rows else None)


def value(objective, sequences, given=None):
    """The loss. `given` is a total that the caller has."""
    if objective.kl is not None and objective.kl.mean is not None:
        rest, term, zero, rows = apart(objective, sequences)
        return value(rest, sequences, given) + value(term, zero, rows)
    return math.fsum(terms_of(objective, sequences)) / divisor(objective, sequences, given)


def terms_of(objective, sequences):
    """What each token adds to the loss, before the divisor."""
    looked = look(objective.surrogate, sequences)
    parts = zip(sequences, counts(objective, sequences), looked, strict=True)
    return [x for q, n, seen in parts for x in sequence_terms(objective, q, n, q.new, q.new, seen)]


def largest_term(objective, sequences, given=None):
    """The largest magnitude that a token adds to the loss: a sum has its rounding."""
    if objective.kl is not None and objective.kl.mean is not None:
        rest, term, zero, rows = apart(objective, sequences)
        return max(largest_term(rest, sequences, given), largest_term(term, zero, rows))
    return max(map(abs, terms_of(objective, sequences)), default=0.0) / divisor(objective, sequences, given)


def largest_policy_loss(objective, sequences):
    """The largest magnitude that a token adds to the mean of the surrogate's losses."""
    looked = look(objective.surrogate, sequences)
    rows = [policy_losses(objective, q, q.new, q.new, seen) for q, seen in zip(sequences, looked, strict=True)]
    return max((abs(x) for row in rows for x in row.values()), default=0.0) / max(sum(map(len, rows)), 1)


def gradient(objective, sequences, given=None):
    """Its derivative at every token; NaN where rounding decides on which side of a bound it lies."""
    if objective.kl is not None and objective.kl.mean is not None:
        rest, term, zero, rows = apart(objective, sequences)
        parts = gradient(rest, sequences, given), gradient(term, zero, rows)
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*parts, strict=True)]
    by = divisor(objective, sequences, given)
    found, looked = [], look(objective.surrogate, sequences)
    for q, n, seen in zip(sequences, counts(objective, sequences), looked, strict=True):
        row = []
        for t in range(len(q)):
            if not math.isfinite(q.new[t]) or q.mask[t] == 0:
                row.append(0.0)
                continue
            moved = [Moving(x, 1.0) if u == t else x for u, x in enumerate(q.new)]
            row.append(slope_of(fsum(sequence_terms(objective, q, n, moved, q.new, seen))) / by)
        found.append(row)
    return found


def bonus(term, objective, sequences, given=None):
    """The entropy bonus of a loss, and its slope at each token's entropy."""
    by, slopes = divisor(objective, sequences, given), []
    for q, n in zip(sequences, counts(objective, sequences), strict=True):
        among = valid(q) if term.scope == "all" else trained(q, objective.surrogate)
        each = max(n, 1) if objective.mean.of == "sequence" else 1
        slopes.append([0.0] * len(q))
        for t in among:
            scale = 1.0 if q.scale is None else q.scale[t]
            if math.isfinite(q.entropy[t]) and math.isfinite(scale):
                slopes[-1][t] = -term.coef * scale / each / by
    parts = zip(sequences, slopes, strict=True)
    return math.fsum(x * h for q, row in parts for h, x in zip(q.entropy, row, strict=True) if x), slopes


def metrics(objective, sequences):
    """The metrics of the loss, each straight from its formula."""
    s = objective.surrogate
    kind = type(s).__name__
    xs, used, policies, clips, kls, squares = [], [], [], {"low": 0, "high": 0, "dual": 0}, [], []
    n = broken = some = 0
    looked = look(s, sequences)
    for q, seen in zip(sequences, looked, strict=True):
        tokens = trained(q, s)
        n, some, broken = n + len(tokens), some + bool(tokens), broken + len(valid(q)) - len(known(q, s))
        own = {t: q.new[t] - (q.new[t] if base_of(q, s, t) is None else base_of(q, s, t)) for t in known(q, s)}
        policies += policy_losses(objective, q, q.new, q.new, seen).values()
        for t in tokens:
            a, x = advantage(q, t), own[t]
            xs.append(clip(x, -1024.0, 1024.0))
            x = level_of(s, x, [own[u] for u in tokens], None if q.weights is None else [q.weights[u] for u in tokens])
            used.append(clip(x, -s.clamp, s.clamp))
            r = exp(used[-1])
            if kind in ("PPO", "GSPO", "AveragePPO"):
                least = min(x for x in (s.dual, s.delta, math.inf) if x is not None)
                clips["low"] += a < 0 and r < 1 - s.low
                clips["high"] += a > 0 and r > min(1 + s.high, math.inf if s.delta is None else s.delta)
                clips["dual"] += a < 0 and r > least
            elif kind == "GMPO":
                clips["low"] += a < 0 and used[-1] < -s.low
                clips["high"] += a > 0 and used[-1] > s.high
            elif kind == "Score" and not objective.weights_are_the_ratio:
                clips["low"] += s.lower is not None and r < s.lower
                clips["high"] += s.upper is not None and r > s.upper
            elif kind == "TOPR":
                clips["high"] += a <= s.threshold and r > s.upper
            elif kind == "REC":
                clips["low"] += r < 1 - s.low and not rec_keeps(s, r, a)
                clips["high"] += r > 1 + s.high and not rec_keeps(s, r, a)
            elif kind == "DPPO":
                masked = is_masked(s, q, t, q.new, own[t])
                clips["high"] += masked and a > 0
                clips["low"] += masked and a < 0
                clips["dual"] += s.upper is not None and not objective.weights_are_the_ratio and r > s.upper
        if objective.kl is not None:
            among = known(q, s) if objective.kl.scope == "all" else tokens
            kls += [kl_value(objective.kl.kind, objective.kl, q.new[t] - q.ref[t]) for t in among]
        if objective.regularizer is not None:
            among = known(q, s) if objective.regularizer.scope == "all" else tokens
            squares += [clip(own[t], -1024.0, 1024.0) ** 2 for t in among]
    ratios = [exp(x) for x in used]
    center = mean(ratios)
    found = {
        "tokens_trained": n,
        "sequences_trained": some,
        "tokens_loss_nonfinite": broken,
        "surrogate_loss_mean": mean(policies),
        "kl_old_new_k1": -mean(xs),
        "kl_old_new_k3": mean(r - 1 - x for r, x in zip(ratios, used, strict=True)),
        "surrogate_ratio_mean": center,
        "surrogate_ratio_std": math.sqrt(mean((r - center) ** 2 for r in ratios)),
        "surrogate_ratio_min": min(ratios, default=0.0),
        "surrogate_ratio_max": max(ratios, default=0.0),
    }
    if kind in ("ClipCov", "KLCov", "REAL"):
        found |= metrics_of_look(s, sequences)
    else:
        found |= {f"clip_{side}_fraction": count / n if n else 0.0 for side, count in clips.items()}
    if objective.kl is not None:
        found[f"kl_{'ref_new' if objective.kl.swapped else 'new_ref'}_{objective.kl.kind}"] = mean(kls)
    if objective.regularizer is not None:
        found["logratio_new_old_squared_mean"] = mean(squares)
    return found
