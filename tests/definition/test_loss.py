"""Losses that random calls do not meet. test_random_calls.py judges all others by loops."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.rounding import FORMULA, assert_near, near

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_kl_over_micro_batches_has_a_call_of_its_own():
    """Its own mean is counted in each call, so the means of micro-batches are not parts of that of the batch."""
    torch.manual_seed(0)
    new, old, ref = (-torch.rand(6, 20, dtype=torch.float64) for _ in range(3))
    advantages, mask = torch.randn(6, 20, dtype=torch.float64), torch.rand(6, 20) < 0.8

    def sum_of_gradients(size, *calls):
        leaf = new.clone().requires_grad_()
        for rows in torch.arange(6).split(size):
            for factor, options in calls:
                given = {"mask": mask[rows], "old_logp": old[rows], "ref_logp": ref[rows], **options}
                rc.policy_loss(leaf[rows], factor * advantages[rows], **bundled_loss(**given)).value.backward()
        return leaf.grad

    by_rows = {"mean": rc.Mean("sequence", over="rows")}
    wanted = sum_of_gradients(6, (1.0, {"kl": rc.KL("k3", 0.3, **by_rows)}))
    apart = (1.0, {"kl": rc.KL("k3", 0.0), "total": mask.sum()})
    penalty = (0.0, {"kl": rc.KL("k3", 0.3), "mean": rc.Mean("sequence"), "total": 6})
    assert_near(sum_of_gradients(2, apart, penalty), wanted)
    inside = (1.0, {"kl": rc.KL("k3", 0.3, **by_rows), "total": mask.sum()})
    assert (sum_of_gradients(2, inside) - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_tiny_steps_do_not_cancel():
    """After one small step k3 is 1e-9, far below the rounding of e^D: in the metric, the KL's value and its slope."""
    new = (-torch.rand(1, 64, generator=torch.Generator().manual_seed(0)) - 0.5).requires_grad_()
    ref = new.detach() + 2.0**-15
    k = (new.detach() - ref).double()
    term = rc.KL("k3", 1.0)
    out = rc.policy_loss(new, torch.zeros(1), loss=rc.Loss(mean=rc.Mean("sum"), kl=term), old_logp=ref, ref_logp=ref)
    assert_near(out.value.double(), (torch.expm1(-k) + k).sum(), torch.float32, FORMULA)
    slope = torch.autograd.grad(out.value, new)[0].double()
    assert_near(slope, -torch.expm1(-k), torch.float32, FORMULA)
    wanted = (torch.expm1(k) - k).mean().item()
    assert out.metrics()["kl_old_new_k3"] == near(wanted, torch.float32, size=0.0)


@pytest.mark.parametrize("name", rc.spec_names())
def test_every_preset_runs_in_the_loss(name):
    """Those that need the policy being trained run here alone."""
    spec = rc.spec(name)
    generator = torch.Generator().manual_seed(0)
    new, old, rollout = (-torch.rand(3, 6, generator=generator) for _ in range(3))
    options = {"old_logp": old, "rollout_logp": rollout, "spec": spec}
    if spec.reads_versions:
        options |= {"versions": torch.tensor([3, 6, 7]), "current_version": 7}
    if spec.measures_turns:
        options["turns"] = "runs"
    out = rc.policy_loss(new.requires_grad_(), torch.tensor([1.0, -1.0, 0.5]), **bundled_loss(**options))
    out.value.backward()
    assert out.value.isfinite() and new.grad.isfinite().all()
    assert all(f"{criterion.label}/mean" in out.metrics() for criterion in spec.criteria)
    of_new = [criterion for criterion in spec.criteria if criterion.of != "train/rollout"]
    if of_new:
        with pytest.raises(ValueError, match=rf"^spec: criterion '{of_new[0].label}' compares {of_new[0].of}"):
            rc.correct(old, rollout, spec=spec)
