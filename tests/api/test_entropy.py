"""Entropies and other values of the caller that are not finite, and the statistics of the two calls of a batch.

Random calls judge the criteria and the bonus: tests/definition/test_random_calls.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.rounding import near
from rollout_corr.specs.choices import REDUCTIONS

pytestmark = INTERPRETED

NAN, INF = math.nan, math.inf
UNITS = [("token", None), *(("sequence", name) for name in REDUCTIONS), ("turn", "sum")]


def judged(values, backend, stat, over, reduce, **bounds):
    """The mask of padded rows, and the mean, deviation and ends of a criterion of these values."""
    x, name = torch.zeros_like(values), None if stat == "entropy" else "own"
    given = {"entropy": values} if stat == "entropy" else {"external": {"own": values}}
    batch = rc.Batch(mask=torch.ones_like(values), turns="runs" if over == "turn" else None, **given)
    spec = rc.Spec(criteria=(rc.Criterion(stat, over, reduce, name=name, label="it", **bounds),))
    out = rc.correct(x, x, batch, spec=spec, backend=backend)
    return out.mask.tolist(), [out.metrics()[f"it/{key}"] for key in ("mean", "std", "min", "max")]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("over", "reduce"), UNITS)
def test_values_that_are_not_finite(over, reduce, backend, device):
    """An entropy of them passes no bound. In metrics they have no part, and the extremes of none are 0."""
    each = 2.0 if reduce == "sum" else 1.0
    entropy = torch.tensor([[1.0, 1.0], [NAN, 1.0], [INF, 1.0], [-INF, 1.0]], device=device)
    for bound in ({"lower": 0.0}, {"upper": 9.0}):
        mask, found = judged(entropy, backend, "entropy", over, reduce, **bound)
        assert mask == [[1.0, 1.0], *[[0.0, float(over == "token")]] * 3], bound
        assert found == [each, 0.0, each, each], bound
    own = torch.tensor([[1.0, 1.0], [NAN, 1.0], [NAN, NAN]], device=device)
    assert judged(own, backend, "external", over, reduce, upper=9.0)[1] == [each, 0.0, each, each]
    assert judged(own[2:], backend, "external", over, reduce, upper=9.0)[1] == [0.0] * 4


def test_a_correction_and_a_loss_of_one_batch_join():
    """Both count the entropy of the Batch, and it is reported once, before ages and bounds."""
    train, rollout, entropy = (torch.linspace(-2.0, -0.1, 12).view(3, 4) * factor for factor in (1.0, 1.1, -1.0))
    spec = rc.Spec(rc.Weight.token(upper=rc.Quantile(0.8), normalize="sequence"))
    for versions, is_held in itertools.product((None, rc.Versions(torch.arange(3), 4)), (True, False)):
        batch = rc.Batch(entropy=entropy, versions=versions)
        loss = rc.policy_loss(train, train, batch, old_logp=train)
        found = rc.correct(train, rollout, batch if is_held else replace(batch, entropy=None), spec=spec)
        joined = found.statistics.join(loss.statistics).metrics()
        assert joined.items() >= (found.metrics() | loss.metrics()).items()


@pytest.mark.parametrize(("nonfinite", "slopes"), [("reject", [0.0, -0.1, -0.1]), ("propagate", [-0.1] * 3)])
def test_a_token_that_cannot_train_has_no_bonus_unless_its_nan_passes(nonfinite, slopes):
    new, logp, entropy = (
        torch.tensor([[NAN, -1.0, -2.0]]),
        torch.full((1, 3), -1.0),
        torch.ones(1, 3, requires_grad=True),
    )
    loss, spec = rc.Loss(entropy_bonus=rc.EntropyBonus(0.3)), rc.Spec(nonfinite=nonfinite)
    given = {"old_logp": logp, "rollout_logp": logp, "spec": spec}
    rc.policy_loss(new, torch.ones(1), rc.Batch(entropy=entropy), loss, **given).value.backward()
    assert entropy.grad[0].tolist() == near(slopes, torch.float32)
