"""Random batches and Specs of a seed, with bounds that no value lies on, for the suites of attack."""

from __future__ import annotations

import random

import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, MASK_DTYPES, random_sequences, spoil, wild
from builders.products import DROPS, fit
from builders.weights import KINDS, weight_of
from rollout_corr.specs.choices import NONFINITE, OUTSIDE, REDUCTIONS, REJECTED, STATS, SUMS_OVER, WHEN

# Of outcomes that log-ratios on the grid of a half precision do not have.
WEIGHT_BOUNDS = ((None, None), (None, 1.234567), (0.789012, None), (0.789012, 1.234567))
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)


def per_token_or_sequence(rng: random.Random, lengths: list[int]) -> str:
    """Draw what advantages are of. Where there are as many sequences as tokens, they count as of tokens."""
    return "token" if sum(lengths) == len(lengths) else rng.choice(("token", "sequence"))


def random_batch(rng: random.Random, most=7, longest=9):
    """Sequences as the oracle takes them: empty ones, broken ones, and some with D of 30 and -40."""
    lengths = [rng.randint(0, longest) for _ in range(rng.randint(1, most))]
    sequences = random_sequences(
        rng.random(),
        lengths,
        scale=rng.choice((0.05, 0.4, 1.5)),
        invalid=rng.choice((0.0, 0.25, 0.8)),
        advantages=per_token_or_sequence(rng, lengths),
    )
    sequences = wild(sequences) if rng.random() < 0.3 else sequences
    return spoil(sequences, rng.random(), share=0.5) if rng.random() < 0.3 else sequences


def random_weight(rng: random.Random) -> rc.Weight | None:
    if rng.random() < 0.3:
        return None
    normalize, token_clamp = rng.choice((None, None, "batch")), rng.choice((None, None, 0.3))
    return weight_of(rng.choice(KINDS[:3]), *rng.choice(WEIGHT_BOUNDS), rng.choice(OUTSIDE), normalize, token_clamp)


def random_spec(rng: random.Random, sequences) -> rc.Spec:
    """Any Spec, whose criteria cut this batch between its values."""
    settings = {
        "weight": random_weight(rng),
        "rejected": rng.choice(REJECTED),
        "clamp": rng.choice((20.0, 20.0, 0.25)),
        "nonfinite": rng.choice(NONFINITE),
        "sums_over": rng.choice(SUMS_OVER),
        "detail": rng.choice(("basic", "full")),
        "apply": rng.random() < 0.8,
    }
    criteria: tuple[rc.Criterion, ...] = ()
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        stat, reduce = rng.choice(STATS), rng.choice((None, *REDUCTIONS))
        arguments = {
            "stat": stat,
            "over": "token" if reduce is None else "sequence",
            "reduce": reduce,
            "when": rng.choice(WHEN),
            "drop": rng.choice(DROPS),
            "name": "entropy" if stat == "external" else None,
            "token_clamp": rng.choice((None, None, 0.3)),
        }
        found = fit(sequences, settings | {"criteria": criteria}, arguments, rng.choice(("lower", "upper", "both")))
        if found.label not in [criterion.label for criterion in criteria]:
            criteria = (*criteria, found)
    return rc.Spec(**settings, criteria=criteria)


def random_layout(rng: random.Random) -> tuple[str, torch.dtype]:
    """A layout and the dtype of its masks."""
    return rng.choice(LAYOUTS), rng.choice(MASK_DTYPES)
