"""`proximal` against plain loops: both interpolations, its gradient, every layout, and the errors."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out, random_sequences
from builders.rounding import near

pytestmark = pytest.mark.usefixtures("one_thread")


def between(new, rollout, version, current, linear):
    """The value at a token and its derivative by `new`, from the formulas of AReaL's documentation."""
    if version < 0 or version >= current:
        return rollout, 0.0
    alpha = ((current - 1) - version) / (current - version)
    if not linear:
        return rollout + alpha * (new - rollout), alpha
    p = (1 - alpha) * math.exp(rollout) + alpha * math.exp(new)
    return math.log(p), alpha * math.exp(new) / p


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradient(layout, linear):
    sequences = random_sequences(12, (5, 1, 7, 0, 4, 6, 9))
    laid = lay_out(sequences, layout)
    rows = laid.train if isinstance(laid.train, list) else [laid.train]
    rows = [row.detach().requires_grad_() for row in rows]
    new = rows if isinstance(laid.train, list) else rows[0]
    name = "linear" if linear else "loglinear"
    found = rc.proximal(
        new,
        laid.rollout,
        rc.Batch(cu_seqlens=laid.cu_seqlens, versions=rc.Versions(laid.versions, 7)),
        interpolation=name,
    )
    values = laid.read([x.detach() for x in found] if isinstance(found, list) else found.detach())
    total = sum(x.sum() for x in found) if isinstance(found, list) else found.sum()
    total.backward()
    slopes = laid.read([row.grad for row in rows] if isinstance(found, list) else rows[0].grad)
    ages = set()
    for s, q in enumerate(sequences):
        for t in [t for t, m in enumerate(q.mask) if m]:
            value, slope = between(q.train[t], q.rollout[t], q.versions[t], 7, linear)
            ages.add(7 - q.versions[t])
            assert values[s][t] == near(value)
            assert slopes[s][t] == near(slope)
    assert ages == {0, 1, 3, 4, 7}, "the batch has other versions"


def test_nothing_of_the_new_policy_where_alpha_is_0():
    new = torch.full((3,), math.nan, requires_grad=True)
    rollout = torch.tensor([-1.0, -2.0, -3.0])
    for name in ("loglinear", "linear"):
        found = rc.proximal(
            new,
            rollout,
            rc.Batch(cu_seqlens=torch.tensor([0, 3]), versions=rc.Versions(torch.tensor([4, 5, -1]), 5)),
            interpolation=name,
        )
        (slope,) = torch.autograd.grad(found.sum(), new)
        assert found.tolist() == rollout.tolist() and slope.tolist() == [0.0, 0.0, 0.0]


def test_versions_of_sequences_and_dtypes():
    new, rollout = -torch.rand(2, 3), -torch.rand(2, 3)
    each = rc.proximal(new, rollout, rc.Batch(versions=rc.Versions(torch.tensor([[1, 1, 1], [3, 3, 3]]), 5)))
    assert torch.equal(
        rc.proximal(new, rollout, rc.Batch(versions=rc.Versions(torch.tensor([1, 3], dtype=torch.uint8), 5))), each
    )
    packed = rc.Batch(cu_seqlens=torch.tensor([0, 3, 6]), versions=rc.Versions(torch.tensor([1, 3]), 5))
    flat = rc.proximal(new.view(-1), rollout.view(-1), packed)
    assert torch.equal(flat.view(2, 3), each)
    assert (
        rc.proximal(new.bfloat16(), rollout.bfloat16(), rc.Batch(versions=rc.Versions(torch.tensor([1, 3]), 5))).dtype
        == torch.float32
    )
