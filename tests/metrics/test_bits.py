"""Exact counts of what differs between the two log-probs: on every backend, whatever the layout and the order."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import run_as

COUNTS = ("tokens", "tokens_nonfinite", "tokens_differing", "tokens_differing_fraction", "sequences_differing")
KEYS = (*COUNTS, "logp_ulps_max")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN, INF = math.nan, math.inf
GARBAGE = ((NAN, -1.0), (0.0, -1e10), (-INF, -INF), (-1.0, -1.0))


def made(seed, dtype, nonfinite=True):
    """Sequences as [length, 2] tensors and masks: equal tokens, one unit apart, far apart, and garbage in holes."""
    rng, found = random.Random(seed), []
    for length in (5, 1, 9, 0, 3, 12):
        rows, mask = [], []
        same = rng.random() < 0.4
        for t in range(length):
            x = torch.tensor(-rng.expovariate(1.0), dtype=dtype)
            y = x if same or rng.random() < 0.6 else torch.nextafter(x.float(), torch.tensor(-9.0)).to(dtype)
            y = y - 0.5 if not same and rng.random() < 0.2 else y
            mask.append(int(0 < t < 8 and t != 4))
            pair = (float(x), float(y)) if mask[-1] else rng.choice(GARBAGE)
            rows.append((NAN, pair[1]) if nonfinite and mask[-1] and rng.random() < 0.05 else pair)
        found.append((torch.tensor(rows, dtype=dtype).view(-1, 2), torch.tensor(mask, dtype=torch.bool)))
    return found


def counted(sequences):
    """The metrics, token by token."""
    pairs = [[pair for pair, m in zip(x.tolist(), mask.tolist(), strict=True) if m] for x, mask in sequences]
    differing = [[a != b or not math.isfinite(a - b) for a, b in row] for row in pairs]
    tokens, many = sum(map(len, pairs)), sum(map(sum, differing))
    nonfinite = sum(not math.isfinite(a - b) for row in pairs for a, b in row)
    finite = torch.tensor([pair for row in pairs for pair in row if math.isfinite(pair[0] - pair[1])]).view(-1, 2)
    # All are at most 0, where bits grow away from 0; -0.0 is 0.
    places = finite.abs().view(torch.int32).long()
    ulps = int((places[:, 0] - places[:, 1]).abs().max()) if len(places) else 0
    return dict(zip(KEYS, (tokens, nonfinite, many, many / tokens, sum(map(any, differing)), ulps), strict=True))


def padded(sequences, left):
    """One batch [B, 16], with garbage where there is no token."""
    dtype = sequences[0][0].dtype
    x, mask = torch.full((len(sequences), 16, 2), NAN, dtype=dtype), torch.zeros(len(sequences), 16)
    for row, (tokens, valid) in enumerate(sequences):
        here = slice(16 - len(valid), 16) if left else slice(len(valid))
        x[row, here], mask[row, here] = tokens, valid.float()
    return x[..., 0], x[..., 1], {"mask": mask}


def packed(sequences):
    x, mask = torch.cat([x for x, _ in sequences]), torch.cat([mask for _, mask in sequences])
    offsets = [0, *itertools.accumulate(len(mask) for _, mask in sequences)]
    return x[:, 0], x[:, 1], {"mask": mask, "cu_seqlens": torch.tensor(offsets)}


def compacted(sequences):
    """Without the holes, and without a mask."""
    train, rollout, given = packed([(x[mask], mask[mask]) for x, mask in sequences])
    return train, rollout, {"cu_seqlens": given["cu_seqlens"]}


# How the same sequences may come: in one call or in several whose statistics are merged.
WAYS = {
    "right-padded": lambda made: [padded(made, False)],
    "left-padded": lambda made: [padded(made, True)],
    "packed": lambda made: [packed(made)],
    "without holes": lambda made: [compacted(made)],
    "in another order": lambda made: [packed(made[::-1])],
    "with empty rows": lambda made: [padded(made + [(x, mask & False) for x, mask in made[:2]], False)],
    "split": lambda made: [packed(made[:2]), padded(made[2:5], True), packed(made[5:])],
}


def check(sequences, ways, spec, backend="torch"):
    wanted = counted(sequences)
    assert 0 < wanted["tokens_differing"] < wanted["tokens"]
    for way in ways:
        parts = WAYS[way](sequences)
        done = [rc.correct(a, b, **given, spec=spec, backend=backend).statistics for a, b, given in parts]
        found = rc.Statistics.sum(done).metrics()
        assert {key: found[key] for key in KEYS} == wanted, way


@pytest.mark.parametrize("nonfinite", ["reject", "neutral", "propagate"])
@pytest.mark.parametrize("run", ["blocks", "whole"])
def test_counts_are_exact_however_the_sequences_come(run, nonfinite):
    for seed, dtype in enumerate(DTYPES):
        with run_as(run):
            check(made(seed, dtype), WAYS, rc.Spec(detail="full", nonfinite=nonfinite))


# The interpreter takes a second for what torch does in a millisecond.
@pytest.mark.parametrize(
    ("nonfinite", "way", "dtype"),
    [("reject", "right-padded", torch.float32), ("propagate", "packed", torch.float64)],
)
def test_the_kernels_count_exactly(nonfinite, way, dtype):
    check(made(1, dtype), [way], rc.Spec(detail="full", nonfinite=nonfinite), "triton")


def test_labels_count_their_own_tokens():
    sequences = made(3, torch.float32)
    train, rollout, given = packed(sequences)
    kinds = [0, 1, 0, 0, 1, 1]
    batch = rc.Batch(**given, labels={"kind": rc.Labels(torch.tensor(kinds), ("math", "code"))})
    found = rc.correct(train, rollout, batch, spec=rc.Spec(detail="full")).metrics(by="kind")
    for label, name in enumerate(("math", "code")):
        wanted = counted([one for one, kind in zip(sequences, kinds, strict=True) if kind == label])
        assert {key: found[f"kind/{name}/{key}"] for key in KEYS} == wanted


def test_bits_raise_no_warning():
    x = -torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    one_off = x.clone()
    one_off[5, 7] = torch.nextafter(x[5, 7], torch.tensor(-9.0))
    out = rc.correct(one_off, x, mask=torch.ones_like(x), spec=rc.Spec(detail="full"))
    found = out.metrics()
    assert [found[key] for key in ("tokens_differing", "sequences_differing", "logp_ulps_max")] == [1, 1, 1]
    assert out.warnings() == []
    assert "tokens_differing / tokens" in out.explain("tokens_differing_fraction")


def test_percentiles_of_exact_zeros_are_zero():
    """One token of 512 differs; then one in four by less than the histogram tells from 0, half of them below it."""
    x = torch.full((1, 512), -1.0)
    y = x.clone()
    y[0, 3] -= 1e-6
    spec = rc.Spec(detail="full")
    found = rc.correct(x, y, spec=spec).metrics()
    percentiles = [value for key, value in found.items() if key.startswith("logratio_p")]
    assert percentiles == [0.0] * 9 + [found["logratio_max"]] * 2
    y = torch.full((1, 512), -1e-3)
    x = y.clone()
    x[0, :64], x[0, 64:128] = -1e-3 - 3e-8, -1e-3 + 3e-8
    found = rc.correct(x, y, spec=spec).metrics()
    assert found["tokens_differing"] == 128
    low, middle, high = ([found[f"logratio_p{p}"] for p in some] for some in ((1, 5, 10), (25, 50, 75), (90, 95, 99)))
    assert middle == [0.0] * 3
    assert all(-4e-8 < p < 0.0 for p in low) and all(0.0 < p < 4e-8 for p in high)
