"""Each recipe against its framework's published formula, restated here in plain Python: one function a framework.

Numbers are those of the frameworks' own defaults. `sg` in a name says that the value is a constant of the gradient.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

import rollout_corr as rc
from batches import error, one_thread
from rollout_corr import recipes

STEP = 1e-6


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


class Row:
    """One padded row as a framework sees it: valid tokens only."""

    def __init__(self, rng, length, advantage):
        self.new = [-rng.expovariate(1.0) - 0.05 for _ in range(length)]
        # Some rows pass even a geometric mask of 1e-4.
        scale = rng.choice((1.0, 1.0, 0.1, 1e-4, 6.0))
        self.old = [x + rng.gauss(0, 0.3 * scale) for x in self.new]
        self.mu = [x + rng.gauss(0, 0.1 * scale) for x in self.old]
        self.ref = [x + rng.gauss(0, 0.5) for x in self.new]
        self.old, self.mu, self.ref = ([min(x, -0.01) for x in xs] for xs in (self.old, self.mu, self.ref))
        self.adv = [advantage] * length
        self.sg = list(self.new)
        self.n = length


def batch(seed):
    rng = random.Random(seed)
    return [Row(rng, n, rng.choice((-1, 1)) * rng.uniform(0.3, 1.5)) for n in (6, 1, 9, 4, 12)]


def clip(x, low, high):
    return max(low, min(high, x))


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


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


def gspo_token(row, t, low=0.2, high=0.2):
    s = math.exp(row.new[t] - row.sg[t] + mean(n - o for n, o in zip(row.sg, row.old, strict=True)))
    return max(-row.adv[t] * s, -row.adv[t] * clip(s, 1 - low, 1 + high))


def gspo(row, t, low=0.2, high=0.2):
    s = math.exp(mean(n - o for n, o in zip(row.new, row.old, strict=True)))
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
    """Whether verl's rejection keeps a row; k1 thresholds in ratio space, tested on -D."""
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
    centre = mean(weight.values())
    losses = []
    for i, r in enumerate(rows):
        rho = [ratio(r, t, r.old) for t in range(r.n)]
        vetoed = min(rho) < 1e-4
        kept = [w if within(x, 0.5, 2.0) and not vetoed else 0.0 for x, w in zip(rho, [1.0] * r.n, strict=True)]
        losses.append(mean(kept[t] * weight[i, t] / centre * ppo(r, t) for t in range(r.n)))
    return mean(losses)


def open_instruct(r, t, gate):
    return min(ratio(r, t, r.old), 2.0) * gate(r, t)


def vaco(r, t):
    moved = mean(abs(ratio(r, u, r.old) - 1) for u in range(r.n))
    return not (moved > 2.0 and (ratio(r, t, r.old) - 1) * r.adv[t] > 0)


def verl_geo(r, t):
    return geo_mean(r, t)


GEO_OLD, GEO_NEW = verl_rs("geo", old, 0.999, 1.001), verl_rs("geo", new, 0.999, 1.001)
K3_OLD, K3_NEW = verl_rs("k3", old, high=0.01), verl_rs("k3", new, high=0.01)

