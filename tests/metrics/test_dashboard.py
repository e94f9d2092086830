"""`metrics("dashboard")`: the few metrics that the docs tell to look at."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from rollout_corr.metrics import loss as of_loss
from rollout_corr.metrics.native import DASHBOARD
from rollout_corr.testing import example_batch

BATCH = example_batch(sequences=6)
GIVEN = {"mask": BATCH.mask, "cu_seqlens": BATCH.cu_seqlens}
WEIGHTED = rc.Spec(rc.Weight.token(upper=1.01), report=("native", "verl"))


def corrected(spec=WEIGHTED):
    return rc.correct(BATCH.train_logp, BATCH.rollout_logp, **GIVEN, spec=spec)


def lost(kl=None, **more):
    given = {**GIVEN, "loss": rc.Loss(kl=kl), "old_logp": BATCH.rollout_logp, **more}
    return rc.policy_loss(BATCH.train_logp, torch.ones_like(BATCH.train_logp), **given)


def test_the_ten_of_a_correction_in_their_order():
    out = corrected()
    every = out.metrics()
    wanted = {key: every[key] for key in DASHBOARD}
    assert len(wanted) == 10
    for source in (out, out.statistics, out.statistics + out.statistics):
        assert list(source.metrics("dashboard")) == list(wanted)
    assert out.metrics("dashboard") == out.metrics_async().result("dashboard") == wanted
    assert out.metrics("dashboard", prefix="x/") == {f"x/{key}": value for key, value in wanted.items()}


def test_what_a_spec_does_not_have_is_absent():
    assert list(corrected(rc.Spec()).metrics("dashboard")) == [key for key in DASHBOARD if key != "weight_ess"]


def test_a_loss_has_a_few_of_its_own():
    own = lost().metrics("dashboard")
    assert list(own) == list(of_loss.DASHBOARD)
    spec = rc.Spec(rc.Weight.token(upper=1.01))
    both = lost(rollout_logp=BATCH.rollout_logp, spec=spec, kl=rc.KL("k3", 0.1), ref_logp=BATCH.rollout_logp)
    assert list(both.metrics("dashboard")) == [*DASHBOARD, *of_loss.DASHBOARD, "kl_new_ref_k3"]
    assert both.metrics("dashboard").items() <= both.metrics().items()


@pytest.mark.parametrize("units", ["sequences", "tokens"])
def test_of_labels(units):
    many = BATCH.cu_seqlens.numel() - 1 if units == "sequences" else BATCH.train_logp.numel()
    batch = rc.Batch(**GIVEN, labels={"kind": rc.Labels(torch.arange(many) % 2, ("a", "b"))})
    out = rc.correct(BATCH.train_logp, BATCH.rollout_logp, batch, spec=WEIGHTED)
    every, found = out.metrics(by="kind"), out.metrics("dashboard", by="kind")
    assert found == {key: every[key] for key in found}
    expected = [f"kind/{name}/{key}" for name in "ab" for key in DASHBOARD if f"kind/{name}/{key}" in every]
    assert list(found) == expected and len(found) == 2 * (10 if units == "sequences" else 8)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"names: expected 'dashboard' or one of \['native', 'verl'\] .*'dashbord'"):
        corrected().metrics("dashbord")
    with pytest.raises(TypeError, match="prefix: expected a string such as 'mismatch/', got int 3"):
        corrected().metrics(prefix=3)


@pytest.mark.parametrize(
    ("kind", "swapped", "key"),
    [("k1", False, "kl_new_ref_k1"), ("k3", False, "kl_new_ref_k3"), ("k2", True, "kl_ref_new_k2")],
)
def test_the_key_of_a_kl_names_its_direction(kind, swapped, key):
    """By its formula: k1 of samples of the first policy is the log of its probability over the second's."""
    ref = BATCH.train_logp - 0.25
    found = lost(kl=rc.KL(kind, 0.1, swapped=swapped), ref_logp=ref).metrics()
    k = -0.25 if swapped else 0.25
    wanted = {"k1": k, "k2": k * k / 2, "k3": torch.tensor(-k).expm1().item() + k}[kind]
    assert found[key] == near(wanted, torch.float32)
    assert sum("ref" in one for one in found) == 1
