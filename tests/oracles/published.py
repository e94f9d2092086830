"""The losses that frameworks publish, in plain Python: their token losses, weights, masks and aggregations.

`sg` in a name says that the value is a constant of the gradient.
"""

from __future__ import annotations

import math

from oracles.published_rows import clip, mean

# --- token losses, as the frameworks write them ---


def ppo(row, t, low=0.2, high=0.2, c=None, base=None, delta=None):
    r = math.exp(row.new[t] - (base or row.old)[t])
    a = row.adv[t]
    one = -a * (r if delta is None else min(r, delta))
    loss = max(one, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * c) if c is not None and a < 0 else loss


def cispo(row, t, low, high, base=None):
    r = clip(math.exp(row.sg[t] - (base or row.old)[t]), low, high)
    return -r * row.adv[t] * row.new[t]


def gspo_token(row, t, low=0.2, high=0.2, base=None):
    s = math.exp(row.new[t] - row.sg[t] + mean(n - o for n, o in zip(row.sg, base or row.old, strict=True)))
    return max(-row.adv[t] * s, -row.adv[t] * clip(s, 1 - low, 1 + high))


def gspo(row, t, low=0.2, high=0.2, base=None):
    s = math.exp(mean(n - o for n, o in zip(row.new, base or row.old, strict=True)))
    return max(-row.adv[t] * s, -row.adv[t] * clip(s, 1 - low, 1 + high))


def sapo(row, t):
    r, a = math.exp(row.new[t] - row.old[t]), row.adv[t]
    tau = 1.0 if a > 0 else 1.05
    return -a * (4 / tau) / (1 + math.exp(-tau * (r - 1)))


def geo_mean(row, t):
    g = 1 if row.adv[0] > 0 else -1
    deltas = [n - o for n, o in zip(row.new, row.old, strict=True)]
    return -mean(row.adv) * math.exp(mean(g * min(g * d, g * clip(d, -0.2, 0.2)) for d in deltas))


def dppo_verl(row, t, kind, c=3.0):
    p, q, a = math.exp(row.old[t]), math.exp(row.sg[t]), row.adv[t]
    if kind == "tv":
        valid = q - p <= 0.2 if a > 0 else q - p >= -0.2
    else:
        kl = p * (row.old[t] - row.sg[t]) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
        valid = kl <= 0.2 or (q <= p if a > 0 else q >= p)
    return -a * min(math.exp(row.sg[t] - row.old[t]), c) * row.new[t] * valid


def dro(row, t, beta=0.1):
    return -(row.new[t] * row.adv[t] - beta / 2 * (row.new[t] - row.old[t]) ** 2)


def reinforce(row, t, base):
    return -math.exp(row.new[t] - base[t]) * row.adv[t]


def score(row, t):
    return -row.adv[t] * row.new[t]


def k1(row, t):
    return row.new[t] - row.ref[t]


def k2(row, t):
    return (row.new[t] - row.ref[t]) ** 2 / 2


def k3(row, t, limit=None):
    d = row.ref[t] - row.new[t]
    return clip(math.exp(d) - d - 1, -(limit or math.inf), limit or math.inf)


# --- weights and masks ---


def ratio(row, t, train):
    return math.exp(train[t] - row.mu[t])


def seq(row, train, reduce):
    return math.exp(reduce(a - b for a, b in zip(train, row.mu, strict=True)))


def opsm(row, other, delta):
    return row.adv[0] < 0 and mean(a - b for a, b in zip(other, row.sg, strict=True)) > delta


def binary_kl(p, q, eps):
    p, q = min(max(p, eps), 1 - eps), min(max(q, eps), 1 - eps)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def bkl(row, t, train, eps=1e-12):
    return binary_kl(math.exp(row.mu[t]), math.exp(train[t]), eps)


def both_ways(row, t, train):
    p, q = math.exp(row.mu[t]), math.exp(train[t])
    return max(binary_kl(p, q, 1e-12), binary_kl(q, p, 1e-12))


def prob_diff(row, t):
    return math.exp(row.sg[t]) - math.exp(row.mu[t])


# --- aggregation ---


def token_mean(rows, loss):
    return math.fsum(loss(r, t) for r in rows for t in range(r.n)) / sum(r.n for r in rows)


def kept_mean(rows, loss):
    """The loss is None where a token has left the mask."""
    found = [x for r in rows for t in range(r.n) if (x := loss(r, t)) is not None]
    return math.fsum(found) / max(len(found), 1)


