"""Calls in modes of torch, one or more at a time: each answers as without them, to the bit."""

from __future__ import annotations

import random
import warnings

import torch

from attack.campaign import Area, Outcome
from builders.batches import lay_out, rounded
from builders.mode_cases import CALLS, MODES, difference
from builders.random_calls import random_batch, random_layout, random_spec


def attempt(seed: int) -> Outcome:
    """One call of a seed in up to three modes."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    sequences = rounded(random_batch(rng), dtype)
    spec = random_spec(rng, sequences)
    layout, mask_dtype = random_layout(rng)
    laid = lay_out(sequences, layout, dtype, mask_dtype)
    modes, call = rng.sample(list(MODES), rng.randint(1, 3)), rng.choice(list(CALLS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = difference(call, modes, laid, spec)
    return Outcome("wrong", f"{layout} {dtype} {spec!r}: {found}") if found else Outcome("right")


AREA = Area("modes", "calls", attempt, count=4_000, few=16)
