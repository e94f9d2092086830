"""The drop-in for SkyRL: shapes, dtypes, what it says. tests/conformance compares its results with SkyRL's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.frameworks.skyrl import dropin

TIS = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1}
GEOMETRIC = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.04}
OUTLIERS = {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.6}
TOKENS = {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25}
EVERYTHING = GEOMETRIC | OUTLIERS | TOKENS | {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2}


def configuration(**fields):
    assert set(fields) <= set(dropin.FIELDS)
    return SimpleNamespace(**dropin.FIELDS | fields)


def batch(seed=0, dtype=torch.float32, mask_dtype=torch.float32):
    """Right-aligned rows with holes, one of them empty."""
    made = torch.Generator().manual_seed(seed)
    rollout = torch.rand(6, 12, generator=made, dtype=torch.float64).log()
    old = rollout + 0.2 * torch.randn(6, 12, generator=made, dtype=torch.float64)
    mask = torch.arange(12) >= torch.randint(0, 8, (6, 1), generator=made)
    mask &= torch.rand(6, 12, generator=made) < 0.9
    mask[2] = False
    return old.to(dtype), rollout.to(dtype), mask.to(mask_dtype)


def test_loss():
    """The loss times the weight, which is a constant; gradients flow through the loss alone. The settings stay."""
    given, config = batch(), configuration(**EVERYTHING)
    settings = dict(vars(config))
    old = given[0].requires_grad_()
    loss = torch.randn(6, 12, requires_grad=True)
    weights, expected, kept = dropin.compute_off_policy_correction(*given, config)
    found, mask, metrics = dropin.apply_off_policy_correction(loss, *given, config)
    assert torch.equal(found, loss * weights) and torch.equal(mask, kept) and metrics == expected
    assert vars(config) == settings
    found.sum().backward()
    assert torch.equal(loss.grad, weights.expand(6, 12)) and old.grad is None
    assert dropin.apply_off_policy_correction(loss, old, None, given[2], config) == (loss, given[2], {})


def test_cap_below_one():
    """A row without a valid token has the ratio 1, and so the cap."""
    config = configuration(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=0.9)
    assert dropin.compute_off_policy_correction(*batch(), config)[0][2].item() == pytest.approx(0.9)


def test_padding():
    """With "skip", spread and minimum are of the valid tokens, and rows without one count in nothing."""
    given, config = batch(dtype=torch.float64), configuration(**TIS | GEOMETRIC | OUTLIERS)
    metrics = dropin.compute_off_policy_correction(*given, config, padding="skip")[1]
    ratio = (given[0] - given[1])[given[2] != 0].exp()
    assert metrics["is_ratio_std"] == near(float(ratio.std()))
    assert metrics["is_ratio_min"] == near(float(ratio.min()))
    rows = [x[[0, 1, 3, 4, 5]] for x in given]
    without = dropin.compute_off_policy_correction(*rows, config)[1]
    shares = [key for key in metrics if key.startswith(("outlier", "geo"))]
    assert {key: metrics[key] for key in shares} == pytest.approx({key: without[key] for key in shares})
    assert dropin.compute_off_policy_correction(*given, config)[1]["is_ratio_min"] == 0.0


def test_a_spec_with_a_product_keeps_its_zeros():
    """SkyRL's own product is one value a row; a rejected row of a Spec that zeroes weights is not 1 there."""
    old, rollout, mask = batch(0, torch.float64)
    far = rc.Criterion("abs", over="sequence", reduce="mean", upper=0.15)
    spec = rc.Spec(weight=rc.Weight.product(upper=1.2), criteria=(far,), rejected="zero")
    out = rc.correct(old, rollout, mask=mask, spec=spec)
    weights, _, kept = dropin.compute_off_policy_correction(old, rollout, mask, configuration(), spec=spec)
    assert not out.keep.all() and out.weights.any()
    assert torch.equal(weights, out.weights) and torch.equal(kept, mask)


def test_a_spec_needs_the_log_probs_of_the_engine(caplog, monkeypatch):
    """A batch without them is not corrected by a Spec either, which is said."""
    monkeypatch.setitem(sys.modules, "skyrl", ModuleType("skyrl"))
    old, _, mask = batch()
    try:
        dropin.install(spec=rc.spec("skyrl.tldr"))
        dropin.apply_off_policy_correction(mask, old, None, mask, configuration())
        assert dropin.installed().active is False
    finally:
        dropin.uninstall()
    (said,) = (said for said in caplog.messages if "correction active" in said)
    assert "active: no, your Spec is not used: the batch has no rollout_logprobs: set generator.sampling_params" in said
