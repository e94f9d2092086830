"""Random Specs that combine tokens, turns, prefixes, sequences and ages, with a batch, its turns, groups and labels."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

import rollout_corr as rc
from builders.batches import Laid, lay_out, random_sequences, rounded, spoil, wild
from builders.turns import offsets_of, random_turns
from builders.weights import KINDS, weight_of
from rollout_corr.specs.choices import NONFINITE, OUTSIDE, REDUCTIONS, REJECTED, STATS, SUMS_OVER, WHEN

SIGNED = ("k1", "prob_diff", "external")
OVERS = ("token", "turn", "prefix", "prefix", "sequence")
# Of outcomes that log-ratios on the grid of a half precision do not have.
WEIGHT_BOUNDS = ((None, None), (0.512345, 1.987654), (None, 1.123456), (0.901234, None))
LABELS = ("a", "b", "c")


def random_bounds(rng, stat):
    """Bounds where the statistic usually lies."""
    upper = {"ratio": 1.0, "ratio_error": 1.2}.get(stat, 0.1) + rng.uniform(0.05, 0.9)
    lower = upper * rng.uniform(0.01, 0.5)
    if stat in SIGNED:
        lower = -rng.uniform(0.1, 1.0)
    elif stat == "age":
        lower, upper = rng.choice((-2, 0, 0.5, 1)), rng.choice((1, 2, 3, 3.5, 6))
    sides = rng.choice(("upper", "upper", "both", "lower"))
    return {"lower": None if sides == "upper" else lower, "upper": None if sides == "lower" else upper}


def random_criterion(rng, stats=STATS, overs=OVERS):
    stat, over = rng.choice(stats), rng.choice(overs)
    within = rng.choice(("sequence", "turn")) if "turn" in overs else "sequence"
    of_prefixes = {"growth": rng.choice((None, "sqrt")), "within": within}
    return rc.Criterion(
        stat,
        over,
        None if over == "token" else rng.choice(REDUCTIONS),
        **random_bounds(rng, stat),
        when=rng.choice(("any", *WHEN)),
        drop=rng.choice(("unit", "sequence", "token", *(("rest", "rest") if over == "prefix" else ()))),
        name="entropy" if stat == "external" else None,
        token_clamp=rng.choice((None, 0.5)),
        **(of_prefixes if over == "prefix" else {}),
    )


def random_weight(rng, overs=OVERS, levels=KINDS, normalize=(None, "batch"), decay=(None, 0.8)):
    level = rng.choice(levels)
    among = "sequence" if level == "token" or "turn" not in overs else rng.choice(("turn", "sequence"))
    chosen = rng.choice(normalize)
    # The mean of one sequence's own weight is that weight.
    chosen = "group" if chosen == "sequence" and level in ("product", "geometric") and among == "sequence" else chosen
    of_prefixes = {"reduce": rng.choice(("sum", "mean", "min")), "growth": rng.choice((None, "sqrt"))}
    return weight_of(
        level,
        *rng.choice(WEIGHT_BOUNDS),
        outside=rng.choice(OUTSIDE),
        normalize=chosen,
        token_clamp=rng.choice((None, 0.5)),
        among=among,
        decay=rng.choice(decay),
        **(of_prefixes if level == "prefix" else {}),
    )


def random_spec(rng, stats=STATS, overs=OVERS, nonfinite=("reject", "neutral"), **of_weight):
    """Any Spec over these units; without turns among them there are none."""
    criteria = {one.label: one for one in (random_criterion(rng, stats, overs) for _ in range(rng.randint(0, 4)))}
    return rc.Spec(
        random_weight(rng, overs, **of_weight) if rng.random() < 0.8 else None,
        tuple(criteria.values()),
        rejected=rng.choice(REJECTED),
        nonfinite=rng.choice(nonfinite),
        sums_over=rng.choice(SUMS_OVER),
        clamp=rng.choice((20.0, 0.5)),
        detail=rng.choice(("basic", "full")),
        apply=rng.random() < 0.95,
        turns="turn" in overs,
    )


def random_batch(rng):
    """Sequences, some with turns of no token, some broken."""
    seed, lengths = rng.random(), [rng.choice((0, 1, 2, 4, 9, 17)) for _ in range(rng.randint(0, 6))]
    kind, invalid = rng.choice(("token", "sequence")), rng.choice((0.0, 0.25, 0.6))
    batch = random_sequences(seed, lengths, advantages=kind, invalid=invalid)
    batch = wild(batch) if rng.random() < 0.3 else batch
    batch = spoil(batch, seed) if rng.random() < 0.4 else batch
    batch = [replace(q, turns=turns) for q, turns in zip(batch, random_turns(batch, seed), strict=True)]
    # As many offsets as packed tokens, or as those between gaps, could be ids.
    while batch and 1 + sum(len(q.turns) for q in batch) in (sum(map(len, batch)), sum(map(len, batch)) + 5):
        batch[-1].turns.append(0)
    return batch


def turns_alone(seed, stats=STATS):
    """A batch, its turns and a Spec without prefixes and normalization by groups."""
    rng = random.Random(seed)
    overs, levels = ("turn", "turn", "token", "sequence"), ("product", "geometric")
    batch = random_batch(rng)
    return batch, [q.turns for q in batch], random_spec(rng, stats, overs, levels=levels, decay=(None,))


@dataclass
class Case:
    """A call, and what the oracle is told of it."""

    laid: Laid
    spec: rc.Spec
    sequences: list  # rounded to the dtype
    groups: list
    labels: list  # of each sequence, a place in LABELS or none
    given: dict  # turns, groups and labels, as the call takes them

    def correct(self, **more):
        return self.laid.correct(self.spec, **{**self.given, **more})


def made(seed, layout, dtype):
    """A random case of a layout."""
    rng = random.Random(seed)
    batch, spec = (
        random_batch(rng),
        random_spec(rng, nonfinite=NONFINITE, normalize=(None, "batch", "group", "sequence")),
    )
    laid = lay_out(batch, layout, dtype)
    offsets = offsets_of(laid, [q.turns for q in batch])
    if laid.cu_seqlens is not None:
        laid.cu_seqlens = laid.cu_seqlens.to(rng.choice((torch.int32, torch.int64)))
    labels, groups = ([rng.choice(some) for _ in batch] for some in ((0, 1, 2, -1, 9), (0, 1, 2)))
    given = {
        "turns": offsets.to(rng.choice((torch.int32, torch.int64))),
        "group_index": torch.tensor(groups, dtype=torch.int64),
        "group_count": 3,
        "labels": {"place": torch.tensor(labels, dtype=torch.int64)},
        "label_names": {"place": list(LABELS)},
    }
    return Case(laid, spec, rounded(batch, dtype), groups, labels, given)
