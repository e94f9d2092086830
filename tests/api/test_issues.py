"""Bugs that users reported to the frameworks, each as a test that carries the thread's number.

Others are properties of any batch, which tests/definition/test_invariance.py holds: empty rows (verl#7771), everything
rejected (verl#3984), nothing valid (verl#5859), NaN behind the mask (verl#6349, swift#9767), how many micro-batches
there are (verl#7913, Megatron#5420), tokens of -200 nats (prime-rl#2085, OpenRLHF#1335), a product that underflows
(trl#7120), NaN at a valid token (trl#6693), percentiles of many tokens (verl#3787). Sequences and batches of any
size (Liger#1294, fla#1077, fla#1082) are in tests/lab/ptx/far.py; here the counters pass 2^31.
"""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc

NAN, INF = math.nan, math.inf


def rows(train, rollout, mask=None, spec=rc.Spec(), **others):  # noqa: B008  (frozen)
    """`correct` on a padded batch given as lists."""
    mask = None if mask is None else torch.tensor(mask)
    return rc.correct(torch.tensor(train), torch.tensor(rollout), mask=mask, spec=spec, **others)


def test_nemo_3753_a_column_does_not_broadcast():
    """[B, 1] times [B] became [B, B]: a metric B times too large. A column of advantages is one value a sequence."""
    train, rollout = torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]), torch.full((2, 2), -2.0)
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=0.5, when="negative_advantage"),))
    column = rc.correct(train, rollout, spec=spec, advantages=torch.tensor([[1.0], [-1.0]]))
    flat = rc.correct(train, rollout, spec=spec, advantages=torch.tensor([1.0, -1.0]))
    assert column.mask.tolist() == flat.mask.tolist() == [[True, True], [False, False]]
    assert column.metrics() == flat.metrics()
    assert column.metrics()["logratio_abs_mean"] == 1.0
    for mask in (torch.ones(2, 1), torch.ones(2)):
        with pytest.raises(ValueError, match=r"^mask: expected shape \[2, 2\]"):
            rc.correct(train, rollout, mask=mask)


def test_fla_1082_counters_pass_2_to_the_31():
    """Merged 40 times with itself: a counter of int32 would have gone round, one of fp32 stood still."""
    total = rows([[-1.25, -1.0, -1.0]], [[-1.0, -1.0, -1.0]], spec=rc.Spec(detail="full")).statistics
    for _ in range(40):
        total = total.merge(total)
    one = rows([[-1.0]], [[-1.0]], spec=rc.Spec(detail="full")).statistics
    assert total.merge(one).metrics()["tokens"] == 3 * 2**40 + 1
    assert total.metrics()["logratio_mean"] == pytest.approx(-0.25 / 3)


def test_verl_4105_weights_carry_no_gradient():
    train = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -1.5]], requires_grad=True)
    spec = rc.Spec(rc.Weight.token(normalize="batch"), (rc.Criterion("k1", upper=5.0),), "both", detail="full")
    mask = torch.ones(1, 2)
    out = rc.correct(train, rollout, mask=mask, spec=spec, advantages=torch.ones(1, 2, requires_grad=True))
    for tensor in (out.weights, out.mask, out.keep, out.statistics.sums, out.statistics.maxima):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
    assert train.grad is rollout.grad is None


def test_a_lone_sample_has_an_advantage_of_its_own_size_or_none():
    """Its standard deviation of 0 made a reward of 1 an advantage of a million."""
    rewards, keep, index = torch.tensor([1.0, 5.0]), torch.tensor([True, False]), torch.tensor([0, 0])
    for alone, wanted in (({}, 0.0), ({"alone": "reward"}, 1.0)):
        groups = rc.filter_groups(rewards, keep, index, **alone)
        assert (groups.centered / (groups.std + 1e-6))[0].item() == pytest.approx(wanted, abs=1e-5)


def test_verl_6310_keep_of_a_batch_feeds_the_groups():
    """Empty responses keep True and count in nothing; the `keep` of `correct` is what `filter_groups` takes."""
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="sequence", reduce="max", upper=1.0),))
    out = rows([[-1.0], [-9.0], [NAN]], [[-1.0]] * 3, [[1], [1], [0]], spec)
    assert out.keep.tolist() == [True, False, True]
    groups = rc.filter_groups(torch.tensor([1.0, 100.0, 3.0]), out.keep, torch.tensor([0, 0, 0], dtype=torch.int32))
    assert groups.centered.tolist() == [-1.0, 0.0, 1.0]
    nothing = rc.filter_groups(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert [x.shape[0] for x in nothing] == [0] * 4
    nobody = rc.filter_groups(torch.tensor([NAN, 5.0]), torch.tensor([False, False]), torch.tensor([1, 1]))
    assert [x.tolist() for x in nobody] == [[0.0, 0.0]] * 4
