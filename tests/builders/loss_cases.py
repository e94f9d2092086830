"""Batches for the tests of the policy loss, laid out like those of `correct`, and the comparison with its oracle."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

import rollout_corr as rc
from builders import compare as to_oracle
from builders.batches import GARBAGE, lay_out
from builders.calls import bundled_loss
from frozen.runners import run_as as run_as  # for those that move
from oracles import correction as oracle
from oracles import loss as oracle_loss
from rollout_corr.specs.terms import Objective

TENSORS = ("old", "rollout", "ref", "weights", "train_mask", "scale")
# Arguments that are not log-probs.
PLAIN = ("weights", "train_mask", "scale", "entropy")

SURROGATES = {
    "ppo": rc.PPO(),
    "ppo dual": rc.PPO(0.1, 0.28, dual=1.5),
    "ppo delta": rc.PPO(0.2, 0.3, delta=1.2),
    "ppo open": rc.PPO(1.0, math.inf),
    "gspo": rc.GSPO(0.05, 0.06),
    "gspo token": rc.GSPO(0.05, 0.06, dual=1.1, through="token"),
    "reinforce": rc.Reinforce(),
    "score": rc.Score(),
    "cispo": rc.Score(upper=1.2),
    "score both": rc.Score(0.8, 1.3),
    "score icepop": rc.Score(0.8, 1.3, "zero"),
    "dppo tv": rc.DPPO("tv", 0.05, 0.1, upper=1.4),
    "dppo kl": rc.DPPO("kl", 0.01, 0.02, upper=None),
    "sapo": rc.SAPO(),
    "gmpo": rc.GMPO(0.2, 0.3),
    "gpg": rc.GPG(),
    "dro": rc.DRO(0.5),
    "dro sequence": rc.DRO(0.5, "sequence"),
    "gspo scaled": rc.GSPO(0.05, 0.06, coef=3.0),
    "gmpo scaled": rc.GMPO(0.2, 0.3, coef=0.5),
    "score sequence": rc.Score(0.9, 1.1, "zero", "sequence"),
    "score average": rc.Score(upper=1.1, level="average"),
    "score geometric": rc.Score(0.9, 1.2, level="geometric_average"),
    "sapo stopped": rc.SAPO(1.0, 1.5, gate="stopped"),
    "topr": rc.TOPR(0.1, 1.2, positive=0.5, negative=2.0, coef=0.25),
    "rec": rc.REC("one_side", 0.05, 0.05),
    "rec ring": rc.REC("ring", 0.1, 0.1, 0.3, 0.4, weight="ratio"),
    "rec sequence": rc.REC("two_side", 0.1, 0.1, weight="ratio", level="sequence"),
    "vespo": rc.VESPO(),
    "vespo clamped": rc.VESPO(clamp=0.3),
    "clamped": rc.Reinforce(clamp=0.3),
    "ppo average": rc.AveragePPO(0.1, 0.15),
    "ppo average dual": rc.AveragePPO(0.1, 0.28, dual=1.2, delta=1.3, coef=2.0),
    "ppo geometric": rc.AveragePPO(0.05, 0.1, level="geometric_average"),
    "ppo average clamped": rc.AveragePPO(0.9, 0.9, level="geometric_average", clamp=0.1),
}
MEANS = (
    rc.Mean("token"),
    rc.Mean("sequence"),
    rc.Mean("sequence_sum"),
    rc.Mean("sequence_sum", length=16.0),
    rc.Mean("sum"),
)
COUNTED = ("original", "kept")
# Those that look at the whole batch, which have an oracle of their own.
OF_BATCH = {
    "clip cov": rc.ClipCov(0.2, 0.2, share=0.2, lower=0.05, upper=5.0, seed=3),
    "clip cov dual": rc.ClipCov(0.1, 0.3, dual=1.3, share=0.15, lower=-0.5, upper=0.5),
    "clip cov none": rc.ClipCov(lower=50.0, upper=60.0),
    "kl cov": rc.KLCov(0.2, 0.7),
    "kl cov all": rc.KLCov(1.0, 0.5, coef=2.0),
}
# Those that compare the sequences of a group.
OF_GROUPS = {"real": rc.REAL(), "real cold": rc.REAL(0.05, coef=2.0), "real clamped": rc.REAL(clamp=0.05)}
LOOKING = OF_BATCH | OF_GROUPS
GROUPS = (2, 0, 2, 1, 0, 4, 0, 2, 2, 4)


def random_batch(seed, lengths=(5, 1, 7, 0, 4, 6), *, advantages="token", scale=0.4, broken=False):
    """Sequences with holes in both masks and garbage in the holes; the third is all invalid. All tensors are there."""
    rng = random.Random(seed)
    made = []
    for s, length in enumerate(lengths):
        mask = [int(s != 2 and rng.random() < 0.8) for _ in range(length)]
        new = [-rng.expovariate(1.0) - 0.01 for _ in range(length)]
        old, rollout, ref = ([min(x + rng.gauss(0.0, scale), 0.0) for x in new] for _ in range(3))
        tokens = [rng.choice((-1, 1)) * rng.uniform(0.2, 2.0) * (rng.random() < 0.9) for _ in range(length)]
        weights = [rng.choice((0.0, 1.0, rng.uniform(0.2, 2.0), rng.uniform(0.2, 2.0))) for _ in range(length)]
        trains = [int(rng.random() < 0.8) for _ in range(length)]
        factors = [
            (0.5, 0.0, 2.0, 1.0, 0.25)[(3 * t + s) % 5] if mask[t] else GARBAGE[t % len(GARBAGE)] for t in range(length)
        ]
        rows = [new, old, rollout, ref, tokens, weights]
        for t in range(length):
            if not mask[t]:
                for row in rows:
                    row[t] = rng.choice(GARBAGE)
        whole = rng.choice((-0.5, 0.25, 1.0))
        given = tokens if advantages == "token" else whole
        made.append(oracle_loss.Sequence(new, mask, given, old, rollout, ref, weights, trains, factors))
    if broken:
        for sequence in made:
            places = oracle_loss.valid(sequence)
            if places:
                rows = [sequence.new, sequence.old, sequence.rollout, sequence.ref, sequence.weights]
                rng.choice(rows)[rng.choice(places)] = rng.choice((math.nan, math.inf, -math.inf))
    return made


def only(sequences, *names):
    """Copy sequences with None in place of the tensors that are not named."""
    return [replace(q, **{name: None for name in TENSORS if name not in names}) for q in sequences]


class LaidLoss:
    """Arguments of `rc.policy_loss` in a layout."""

    def __init__(self, sequences, layout, dtype=torch.float64, seed=0):
        self.names = [name for name in (*TENSORS, "entropy") if sequences and getattr(sequences[0], name) is not None]
        plain = [
            oracle.Sequence(q.new, [0.0] * len(q), q.mask, q.advantages, {n: getattr(q, n) for n in self.names})
            for q in sequences
        ]
        if not self.names:
            for q in plain:
                q.external = {"nothing": [0.0] * len(q.train)}
        self.laid = lay_out(plain, layout, dtype, seed=seed)
        self.new = self.leaf(self.laid.train)
        tensors = {name: self.laid.external[name] for name in self.names}
        self.arguments = {(name if name in PLAIN else f"{name}_logp"): x for name, x in tensors.items()}
        self.arguments["cu_seqlens"] = self.laid.cu_seqlens
        for name, field in (("group_index", "group"), ("sequence_ids", "number")):
            numbers = [getattr(q, field) for q in sequences]
            if None not in numbers:
                self.arguments[name] = torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def leaf(x):
        if isinstance(x, list):
            return [row.clone().requires_grad_() for row in x]
        return x.detach().clone().requires_grad_() if x.is_nested else x.detach().requires_grad_()

    def __call__(self, **options):
        return rc.policy_loss(
            self.new, self.laid.advantages, **bundled_loss(mask=self.laid.mask, **(self.arguments | options))
        )

    def gradient(self, value, **options):
        """Of the loss, per sequence, and elsewhere."""
        leaves = self.new if isinstance(self.new, list) else [self.new]
        found = torch.autograd.grad(value, leaves, **options)
        grad = list(found) if isinstance(self.new, list) else found[0]
        return self.laid.read(grad), self.laid.elsewhere(grad)


def looked_at(name, seed, *names, lengths=(9, 1, 14, 0, 5, 12, 30, 3, 7, 2), broken=False):
    """A batch with what a surrogate that looks needs: groups and advantages of sequences."""
    real = name.startswith("real")
    batch = random_batch(seed, lengths, broken=broken, advantages="sequence" if real else "token")
    batch = only(batch, "old", *names)
    for s, q in enumerate(batch):
        if real:
            q.group = GROUPS[s % len(GROUPS)]
    return batch


def mean_of(name):
    """The mean that a surrogate is defined with."""
    return rc.Mean("sequence", over="kept") if name.startswith("real") else rc.Mean()


def arguments_of(objective):
    """An Objective as arguments of `rc.policy_loss`."""
    names = ("surrogate", "kl", "regularizer", "mean")
    return {name: getattr(objective, name) for name in names}


def compare(out, laid, sequences, objective, case, *, given=None, dtype=torch.float64):
    """Value, gradient and metrics against the oracle."""
    to_oracle.loss(objective, out, sequences, [laid.gradient(out.value)], dtype, case, given)


def objective(surrogate="ppo", **more):
    return Objective(SURROGATES[surrogate], **more)
