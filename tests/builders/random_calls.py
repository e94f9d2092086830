"""Random batches and Specs of a seed, with bounds that no value lies on, for the suites of attack."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

import rollout_corr as rc
from builders import unit_cases
from builders.batches import LAYOUTS, MASK_DTYPES, fitted, random_sequences, spoil, wild
from builders.weights import KINDS
from rollout_corr.specs.choices import NONFINITE, STATS

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)


def per_token_or_sequence(rng: random.Random, lengths: list[int]) -> str:
    """Draw what advantages are of. Where there are as many sequences as tokens, they count as of tokens."""
    return "token" if sum(lengths) == len(lengths) else rng.choice(("token", "sequence"))


def random_batch(rng: random.Random):
    """Sequences as the oracle takes them: empty ones, broken ones, and some with D of 30 and -40."""
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(1, 7))]
    sequences = random_sequences(
        rng.random(),
        lengths,
        scale=rng.choice((0.05, 0.4, 1.5)),
        invalid=rng.choice((0.0, 0.25, 0.8)),
        advantages=per_token_or_sequence(rng, lengths),
    )
    sequences = wild(sequences) if rng.random() < 0.3 else sequences
    return spoil(sequences, rng.random(), share=0.5) if rng.random() < 0.3 else sequences


def random_spec(rng: random.Random, sequences, stats=STATS) -> rc.Spec:
    """Any Spec over tokens and sequences, whose criteria cut this batch between its values."""
    overs = ("token", "sequence", "sequence")
    spec = unit_cases.random_spec(rng, stats, overs, NONFINITE, levels=KINDS[:3], decay=(None,))
    criteria = tuple(replace(criterion, eps=rng.choice((1e-8, 0.2))) for criterion in spec.criteria)
    return fitted(replace(spec, criteria=criteria), sequences)


def random_layout(rng: random.Random) -> tuple[str, torch.dtype]:
    """A layout and the dtype of its masks."""
    return rng.choice(LAYOUTS), rng.choice(MASK_DTYPES)
