"""The oracle of the policy loss: its formulas as loops over Python floats, whose slopes follow from `numbers.Moving`.

`sg` in a formula means: computed from the log-probs as they are, and not from the ones in which one moves. It shares no
code with the package beyond the frozen types that it is given.
"""

from __future__ import annotations

import math
from dataclasses import replace

from oracles import batch_losses
from oracles.loss_terms import Sequence as Sequence
from oracles.loss_terms import (
    advantage,
    at_level,
    base_of,
    clip,
    known,
    level_of,
    mean,
    mean_log_ratio,
    over_kept_set,
    ppo,
    rec_keeps,
    trained,
    valid,
    vespo_log_ratio,
)
from oracles.numbers import Moving, exp, fsum, k3, larger, slope_of, smaller
from rollout_corr import GPG

# --- surrogates -------------------------------------------------------------------------------------------------------


def surrogate_losses(s, sequence, new, stopped, weights_are_ratio, looked=None):
    """Per trained token: the surrogate's loss before weights.

    `looked` has the loss and its slope by place, of a surrogate that looks at the batch.
    """
    tokens = trained(sequence, s)
    kind = type(s).__name__
    if looked is not None:
        return {
            t: Moving(looked[t][0], looked[t][1] * slope_of(new[t])) if slope_of(new[t]) else looked[t][0]
            for t in tokens
        }

    def x_of(t, log_probs):
        base = base_of(sequence, s, t)
        return log_probs[t] - (stopped[t] if base is None else base)

    def ratio(x):
        return exp(clip(x, -s.clamp, s.clamp))

    found = {}
    for t in tokens:
        a, x, sg_x = advantage(sequence, t), x_of(t, new), x_of(t, stopped)
        if kind == "PPO":
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


# --- the whole --------------------------------------------------------------------------------------------------------


def factor(s, weights, tokens, t):
    """What the weights multiply the loss of a token by."""
    kind = type(s).__name__
    if weights is None or kind == "VESPO":
        return 1.0
    return exp(mean(math.log(max(weights[u], 1e-10)) for u in tokens)) if kind == "GMPO" else weights[t]


def token_totals(objective, sequence, new, stopped, looked):
    """Per token: policy, KL and regularizer together."""
    s = objective.surrogate
    weights = sequence.weights
    losses = surrogate_losses(s, sequence, new, stopped, objective.weights_are_the_ratio, looked)
    totals = dict.fromkeys(range(len(sequence)), 0.0)
    for t, loss in losses.items():
        totals[t] += s.coef * factor(s, weights, losses, t) * loss
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
    looked = batch_losses.look(objective.surrogate, sequences)
    parts = zip(sequences, counts(objective, sequences), looked, strict=True)
    return [x for q, n, seen in parts for x in sequence_terms(objective, q, n, q.new, q.new, seen)]


def largest_term(objective, sequences, given=None):
    """The largest magnitude that a token adds to the loss: a sum has its rounding."""
    if objective.kl is not None and objective.kl.mean is not None:
        rest, term, zero, rows = apart(objective, sequences)
        return max(largest_term(rest, sequences, given), largest_term(term, zero, rows))
    return max(map(abs, terms_of(objective, sequences)), default=0.0) / divisor(objective, sequences, given)


def gradient(objective, sequences, given=None):
    """Its derivative at every token; NaN where rounding decides on which side of a bound it lies."""
    if objective.kl is not None and objective.kl.mean is not None:
        rest, term, zero, rows = apart(objective, sequences)
        parts = gradient(rest, sequences, given), gradient(term, zero, rows)
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*parts, strict=True)]
    by = divisor(objective, sequences, given)
    found, looked = [], batch_losses.look(objective.surrogate, sequences)
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


def metrics(objective, sequences):
    """The metrics of the loss, each straight from its formula."""
    s = objective.surrogate
    kind = type(s).__name__
    xs, used, policies, clips, kls, squares = [], [], [], {"low": 0, "high": 0, "dual": 0}, [], []
    n = broken = some = 0
    looked = batch_losses.look(s, sequences)
    for q, seen in zip(sequences, looked, strict=True):
        tokens = trained(q, s)
        n, some, broken = n + len(tokens), some + bool(tokens), broken + len(valid(q)) - len(known(q, s))
        own = {t: q.new[t] - (q.new[t] if base_of(q, s, t) is None else base_of(q, s, t)) for t in known(q, s)}
        losses = surrogate_losses(s, q, q.new, q.new, objective.weights_are_the_ratio, seen)
        for t in tokens:
            a, x = advantage(q, t), own[t]
            xs.append(clip(x, -1024.0, 1024.0))
            x = level_of(s, x, [own[u] for u in tokens], None if q.weights is None else [q.weights[u] for u in tokens])
            used.append(clip(x, -s.clamp, s.clamp))
            r = exp(used[-1])
            policies.append(s.coef * factor(s, q.weights, tokens, t) * losses[t])
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
    if kind in batch_losses.LOOK:
        found |= batch_losses.metrics(s, sequences)
    else:
        found |= {f"clip_{side}_fraction": count / n if n else 0.0 for side, count in clips.items()}
    if objective.kl is not None:
        found[f"kl_{'ref_new' if objective.kl.swapped else 'new_ref'}_{objective.kl.kind}"] = mean(kls)
    if objective.regularizer is not None:
        found["logratio_new_old_squared_mean"] = mean(squares)
    return found