PUBLISHED = {
    "verl.decoupled_token_is": decoupled(token_tis(old)),
    "verl.decoupled_seq_is": decoupled(seq_tis(old)),
    "verl.decoupled_token_icepop": decoupled(icepop(old, 0.5, 5.0)),
    "verl.decoupled_seq_is_rs": decoupled(seq_tis(old), verl_rs("sum", old, 0.5, 2.0)),
    "verl.decoupled_geo_rs": decoupled(keep=GEO_OLD),
    "verl.decoupled_geo_rs_seq_tis": decoupled(seq_tis(old), GEO_OLD),
    "verl.decoupled_geo_rs_token_tis": decoupled(token_tis(old), GEO_OLD),
    "verl.decoupled_k3_rs": decoupled(keep=K3_OLD),
    "verl.decoupled_k3_rs_seq_tis": decoupled(seq_tis(old), K3_OLD),
    "verl.decoupled_k3_rs_token_tis": decoupled(token_tis(old), K3_OLD),
    "verl.disabled": decoupled(),
    "verl.bypass_ppo_clip": bypass(),
    "verl.bypass_ppo_clip_geo_rs": bypass(GEO_NEW),
    "verl.bypass_ppo_clip_k3_rs": bypass(K3_NEW),
    "verl.bypass_pg_is": bypass_pg(seq_tis(new)),
    "verl.bypass_pg_token_icepop": bypass_pg(icepop(new, 0.5, 5.0)),
    "verl.bypass_pg_geo_rs": bypass_pg(keep=GEO_NEW),
    "verl.bypass_pg_geo_rs_seq_tis": bypass_pg(seq_tis(new), GEO_NEW),
    "verl.bypass_pg_geo_rs_token_tis": bypass_pg(token_tis(new), GEO_NEW),
    "verl.cispo": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.8, 1.2)),
    "verl.gspo": lambda rows: rows_mean(rows, gspo_token),
    "verl.sapo": lambda rows: rows_mean(rows, sapo),
    "verl.geo_mean": lambda rows: mean(geo_mean(r, 0) for r in rows),
    "verl.dppo_tv": lambda rows: token_mean(rows, lambda r, t: dppo_verl(r, t, "tv")),
    "verl.dppo_kl": lambda rows: token_mean(rows, lambda r, t: dppo_verl(r, t, "kl")),
    "verl.gpg": lambda rows: token_mean(rows, lambda r, t: -r.new[t] * r.adv[t]),
    "verl.dro": lambda rows: token_mean(rows, dro),
    "skyrl.regular": lambda rows: token_mean(rows, ppo),
    "skyrl.dual_clip": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, c=3.0)),
    "skyrl.gspo": lambda rows: token_mean(rows, gspo_token),
    "skyrl.sapo": lambda rows: token_mean(rows, sapo),
    "skyrl.cispo": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "skyrl.rollout_is": lambda rows: token_mean(
        rows, lambda r, t: -ratio(r, t, r.sg) * (0.8 < ratio(r, t, r.sg) < 1.2) * r.adv[t] * r.new[t]
    ),
    "skyrl.dppo": lambda rows: token_mean(rows, lambda r, t: reinforce(r, t, r.mu) * dppo_keep(r, t)),
    "skyrl.tldr": skyrl("token", outlier=True, token=True, sequence="geo", low=0.99, high=1.01),
    "skyrl.token_tis": skyrl("token"),
    "skyrl.sequence_tis": skyrl("sequence"),
    "skyrl.geometric_mask": skyrl(sequence="geo", low=0.99, high=1.01),
    "skyrl.product_mask": skyrl(sequence="product", low=0.5, high=2.0),
    "skyrl.token_mask": skyrl(token=True),
    "skyrl.outlier_mask": skyrl(outlier=True),
    "xtuner.reasoning": xtuner(0.5),
    "xtuner.agentic": xtuner(0.0),
    "trl.grpo": plain(trl_weight, agg=rows_mean),
    "trl.dapo": plain(trl_weight),
    "trl.bnpo": plain(trl_weight),
    "trl.luspo": plain(trl_weight, agg=rows_sum),
    "trl.dr_grpo": lambda rows: plain(trl_weight, agg=total)(rows) / (len(rows) * 256),
    "trl.sapo": plain(trl_weight, sapo, rows_mean),
    "trl.cispo": plain(trl_weight, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "prime_rl.default": prime_rl(dppo_keep),
    "prime_rl.ipo": prime_rl(lambda r, t: abs(prob_diff(r, t)) <= 0.1),
    "prime_rl.icepop": prime_rl(lambda r, t: within(ratio(r, t, r.sg), 0.2, 5.0)),
    "prime_rl.kpop": prime_rl(lambda r, t: both_ways(r, t, r.sg) <= 0.1),
    "tinker.importance_sampling": lambda rows: total(rows, lambda r, t: reinforce(r, t, r.mu)),
    "tinker.ppo": lambda rows: total(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "tinker.cispo": lambda rows: total(rows, lambda r, t: cispo(r, t, 0.0, 4.0, r.mu)),
    "torchforge.default": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.1, 10.0, r.mu)),
    "art.default": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "dppo.tv": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "tv", 0.15)),
    "dppo.kl": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "kl", 0.05)),
    "minirl.default": lambda rows: token_mean(rows, minirl),
    "openrlhf.tis": plain(lambda r, t: clip(ratio(r, t, r.old), 0.5, 5.0)),
    "openrlhf.icepop": plain(icepop(old, 0.5, 5.0)),
    "openrlhf.seq_mask_tis": plain(geo_gate(old, 0.5, 5.0)),
    "openrlhf.flash_reinforce": plain(
        lambda r, t: ratio(r, t, r.old) * (mean(bkl(r, u, r.old, 1e-6) for u in range(r.n)) <= 3e-3)
    ),
    "openrlhf.dppo_like": plain(lambda r, t: ratio(r, t, r.old) * (bkl(r, t, r.old, 1e-6) <= 0.05)),
    "areal.token_mask": plain(icepop(old, 0.5, 5.0)),
    "areal.seq": plain(lambda r, t: seq(r, r.old, mean) * (seq(r, r.old, mean) <= 5.0)),
    "areal.kl": plain(lambda r, t: ratio(r, t, r.old) * (areal_stat(r, t) <= 5.0)),
    "areal.kpop": plain(lambda r, t: ratio(r, t, r.old) * (both_ways(r, t, r.old) <= 2.0)),
    "slime.tis": plain(lambda r, t: clip(ratio(r, t, r.old), 0.0, 2.0), agg=rows_mean),
    "slime.icepop": plain(icepop(old, 0.0, 2.0), agg=rows_mean),
    "slime.mis": slime_mis,
    "slime.mis_geo": plain(
        lambda r, t: (
            min(ratio(r, t, r.old), 2.0)
            * within(seq(r, r.old, mean), 0.9999, 1.0001)
            * (min(ratio(r, u, r.old) for u in range(r.n)) >= 1e-4)
        ),
        agg=rows_mean,
    ),
    "slime.opsm": plain(lambda r, t: float(not opsm(r, r.old, 1e-4)), agg=rows_mean),
    "nemo.tis": plain(token_tis(old)),
    "nemo.icepop": plain(icepop(old, 0.5, 5.0)),
    "nemo.seq_mask_tis": plain(geo_gate(old, 0.999, 1.002)),
    "nemo.gspo_is": plain(lambda r, t: seq(r, r.old, math.fsum), gspo),
    "nemo.mult_err": lambda rows: kept_mean(
        rows,
        lambda r, t: ppo(r, t) if mean(math.exp(abs(a - b)) for a, b in zip(r.old, r.mu, strict=True)) <= 2 else None,
    ),
    "roll.default": plain(
        lambda r, t: clip(ratio(r, t, r.old), 0, 1.2) * within(ratio(r, t, r.old), 0.8, 1.2), agg=rows_mean
    ),
    "open_instruct.default": plain(token_tis(old)),
    "open_instruct.icepop": plain(lambda r, t: open_instruct(r, t, lambda r, t: within(ratio(r, t, r.old), 0.5, 2.0))),
    "open_instruct.seq": plain(lambda r, t: min(seq(r, r.old, mean), 2.0) * within(seq(r, r.old, mean), 0.5, 2.0)),
    "open_instruct.vaco": plain(lambda r, t: open_instruct(r, t, vaco)),
    "swift.token_truncate": plain(token_tis(old), agg=rows_mean),
    "swift.token_mask": plain(icepop(old, 0.0, 2.0), agg=rows_mean),
    "swift.sequence_truncate": plain(lambda r, t: min(seq(r, r.old, mean), 2.0), agg=rows_mean),
    "swift.sequence_mask": plain(geo_gate(old, 0.0, 2.0), agg=rows_mean),
    "swift.opsm": lambda rows: mean(
        mean(min(ratio(r, t, r.old), 2.0) * ppo(r, t) for t in range(r.n)) for r in rows if not opsm(r, r.mu, 0.1)
    ),
    "rlinf.decoupled": lambda rows: kept_mean(
        rows, lambda r, t: ratio(r, t, r.old) * ppo(r, t) if ratio(r, t, r.old) <= 2.0 else None
    ),
}


