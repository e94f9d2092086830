"""Self-normalized weights that random calls do not meet: means near 0, calls without sequences, dry runs, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import margin, near
from frozen.runners import run_as

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_mean_near_0_divides_nothing():
    d = torch.tensor([[-19.0, -19.5], [0.5, 0.0], [-18.0, -19.0], [-17.0, -17.0]])
    zeros = torch.zeros_like(d)
    found = rc.correct(d, zeros, spec=rc.Spec(rc.Weight.token(normalize="sequence")))
    assert torch.equal(found.weights[0], d[0].exp())
    assert (found.weights[1:].sum(1) - 2.0).abs().max() < margin(torch.float32)
    metrics = found.metrics()
    assert metrics["sequences_undivided"] == 1.0
    assert metrics["sequence_weight_divisor_max"] == near((math.exp(0.5) + 1.0) / 2.0, torch.float32)
    least = (math.exp(-18.0) + math.exp(-19.0)) / 2.0
    assert metrics["sequence_weight_divisor_min"] == near(least, torch.float32, size=0.0)
    alone, spec = rc.Batch(groups=rc.Groups(size=1)), rc.Spec(rc.Weight.geometric(normalize="group"))
    every = rc.correct(d, zeros, alone, spec=spec).weights
    assert every[:, 0].tolist() == [d[0].mean().exp().item(), 1.0, d[2].mean().exp().item(), 1.0]


@pytest.mark.parametrize("normalize", ["batch", "group", "sequence"])
@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_tokens_of_no_sequence_alone_weigh_0(normalize, way):
    x, spec = torch.zeros(5), rc.Spec(rc.Weight.token(normalize=normalize), (rc.Criterion("ratio", lower=0.6),))
    with run_as(way):
        found = rc.correct(x, x, rc.Batch(cu_seqlens=torch.tensor([3]), groups=rc.Groups(size=2)), spec=spec)
    assert found.weights.tolist() == [0.0] * 5 and found.keep.shape == (0,)
    assert all(math.isfinite(value) for value in found.metrics().values())


def test_a_dry_run_and_a_call_without_sequences():
    spec = rc.Spec(rc.Weight.token(normalize="group"), apply=False)
    x = torch.zeros(2, 3)
    assert rc.correct(x, x, rc.Batch(groups=rc.Groups(size=2)), spec=spec).weights is None
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        out = rc.correct(nothing, nothing, rc.Batch(groups=rc.Groups(size=2)), spec=replace(spec, apply=True))
        assert out.weights.shape == shape and all(map(math.isfinite, out.metrics().values()))


def test_what_has_no_mean_of_a_group():
    with pytest.raises(ValueError, match=r"Weight\.normalize: expected 'batch', 'group' or None with over='sequence'"):
        rc.Weight.product(normalize="sequence")
    with pytest.raises(ValueError, match=r"Spec.report: expected \('native',\) with normalize='group'"):
        rc.Spec(rc.Weight.token(normalize="group"), report=("verl",))
    # A loss without a Spec and a surrogate of groups does not read them.
    x = torch.zeros(4, 3)
    out = rc.policy_loss(x, torch.ones(4), rc.Batch(groups=rc.Groups(size=2)))
    assert torch.equal(out.value, rc.policy_loss(x, torch.ones(4)).value)
