"""Bounds that the batch or each group decides, beyond what random calls compare with loops: test_random_calls.py."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from builders.threaded_ranks import Rank, Ranks
from builders.weights import KINDS, weight_of
from oracles.correction import kept

pytestmark = pytest.mark.usefixtures("one_thread")


def packed(count=40):
    """Log-probs of three sequences, one of them empty, in float32, with holes."""
    rollout, noise = torch.randn(2, count, generator=torch.Generator().manual_seed(2))
    batch = rc.Batch(mask=torch.arange(count) % 7 != 3, cu_seqlens=torch.tensor([0, 3, 3, 9, 20, 24, 31, count]))
    return rollout + 0.4 * noise, rollout, batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floor", [0.3, 0.95])
def test_the_sample_size_is_kept(kind, floor, way):
    """The metric of the call says so; at a looser bound it would not be."""
    key = "weight_ess" if kind in ("token", "prefix") else "sequence_weight_ess"
    found = rc.correct(*packed(), spec=rc.Spec(weight_of(kind, upper=rc.KeepESS(floor)))).metrics()
    looser = rc.correct(*packed(), spec=rc.Spec(weight_of(kind, upper=found["weight/upper_max"] * 1.01))).metrics()
    if found["weight/upper_max"] < math.inf:
        assert found[key] == near(floor, torch.float32) and looser[key] < floor
    else:
        assert found[key] >= floor


def test_nothing_and_a_single_token_have_any_sample_size():
    spec = rc.Spec(rc.Weight.token(upper=rc.KeepESS(0.5)))
    x = torch.zeros(1, 2)
    nothing = rc.correct(x, x, mask=torch.zeros(1, 2), spec=spec)
    assert nothing.weights.tolist() == [[0.0, 0.0]] and nothing.metrics()["weight/upper_max"] == math.inf
    one = rc.correct(x + 3.0, x, mask=torch.tensor([[1, 0]]), spec=spec)
    assert one.weights.tolist() == [[pytest.approx(math.exp(3.0)), 0.0]]
    assert one.metrics()["weight/upper_max"] == math.inf


@pytest.mark.parametrize("nothing", [torch.zeros(0), torch.zeros(0, 4), []], ids=["packed", "padded", "list"])
def test_a_batch_without_sequences(nothing, way):
    """No group has a bound, and so the side is open."""
    criterion = rc.Criterion("k1", lower=rc.Quantile(0.2, within="group"), upper=rc.Bottom(1, within="group"))
    offsets = torch.zeros(1, dtype=torch.int64) if getattr(nothing, "ndim", 0) == 1 else None
    batch = rc.Batch(cu_seqlens=offsets, groups=rc.Groups(index=torch.zeros(0, dtype=torch.int64)))
    out = rc.correct(nothing, nothing, batch, spec=rc.Spec(criteria=(criterion,)))
    assert out.keep.shape == (0,) and out.metrics()[f"{criterion.label}/upper_max"] == math.inf


def test_the_bound_is_a_metric_of_each_call():
    spec = rc.Spec(criteria=(rc.Criterion("ratio", lower=rc.TopK(2), upper=rc.Quantile(0.5)),))
    rollout = torch.full((1, 4), -3.0)
    one, other = (
        rc.correct(rollout + torch.tensor([values]), rollout, spec=spec)
        for values in ([0.0, 0.5, 1.0, 1.5], [0.0, 0.25, 2.0, 2.0])
    )
    found = one.statistics.merge(other.statistics).metrics()
    wanted = {"upper_min": 0.25, "upper_max": 0.5, "lower_min": 1.0, "lower_max": 2.0}
    for key, value in wanted.items():
        assert found[f"token_ratio/{key}"] == near(math.exp(value))
    assert one.metrics()["token_ratio/upper_max"] == one.metrics()["token_ratio/upper_min"] == math.exp(0.5)
    nothing = rc.correct(rollout, rollout, mask=torch.zeros(1, 4), spec=spec).metrics()
    assert nothing["token_ratio/upper_max"] == math.inf and nothing["token_ratio/lower_min"] == 0.0
    assert rc.Statistics.nothing(spec, extra=one.statistics.extra).metrics()["token_ratio/upper_max"] == 0.0


def test_the_bounds_of_groups_are_a_metric_by_their_ends(way):
    """A group each: sums of |D| of its turns are 0, 0.5 and 3, 0.5."""
    train = torch.tensor([0.0, 0.5, 0.0, 1.0, 2.0, 0.25, 0.25]) - 3.0
    given = {"cu_seqlens": torch.tensor([0, 3, 7]), "turns": torch.tensor([0, 1, 3, 5, 7]), "groups": rc.Groups(size=1)}
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="turn", reduce="sum", upper=rc.Bottom(1, within="group")),))
    found = rc.correct(train, torch.full((7,), -3.0), rc.Batch(**given), spec=spec)
    metrics = found.metrics()
    assert found.keep_turns.tolist() == [True, False, False, True]
    assert (metrics["turn_sum_abs/upper_min"], metrics["turn_sum_abs/upper_max"]) == (0.0, 0.5)
    nothing = rc.correct(train, train, rc.Batch(mask=torch.zeros(7), **given), spec=spec)
    assert nothing.metrics()["turn_sum_abs/upper_max"] == math.inf


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("weight", [{}, {"token_clamp": 5.0}, {"over": "prefix", "reduce": "mean"}], ids=str)
def test_a_sequence_of_ratios_that_are_the_bound_is_not_beyond_it(weight, side, way):
    """Its mean is rounded in float32, the bound is not: of many values some would fall on either side."""
    for k in range(1, 40, 6):
        x, y = torch.full((1, 1 + k % 3), -0.03 * k - 0.01), torch.full((1, 1 + k % 3), -0.021 * k - 0.02)
        found = rc.correct(x, y, spec=rc.Spec(rc.Weight(**{"over": "token", **weight, side: rc.Quantile(0.5)})))
        key = f"sequence_mean_weight_{'above' if side == 'upper' else 'below'}_{side}_fraction"
        assert found.metrics()[key] == 0.0


def test_groups_of_neighbors_stay_on_their_rank():
    """A size counts whole groups on each rank, so ranks exchange nothing for a bound or a mean of them."""
    spec = rc.Spec(
        rc.Weight.product(normalize="group"), (rc.Criterion("abs", upper=rc.Quantile(0.6, within="group")),), "zero"
    )
    (train, rollout), groups, group = torch.randn(2, 6, 5), rc.Groups(size=2), Ranks(3)

    def of_rank(rank):
        batch, own = (
            rc.Batch(groups=groups, ranks=rc.Ranks(batch=Rank(rank=rank, ranks=3))),
            slice(2 * rank, 2 * rank + 2),
        )
        return rc.correct(train[own], rollout[own], batch, spec=spec).weights

    whole = rc.correct(train, rollout, rc.Batch(groups=groups), spec=spec)
    assert torch.cat(group.run(of_rank)).equal(whole.weights) and group.rounds == 0


@pytest.mark.parametrize("normalize", ["sequence", "batch"])
def test_groups_that_a_weight_does_not_divide_by_change_nothing(normalize):
    x, spec = torch.tensor([[0.1, 0.9], [0.5, -0.3], [0.2, 0.0]]), rc.Spec(rc.Weight.token(normalize=normalize))
    batch = rc.Batch(groups=rc.Groups(index=torch.tensor([0, 0, 1]), count=3))
    weights = [rc.correct(x, torch.zeros(3, 2), of, spec=spec).weights for of in (None, batch)]
    assert torch.equal(*weights)


def test_a_bound_inside_a_loss_decides_on_the_new_policy():
    """A decided bound has no gradient: the loss equals the one under a ready mask."""
    old, rollout, noise, advantages = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1)).double()
    new = (old + 0.1 * noise).requires_grad_()
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.9), of="new/rollout"),))
    fused = rc.policy_loss(new, advantages, old_logp=old, rollout_logp=rollout, spec=spec)
    good = kept(rc.Quantile(0.9), "upper", (new - rollout).abs().flatten().tolist())
    assert fused.mask.flatten().tolist() == good and 0 < sum(good) < 24
    plain = rc.policy_loss(new, advantages, old_logp=old, correction=rc.Factors(mask=fused.mask))
    slopes = [torch.autograd.grad(one.value, new)[0] for one in (fused, plain)]
    assert torch.equal(fused.value, plain.value) and torch.equal(*slopes)