def kept_rows_mean(rows, loss):
    """The mean over rows of the means over their kept tokens, of rows that have one."""
    found = [[x for t in range(r.n) if (x := loss(r, t)) is not None] for r in rows]
    return mean([mean(row) for row in found if row] or [0.0])


def original_mean(rows, loss):
    found = [x for r in rows for t in range(r.n) if (x := loss(r, t)) is not None]
    return math.fsum(found) / sum(r.n for r in rows)


def rows_mean(rows, loss):
    return mean(mean(loss(r, t) for t in range(r.n)) for r in rows)


def rows_sum(rows, loss):
    return mean(math.fsum(loss(r, t) for t in range(r.n)) for r in rows)


def total(rows, loss):
    return math.fsum(loss(r, t) for r in rows for t in range(r.n))


def verl(row, t):
    return ppo(row, t, c=3.0)


def verl_bypass(row, t):
    return ppo(row, t, c=3.0, base=row.mu)


def within(x, low, high):
    return low <= x <= high


def k1_mean(row, train):
    return mean(b - a for a, b in zip(train, row.mu, strict=True))


def k3_mean(row, train):
    return mean(math.exp(a - b) - 1 - (a - b) for a, b in zip(train, row.mu, strict=True))


def verl_rs(option, train, low=None, high=None):
    """Make the test of whether verl's rejection keeps a row; k1 thresholds in ratio space, tested on -D."""
    if option == "geo":
        return lambda r: math.log(low) <= k1_mean(r, train(r)) <= math.log(high)
    if option == "sum":
        return lambda r: math.log(low) <= r.n * k1_mean(r, train(r)) <= math.log(high)
    return lambda r: k3_mean(r, train(r)) <= high


def old(r):
    return r.old


def new(r):
    return r.sg


def always(r):
    return True


def decoupled(weight=lambda r, t: 1.0, keep=always):
    return lambda rows: original_mean(rows, lambda r, t: weight(r, t) * verl(r, t) if keep(r) else None)


def bypass(keep=always):
    return lambda rows: original_mean(rows, lambda r, t: verl_bypass(r, t) if keep(r) else None)


def bypass_pg(weight=lambda r, t: 1.0, keep=always):
    def loss(r, t):
        return -r.adv[t] * r.new[t] * weight(r, t) if keep(r) else None

    return lambda rows: original_mean(rows, loss)


def token_tis(train, cap=2.0):
    return lambda r, t: min(ratio(r, t, train(r)), cap)


def seq_tis(train, cap=2.0):
    return lambda r, t: min(seq(r, train(r), math.fsum), cap)


def icepop(train, low, high):
    return lambda r, t: ratio(r, t, train(r)) * within(ratio(r, t, train(r)), low, high)


def geo_gate(train, low, high):
    return lambda r, t: ratio(r, t, train(r)) * within(seq(r, train(r), mean), low, high)


def plain(weight, loss=ppo, agg=token_mean):
    """PPO's clip times a weight that is 0 where something was rejected."""
    return lambda rows: agg(rows, lambda r, t: weight(r, t) * loss(r, t))


def trl_weight(r, t):
    w = seq(r, r.old, math.fsum)
    return w if w <= 3.0 else 0.0


def prime_rl(keep):
    def loss(r, t):
        d = r.new[t] - r.mu[t]
        return 1e-3 * d * d - (r.adv[t] * math.exp(d) if keep(r, t) else 0.0)

    return lambda rows: token_mean(rows, loss)


def dppo_keep(r, t):
    diff = prob_diff(r, t)
    return not (r.adv[t] > 0 and diff > 0.2) and not (r.adv[t] <= 0 and diff < -0.2)


def stable_rl(r, t, kind, delta):
    a, diff = r.adv[t], prob_diff(r, t)
    moved = abs(diff) if kind == "tv" else bkl(r, t, r.sg)
    dropped = moved > delta and (diff > 0 if a > 0 else diff < 0)
    return 0.0 if dropped else -min(ratio(r, t, r.sg), 20.0) * a * r.new[t]


def minirl(r, t):
    a, moved = r.adv[t], math.exp(r.sg[t] - r.old[t])
    dropped = (a > 0 and moved > 1.2) or (a < 0 and moved < 0.8)
    return 0.0 if dropped else -min(ratio(r, t, r.sg), 20.0) * a * r.new[t]


