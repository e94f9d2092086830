"""The oracle of turns: loops over the turns of each sequence, from the numbers and tokens of correction.py.

A turn is a list of places in its sequence. Weights and criteria that are not over turns are those of correction.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oracles import correction as oracle
from oracles.ages import beside
from oracles.correction import bound
from oracles.numbers import D_RANGE, STAT_RANGE, add, clamp, exp, k3, reduced, saturate


@dataclass
class Answer:
    weights: list | None
    mask: list
    keep: list
    keep_turns: list  # per sequence, a bool per turn
    values: dict  # by label of a criterion over turns, the values of all turns that have one
    raw: list  # the weight of each turn that has a measured token, before the bounds


def places_of(lengths):
    """The places of each turn, from their lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(start, start + n)) for start, n in zip(starts, lengths, strict=True)]


def verdict(criterion, spec, sequence, row, places, alive):
    """The value of one turn (None without a token to sum over), and whether it failed."""

    def value_at(t):
        given = beside(criterion, sequence, t)
        return oracle.statistic(criterion.stat, row[t], spec.clamp, criterion.token_clamp, criterion.eps, given)

    values = [value_at(t) for t in places if row[t] is not None and row[t].measured and alive[t]]
    if not values:
        return None, False
    limit = D_RANGE if criterion.stat in ("ratio", "k1", "abs") else STAT_RANGE
    value = reduced(criterion.reduce, values, limit)
    part = oracle.Sequence(*([x[t] for t in places] for x in (sequence.train, sequence.rollout, sequence.mask)))
    part.advantages = sequence.advantages
    if isinstance(sequence.advantages, list):
        part.advantages = [sequence.advantages[t] for t in places]
    tested = oracle.selects_sequence(criterion, part, [row[t] for t in places])
    return value, tested and not oracle.passes(criterion, value)


def correct(sequences, turns, spec):
    """Everything that `rollout_corr.correct` gives with turns; `turns` are lengths, a list for each sequence."""
    tokens = [oracle.read_tokens(sequence, spec) for sequence in sequences]
    split = [places_of(lengths) for lengths in turns]
    everything = [[True] * len(row) for row in tokens]
    plain = {c.label: oracle.decide(c, spec, sequences, tokens, everything) for c in spec.criteria if c.over == "token"}
    alive = everything
    if spec.sums_over == "kept":
        alive = [
            [not any(found.dropped[s][t] for found in plain.values()) for t in range(len(row))]
            for s, row in enumerate(tokens)
        ]
    for c in spec.criteria:
        if c.over == "sequence":
            plain[c.label] = oracle.decide(c, spec, sequences, tokens, alive)

    acts = spec.weight is not None or len(spec.criteria) > 0
    broken = [acts and spec.nonfinite == "reject" and any(t is not None and not t.finite for t in r) for r in tokens]
    fails, lost, gone, values = list(broken), [], [], {c.label: [] for c in spec.criteria if c.over == "turn"}
    for s, (sequence, row) in enumerate(zip(sequences, tokens, strict=True)):
        lost.append([any(found.dropped[s][t] for found in plain.values()) for t in range(len(row))])
        gone.append([False] * len(split[s]))
        for c in spec.criteria:
            if c.over != "turn":
                failed = plain[c.label].failed[s]
                some = any(failed) if isinstance(failed, list) else failed
                fails[s] = fails[s] or (c.drops_sequences and some)
                continue
            for u, places in enumerate(split[s]):
                value, failed = verdict(c, spec, sequence, row, places, alive[s])
                values[c.label] += [] if value is None else [value]
                if failed and c.drop == "sequence":
                    fails[s] = True
                elif failed and c.drop == "unit":
                    gone[s][u] = True
                elif failed:
                    for t in places:
                        token = row[t]
                        if token is not None and token.measured and oracle.selects(c, sequence, token, t):
                            lost[s][t] = True
    rejected, keep_turns = [], []
    for s, row in enumerate(tokens):
        dead = {t for u, places in enumerate(split[s]) if gone[s][u] for t in places}
        rejected.append([t is not None and (fails[s] or i in dead or lost[s][i]) for i, t in enumerate(row)])
        valid = [any(row[t] is not None for t in places) for places in split[s]]
        keep_turns.append([not (out or (fails[s] and some)) for out, some in zip(gone[s], valid, strict=True)])

    at, raws, divisor = weigh(spec, tokens, split, alive)
    weights = None
    if spec.apply and (spec.weight is not None or spec.rejected != "mask"):
        weights = []
        for s, row in enumerate(tokens):
            weights.append([])
            for t, token in enumerate(row):
                zeroed = broken[s] or (rejected[s][t] and spec.rejected in ("zero", "both"))
                counts = token is not None and token.measured and not zeroed
                weights[s].append(at[s][t] / divisor if counts and at[s][t] else 0.0)
    edits = spec.apply and spec.rejected in ("mask", "both")
    mask = [[0 if edits and rejected[s][t] else m for t, m in enumerate(q.mask)] for s, q in enumerate(sequences)]
    return Answer(weights, mask, [not fail for fail in fails], keep_turns, values, raws)


