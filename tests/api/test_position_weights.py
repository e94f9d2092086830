"""Weights by position against plain loops: FIPO's of what lies behind a token, IW-OPD's of what lies before it."""

from __future__ import annotations

import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS
from builders.loss_cases import LaidLoss, only, random_batch
from builders.rounding import is_near
from rollout_corr.api.per_token import decayed_suffix_sums

BATCHES = [only(random_batch(seed), "old") for seed in (0, 1)] + [only(random_batch(3, broken=True), "old")]


def fipo(q, half_life, lower, upper, delta, safety):
    """Of one sequence."""
    moved = {t: q.new[t] - q.old[t] for t in range(len(q)) if q.mask[t] and math.isfinite(q.new[t] - q.old[t])}
    found = [0.0] * len(q)
    for t in range(len(q)):
        if not q.mask[t]:
            continue
        adds = [x * 2 ** (-(u - t) / half_life) for u, x in moved.items()
                if u >= t and (delta is None or math.exp(x) <= delta)]  # fmt: skip
        w = min(max(math.exp(math.fsum(adds)), lower), upper)
        if safety is not None and q.advantages[t] < 0 and math.exp(moved.get(t, 0.0)) > safety:
            w = min(max(w, 0.8), 1.0)
        found[t] = w
    return found


# Slots between tokens are a distance too.
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "padded_holes"])
@pytest.mark.parametrize(
    "settings",
    [
        {"half_life": 2.0, "lower": 0.0, "upper": math.inf, "delta": None, "safety": None},
        {"half_life": 32.0, "lower": 0.9, "upper": 1.1, "delta": 1.2, "safety": 1.05},
        {"half_life": 2.0, "lower": 0.0, "upper": math.inf, "delta": None, "safety": 1.05},
    ],
)
def test_future_kl_against_loops(layout, settings):
    for batch in BATCHES:
        laid = LaidLoss(batch, layout)
        old = laid.arguments["old_logp"]
        more = {"cu_seqlens": laid.laid.cu_seqlens, **settings}
        found = rc.future_kl_weights(laid.new, old, mask=laid.laid.mask, advantages=laid.laid.advantages, **more)
        assert not any(x.requires_grad for x in (found if isinstance(found, list) else [found]))
        for q, row in zip(batch, laid.laid.read(found), strict=True):
            assert all(is_near(a, b) for a, b in zip(row, fipo(q, **settings), strict=True))
        assert not any(laid.laid.elsewhere(found))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_early_tokens_against_loops(layout, gamma):
    for batch in BATCHES:
        laid = LaidLoss(batch, layout)
        more = {"cu_seqlens": laid.laid.cu_seqlens, "gamma": gamma}
        found = rc.early_token_weights(laid.laid.advantages, mask=laid.laid.mask, **more)
        for q, row in zip(batch, laid.laid.read(found), strict=True):
            sizes = [abs(a) if m and math.isfinite(a) else 0.0 for a, m in zip(q.advantages, q.mask, strict=True)]
            total = max(math.fsum(sizes), 1e-8)
            for t, w in enumerate(row):
                wanted = 1 + gamma * (1 - math.fsum(sizes[:t]) / total) if q.mask[t] else 0.0
                assert is_near(w, wanted)


def test_sums_of_long_sequences_in_any_company():
    """The rounds double; the bits of a sequence do not depend on its neighbors."""
    generator = random.Random(0)
    lengths = [1, 700, 3, 0, 64, 65]
    x = torch.tensor([generator.gauss(0.0, 1.0) for _ in range(sum(lengths))], dtype=torch.float64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for decay in (1.0, 0.9, 1e-200):
        found = decayed_suffix_sums(x, sequence, decay)
        start = 0
        for length in lengths:
            row = x[start : start + length].tolist()
            for t in range(0, length, 7):
                wanted = math.fsum(decay ** (u - t) * row[u] for u in range(t, length))
                assert is_near(found[start + t].item(), wanted)
            alone = decayed_suffix_sums(x[start : start + length], torch.zeros(length), decay)
            assert torch.equal(alone, found[start : start + length])
            start += length
