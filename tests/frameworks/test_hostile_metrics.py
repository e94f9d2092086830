"""No metric of any scheme raises on the host, whatever the log-probs hold: a training step would end there."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.frameworks.skyrl import dropin as skyrl
from rollout_corr.metrics.peers import SCHEMES
from rollout_corr.specs.choices import NONFINITE

VALUES = (-9999.0, 9999.0, 700.0, -400.0, math.inf, -math.inf, math.nan, 0.0)
WEIGHTS = (None, rc.Weight.token(upper=2.0), rc.Weight.product(upper=2.0), rc.Weight.geometric())


def batches():
    """A row of one value on the one side, on the other, and on both; and one of them masked."""
    mild = torch.tensor([-0.5, -0.4, -0.3], dtype=torch.float64)
    for x in VALUES:
        rows_of_x = torch.full((3,), x, dtype=torch.float64)
        train, rollout = torch.stack([mild, rows_of_x, rows_of_x]), torch.stack([rows_of_x, mild, rows_of_x])
        yield train, rollout, torch.ones(3, 3)
        yield train[:1], rollout[:1], torch.zeros(1, 3)


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.kind if weight else "none")
def test_no_scheme_raises(weight, nonfinite):
    criteria = (rc.Criterion("ratio", lower=0.5, upper=2.0), rc.Criterion("k3", upper=0.5))
    reports = ("native", *SCHEMES)
    spec = rc.Spec(weight, criteria, nonfinite=nonfinite, clamp=40.0, detail="full", report=reports)
    for given in batches():
        out = rc.correct(*given[:2], mask=given[2], spec=spec)
        for scheme in reports:
            assert all(isinstance(value, float) for value in out.metrics(scheme).values())


def test_skyrl_gives_what_skyrl_gives():
    """SkyRL clamps log-ratios to +-20 on either side, whichever row it is."""
    mild = torch.full((1, 4), -1.0)
    config = SimpleNamespace(tis_ratio_type="token", token_tis_ratio_clip_high=2.0)
    for train, rollout, expected in ((mild, mild - 9999.0, 20.0), (mild - 9999.0, mild, -20.0)):
        _, metrics, _ = skyrl.compute_off_policy_correction(train, rollout, torch.ones(1, 4), config)
        for name in ("is_ratio_min", "is_ratio_max"):
            assert math.log(metrics[name]) == near(expected, torch.float32)


def test_a_loss_of_any_ratio_has_metrics():
    for new, old in itertools.product(VALUES, repeat=2):
        given = torch.full((1, 3), new, dtype=torch.float64, requires_grad=True), torch.ones(1, 3)
        out = rc.policy_loss(
            *given, loss=rc.Loss(rc.PPO(0.2, 0.2)), old_logp=torch.full((1, 3), old, dtype=torch.float64)
        )
        assert all(isinstance(value, float) for value in out.metrics().values())