def skyrl_parts(r, outlier=False, token=False, sequence=None, low=0.0, high=math.inf):
    """SkyRL's mask: outliers, then tokens, then the sequence over what is left."""
    rho = [ratio(r, t, r.old) for t in range(r.n)]
    kept = [True] * r.n
    if outlier and not all(within(x, 1e-4, 100) for x in rho):
        kept = [False] * r.n
    if token:
        kept = [k and within(x, 0.5, 2.0) for k, x in zip(kept, rho, strict=True)]
    ds = [math.log(x) for x, k in zip(rho, kept, strict=True) if k]
    level = {"geo": math.fsum(ds) / max(len(ds), 1), "product": math.fsum(ds)}.get(sequence, 0.0)
    if sequence and not within(math.exp(level), low, high):
        kept = [False] * r.n
    return rho, kept


def skyrl(weight=None, **masks):
    def loss(r, t):
        rho, kept = skyrl_parts(r, **masks)
        w = {None: 1.0, "token": min(rho[t], 2.0), "sequence": min(seq(r, r.old, math.fsum), 5.0)}[weight]
        return w * ppo(r, t) * kept[t]

    return lambda rows: token_mean(rows, loss)


def xtuner(lower):
    def loss(r, t):
        rho = [ratio(r, u, r.old) for u in range(r.n)]
        if not within(rho[t], 0.5, 5.0) or max(rho) > 20:
            return None
        return clip(rho[t], lower, 5.0) * ppo(r, t, c=3.0)

    return lambda rows: kept_mean(rows, loss)


def areal_stat(r, t):
    d = r.old[t] - r.mu[t]
    return math.exp(-d) - 1 + d


def slime_mis(rows):
    weight = {(i, t): min(ratio(r, t, r.old), 2.0) for i, r in enumerate(rows) for t in range(r.n)}
    center = mean(weight.values())
    losses = []
    for i, r in enumerate(rows):
        rho = [ratio(r, t, r.old) for t in range(r.n)]
        vetoed = min(rho) < 1e-4
        kept = [w if within(x, 0.5, 2.0) and not vetoed else 0.0 for x, w in zip(rho, [1.0] * r.n, strict=True)]
        losses.append(mean(kept[t] * weight[i, t] / center * ppo(r, t) for t in range(r.n)))
    return mean(losses)


def open_instruct(r, t, gate):
    return min(ratio(r, t, r.old), 2.0) * gate(r, t)


def open_instruct_ppo(r, t):
    return ppo(r, t, 0.2, 0.272)


def vaco(r, t):
    moved = mean(abs(ratio(r, u, r.old) - 1) for u in range(r.n))
    return not (moved > 2.0 and (ratio(r, t, r.old) - 1) * r.adv[t] > 0)


def with_kl(loss, kl, coef):
    return lambda r, t: loss(r, t) + coef * kl(r, t)


def nemo_kl(r, t):
    """Its value is k3, and the factor that is 1 gives it the gradient of the score function beside its own."""
    return math.exp(r.new[t] - r.sg[t]) * k3(r, t, 10.0)


def megatron(weight):
    return plain(
        weight, lambda r, t: ppo(r, t, 0.01, 0.01), lambda rows, loss: token_mean(rows, with_kl(loss, k3, 0.001))
    )


def tunix(loss, agg=rows_mean):
    return lambda rows: agg(rows, with_kl(loss, k1, 0.04))


def unsloth(loss, agg=token_mean):
    def unbiased(r, t):
        return k3(r, t, 10.0) * math.exp(r.new[t] - r.old[t])

    return lambda rows: agg(rows, with_kl(loss, unbiased, 0.001))


def trinity(loss):
    return lambda rows: token_mean(rows, with_kl(loss, k2, 0.001))


def rllm_dppo(r, t, dropped):
    return 0.0 if dropped else -math.exp(r.sg[t] - r.old[t]) * r.adv[t] * r.new[t]


def rllm_tv(r, t):
    moved = math.exp(r.sg[t]) - math.exp(r.old[t])
    return rllm_dppo(r, t, moved > 0.2 if r.adv[t] > 0 else moved < -0.2)


def rllm_kl(r, t):
    away = r.sg[t] > r.old[t] if r.adv[t] > 0 else r.sg[t] < r.old[t]
    return rllm_dppo(r, t, away and binary_kl(math.exp(r.old[t]), math.exp(r.sg[t]), 1e-6) > 0.2)


def kimi(r, t):
    """The report's equation 1: a gradient mask beside the squared log-ratio of every token."""
    d = r.new[t] - r.mu[t]
    return 1e-3 * d * d - r.adv[t] * math.exp(d) * within(ratio(r, t, r.sg), 0.5, 2.0)


def one(r, t):
    return 1.0