def weigh(spec, tokens, split, alive):
    """The weight after the bounds at each token, that of each turn before them, and the divisor of `normalize`."""
    weight = spec.weight
    if weight is None:
        return [[1.0] * len(row) for row in tokens], [], 1.0
    if weight.over != "turn":
        _, bounded, _, divisor = oracle.weigh(spec, tokens, alive)
        return bounded, [], divisor
    at, raws = [], []
    for s, row in enumerate(tokens):
        at.append([0.0] * len(row))
        for places in split[s]:
            measured = [t for t in places if row[t] is not None and row[t].measured]
            if not measured:
                continue
            raw = exp(clamp(oracle.log_weight(weight, [row[t].d for t in measured if alive[s][t]]), spec.clamp))
            raws.append(raw)
            for t in measured:
                at[s][t] = bound(weight, raw)
    mean = add(bound(weight, raw) for raw in raws) / len(raws) if raws else 1.0
    divide = weight.normalize == "batch" and raws and not mean <= 1e-8
    return at, raws, mean if divide else 1.0


def metrics(sequences, turns, answer, spec):
    """The metrics of turns, each from its formula."""
    tokens = [oracle.read_tokens(sequence, spec) for sequence in sequences]
    found = {"turns": 0, "turns_kept": 0}
    sums, places = [], {"first": [], "middle": [], "last": []}
    for row, lengths, keep in zip(tokens, turns, answer.keep_turns, strict=True):
        measured = []
        for turn, kept in zip(places_of(lengths), keep, strict=True):
            valid = [row[t] for t in turn if row[t] is not None]
            found["turns"] += bool(valid)
            found["turns_kept"] += bool(valid) and kept
            measured.append([t.d for t in valid if t.measured])
        measured = [ds for ds in measured if ds]
        for i, ds in enumerate(measured):
            place = "first" if i == 0 else "last" if i == len(measured) - 1 else "middle"
            places[place] += ds
            sums.append(add(saturate(d, D_RANGE) for d in ds))

    def mean(values):
        return add(values) / len(values) if values else 0.0

    found["turns_kept_fraction"] = found["turns_kept"] / found["turns"] if found["turns"] else 0.0
    found["turn_chi2_train_rollout"] = mean([math.expm1(2.0 * clamp(x, spec.clamp)) for x in sums])
    found["turn_logratio_abs_mean"] = mean([abs(x) for x in sums])
    found["turn_logratio_abs_max"] = max(map(abs, sums), default=0.0)
    for name, ds in places.items():
        found[f"{name}_turn_token_kl_rollout_train_k1"] = 0.0 - mean([saturate(d, D_RANGE) for d in ds])
        found[f"{name}_turn_token_logratio_abs_mean"] = mean([abs(saturate(d, D_RANGE)) for d in ds])
        found[f"{name}_turn_token_kl_rollout_train_k3"] = mean([k3(clamp(d, spec.clamp)) for d in ds])
    if spec.weight is not None and spec.weight.over == "turn":
        bounded = [bound(spec.weight, raw) for raw in answer.raw]
        for key, ws in (("turn_weight", bounded), ("turn_weight_before_bounds", answer.raw)):
            found[f"{key}_mean"] = mean(ws)
            found[f"{key}_ess"] = add(ws) ** 2 / (len(ws) * add(w * w for w in ws)) if any(ws) else 0.0
            found[f"{key}_max"] = max(ws, default=0.0)
    return found
