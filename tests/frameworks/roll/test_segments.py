"""ROLL's segments, each run of its mask: its weight, its filter and its ratio, by loops over the runs."""

from __future__ import annotations

import itertools

import pytest
import torch

import rollout_corr as rc
from builders.rounding import all_near

pytestmark = pytest.mark.usefixtures("one_thread")


def segment_means(x, mask):
    """Give what `compute_segment_masked_mean` gives: at each run of ones of a row its mean, 0 elsewhere."""
    found = torch.zeros_like(x)
    for row in range(mask.shape[0]):
        for valid, run in itertools.groupby(range(mask.shape[1]), key=lambda t, row=row: bool(mask[row, t])):
            places = list(run)
            if valid:
                found[row, places] = x[row, places].mean()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_segments_are_runs(seed):
    rng = torch.Generator().manual_seed(seed)
    rollout = torch.randn(6, 24, generator=rng, dtype=torch.float64) - 2.0
    train = rollout + 0.3 * torch.randn(6, 24, generator=rng, dtype=torch.float64)
    mask = torch.rand(6, 24, generator=rng) < 0.7
    ratio = segment_means(train - rollout, mask).exp()
    weight = rc.Weight.geometric(lower=0.0, upper=1.2, over="turn")
    criterion = rc.Criterion("ratio", over="turn", reduce="mean", lower=0.8, upper=1.2)
    out = rc.correct(train, rollout, rc.Batch(mask=mask, turns="runs"), spec=rc.Spec(weight, [criterion]))
    assert all_near(out.weights, torch.where(mask, ratio.clamp(0.0, 1.2), 0.0))
    assert out.mask.equal(mask & (ratio >= 0.8) & (ratio <= 1.2))
    assert 0 < int((~out.keep_turns).sum()) < out.keep_turns.shape[0]


def test_the_ratio_of_segments_is_gspo_over_turns():
    rng = torch.Generator().manual_seed(7)
    old = torch.randn(6, 24, generator=rng, dtype=torch.float64) - 2.0
    new = (old + 0.3 * torch.randn(6, 24, generator=rng, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, 24, generator=rng, dtype=torch.float64)
    mask = torch.rand(6, 24, generator=rng) < 0.7
    ratio = segment_means(new - old, mask).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    wanted = loss[mask].sum() / mask.sum()
    (slope,) = torch.autograd.grad(wanted, new)
    found = rc.policy_loss(
        new, advantages, rc.Batch(mask=mask, turns="runs"), rc.Loss(rc.GSPO(0.2, 0.2, over="turn")), old_logp=old
    )
    found.value.backward()
    assert abs(found.value.item() - wanted.item()) < 1e-12
    assert all_near(new.grad, slope)


def test_the_reader_makes_them_of_a_configuration():
    weight = {"enabled": True, "weight_type": "segment", "upper_bound": 1.2}
    block = {"is_weight": weight, "filters": [{"enabled": True, "agg_type": "segment"}]}
    assert rc.spec("roll", block) == rc.spec("roll.segment")
    whole = rc.recipe("roll", {"train_infer_correction": block, "ratio_type": "segment"})
    assert whole == rc.recipe("roll.segment") and whole.batch == {"turns": "runs"}
    assert rc.recipe("roll", {"ratio_type": "segment"}).loss.surrogate == rc.GSPO(0.2, 0.2, over="turn")
    assert rc.recipe("roll", {"train_infer_correction": block}).loss.surrogate == rc.PPO(0.2, 0.2)
    assert not rc.recipe("roll", {}).batch