def padded(rows, values):
    width = max(r.n for r in rows)
    return torch.tensor([v + [math.nan] * (width - len(v)) for v in values], dtype=torch.float64)


def ours(rows, name, needs, **options):
    arguments = {
        "new_logp": padded(rows, [r.new for r in rows]).requires_grad_(),
        "advantages": torch.tensor([r.adv[0] for r in rows], dtype=torch.float64),
        "mask": ~padded(rows, [r.new for r in rows]).isnan(),
    }
    given = {"old_logp": "old", "rollout_logp": "mu", "ref_logp": "ref"}
    arguments |= {log_prob: padded(rows, [getattr(r, given[log_prob]) for r in rows]) for log_prob in needs}
    out = rc.policy_loss(**arguments, **rc.recipe(name, **options))
    (slope,) = torch.autograd.grad(out.value, arguments["new_logp"])
    return out.value.item(), slope


def assert_published(name, published, needs, **options):
    acted = 0.0
    for seed in range(8):
        rows = batch(seed)
        value, slope = ours(rows, name, needs, **options)
        assert error(value, published(rows)) <= 1e-7, (name, seed, value, published(rows))
        for i, row in enumerate(rows):
            for t in range(row.n):
                at, sides = row.new[t], []
                for step in (STEP, -STEP):
                    row.new[t] = at + step
                    sides.append(published(rows))
                row.new[t] = at
                wanted = (sides[0] - sides[1]) / (2 * STEP)
                assert error(slope[i, t].item(), wanted) <= 1e-7, (name, seed, i, t)
                acted += abs(wanted)
    assert acted > 0.0, name


