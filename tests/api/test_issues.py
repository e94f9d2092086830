"""Bugs that users reported to the frameworks, each as a test that carries the thread's number.

Others are properties of any batch, which tests/definition/test_invariance.py holds: empty rows (verl#7771), everything
rejected (verl#3984), nothing valid (verl#5859), NaN behind the mask (verl#6349, swift#9767), how many micro-batches
there are (verl#7913, Megatron#5420), tokens of -200 nats (prime-rl#2085, OpenRLHF#1335), a product that underflows
(trl#7120), NaN at a valid token (trl#6693), percentiles of many tokens (verl#3787). Sequences and batches of any
size (Liger#1294, fla#1077, fla#1082) are in tests/lab/ptx/far.py; here the counters pass 2^31.
"""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc


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
    spec, rollout = rc.Spec(detail="full"), torch.full((1, 3), -1.0)
    total = rc.correct(torch.tensor([[-1.25, -1.0, -1.0]]), rollout, spec=spec).statistics
    for _ in range(40):
        total = total.merge(total)
    one = rc.correct(rollout[:, :1], rollout[:, :1], spec=spec).statistics
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
