"""Random Specs that combine tokens, turns, prefixes, sequences and ages, with a batch, its turns and its labels."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import rollout_corr as rc
from builders.batches import Laid, lay_out, random_sequences, spoil, wild
from builders.turns import offsets_of, random_turns
from builders.weights import weight_of
from oracles.together import Told

STATS = ("ratio", "k1", "k2", "k3", "k3_reverse", "abs", "ratio_error", "ratio_deviation", "age", "external")
LABELS = ("a", "b", "c")


def random_bounds(rng, stat):
    upper = {"ratio": 1.0, "ratio_error": 1.2}.get(stat, 0.1) + rng.uniform(0.05, 0.9)
    lower = {"ratio": rng.uniform(0.4, 0.95), "k1": -rng.uniform(0.1, 1.0), "external": -rng.uniform(0.1, 2.0)}.get(
        stat, upper * rng.uniform(0.01, 0.5)
    )
    if stat == "age":
        lower, upper = rng.choice((-2, 0, 0.5, 1)), rng.choice((1, 2, 3, 3.5, 6))
    sides = rng.choice(("upper", "upper", "both", "lower"))
    return {"lower": None if sides == "upper" else lower, "upper": None if sides == "lower" else upper}


def random_criterion(rng):
    stat, over = rng.choice(STATS), rng.choice(("token", "turn", "prefix", "prefix", "sequence"))
    of_prefixes = {"growth": rng.choice((None, "sqrt")), "within": rng.choice(("sequence", "turn"))}
    return rc.Criterion(
        stat,
        over,
        None if over == "token" else rng.choice(("sum", "mean", "max", "min")),
        **random_bounds(rng, stat),
        when=rng.choice(("any", "any", "negative_advantage", "positive_advantage", "outward")),
        drop=rng.choice(("unit", "sequence", "token", *(("rest", "rest") if over == "prefix" else ()))),
        name="entropy" if stat == "external" else None,
        token_clamp=rng.choice((None, 0.5)),
        **(of_prefixes if over == "prefix" else {}),
    )


def random_weight(rng):
    level = rng.choice(("token", "product", "geometric", "prefix"))
    of_prefixes = {"reduce": rng.choice(("sum", "mean", "min")), "growth": rng.choice((None, "sqrt"))}
    return weight_of(
        level,
        *rng.choice(((None, None), (0.5, 2.0), (None, 1.1), (0.9, None))),
        outside=rng.choice(("clamp", "zero")),
        normalize=rng.choice((None, "batch")),
        token_clamp=rng.choice((None, 0.5)),
        among="sequence" if level == "token" else rng.choice(("turn", "sequence")),
        decay=rng.choice((None, 0.8)),
        **(of_prefixes if level == "prefix" else {}),
    )


def random_spec(rng):
    criteria = {one.label: one for one in (random_criterion(rng) for _ in range(rng.randint(0, 4)))}
    return rc.Spec(
        random_weight(rng) if rng.random() < 0.8 else None,
        tuple(criteria.values()),
        rejected=rng.choice(("mask", "zero", "both")),
        nonfinite=rng.choice(("reject", "neutral")),
        sums_over=rng.choice(("valid", "kept")),
        clamp=rng.choice((20.0, 0.5)),
        detail=rng.choice(("basic", "full")),
        apply=rng.random() < 0.95,
        turns=True,
    )


@dataclass
class Case:
    """A call, and what the oracle is told of it."""

    laid: Laid
    spec: rc.Spec
    told: list
    given: dict  # turns, versions and labels, as the call takes them

    def correct(self, **more):
        return self.laid.correct(self.spec, **{**self.given, **more})


def made(seed, layout, dtype):
    """A random case of a layout."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 2, 4, 9, 17)) for _ in range(rng.randint(0, 6))]
    kind, invalid = rng.choice(("token", "sequence")), rng.choice((0.0, 0.25, 0.6))
    batch = random_sequences(seed, lengths, advantages=kind, invalid=invalid)
    batch = wild(batch) if rng.random() < 0.3 else batch
    batch = spoil(batch, seed) if rng.random() < 0.4 else batch
    turns, laid = random_turns(batch, seed), lay_out(batch, layout, dtype)
    offsets = offsets_of(laid, turns)
    if laid.cu_seqlens is not None:
        laid.cu_seqlens = laid.cu_seqlens.to(rng.choice((torch.int32, torch.int64)))
        if turns and offsets.shape[0] == laid.train.numel():
            offsets = torch.cat([offsets, offsets[-1:]])  # else they could be ids
            turns[-1].append(0)
    labels = [rng.choice((0, 1, 2, -1, 9)) for _ in batch]
    given = {
        "turns": offsets.to(rng.choice((torch.int32, torch.int64))),
        "versions": laid.versions,
        "current_version": laid.current_version,
        "labels": {"place": torch.tensor(labels, dtype=torch.int64)},
        "label_names": {"place": list(LABELS)},
    }
    ages = [[float(q.current_version - version) for version in q.versions] for q in batch]
    entropy = laid.read(laid.external["entropy"]) if batch else []
    rows = zip(log_ratios(laid), batch, turns, ages, entropy, labels, strict=True)
    told = [Told(d, q.mask, n, q.advantages, a, e, label) for d, q, n, a, e, label in rows]
    return Case(laid, random_spec(rng), told, given)


def log_ratios(laid):
    """D of every token, in the dtype that computes."""
    kind = torch.float64 if laid.read(laid.train) and _dtype(laid.train) == torch.float64 else torch.float32
    if isinstance(laid.train, list):
        return laid.read([a.to(kind) - b.to(kind) for a, b in zip(laid.train, laid.rollout, strict=True)])
    train, rollout = (x.values() if x.is_nested else x for x in (laid.train, laid.rollout))
    return laid.read(train.to(kind) - rollout.to(kind))


def _dtype(x):
    return x[0].dtype if isinstance(x, list) else x.dtype