def test_every_recipe_is_restated():
    assert sorted(PUBLISHED) == rc.recipe_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_is_what_is_published(name):
    assert_published(name, PUBLISHED[name], recipes._calls()[name].needs)


def test_options_by_the_frameworks_names():
    needs = ("old_logp", "rollout_logp")

    def verl_kl(rows):
        return decoupled(token_tis(old, 3.0))(rows) + 0.5 * token_mean(rows, lambda r, t: k3(r, t, 10.0))

    options = {"threshold": 3.0, "kl_loss_coef": 0.5}
    assert_published("verl.decoupled_token_is", verl_kl, (*needs, "ref_logp"), **options)

    def trl_kl(rows):
        def loss(r, t):
            r_t = math.exp(r.new[t] - r.old[t])
            w = 0.0 if opsm(r, r.mu, 0.05) else trl_weight(r, t)
            return w * ppo(r, t, 0.1, 0.3, delta=1.5) + 0.2 * k3(r, t) * r_t

        return rows_mean(rows, loss)

    options = {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.2, "off_policy_mask_threshold": 0.05}
    assert_published("trl.grpo", trl_kl, (*needs, "ref_logp"), **options)

    def trl_gspo(rows):
        return token_mean(rows, lambda r, t: min(ratio(r, t, r.old), 3.0) * gspo(r, t, 0.1, 0.1))

    options = {"importance_sampling_level": "sequence", "epsilon": 0.1}
    assert_published("trl.dapo", trl_gspo, needs, vllm_importance_sampling_mode="token_truncate", **options)

    def swift_kl(rows):
        return rows_mean(rows, lambda r, t: min(ratio(r, t, r.old), 2.0) * (ppo(r, t) + 0.3 * k3(r, t)))

    assert_published("swift.token_truncate", swift_kl, (*needs, "ref_logp"), beta=0.3)


def test_wrong_names_and_options():
    with pytest.raises(ValueError, match=r"^recipe: unknown name 'verl\.gsop', did you mean 'verl\.gspo'"):
        rc.recipe("verl.gsop")
    with pytest.raises(TypeError, match=r"^recipe verl\.gspo\(epsilon=0\.1\): .*epsilon"):
        rc.recipe("verl.gspo", epsilon=0.1)
    with pytest.raises(ValueError, match=r"^recipe verl\.gspo\(clip_ratio_low=2\.0\): GSPO\.low: expected a number"):
        rc.recipe("verl.gspo", clip_ratio_low=2.0)
    with pytest.raises(TypeError, match=r"^recipe: expected a name"):
        rc.recipe(None)
