"""Turns in losses, as the runs of a mask, of nothing, and as offsets that nobody checked."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from rollout_corr.backends import whole
from rollout_corr.backends.batch import OpenBatch


@pytest.mark.parametrize("through", ["sequence", "token"])
def test_gspo_over_turns_is_gspo_whose_sequences_are_the_turns(through):
    """The sum over tokens knows sequences by the ratio alone."""
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.randn(3, 24, generator=generator)
    mask, turns = torch.arange(24) % 5 != 3, torch.tensor([0, 4, 4, 9, 17, 18, 24])
    found = []
    for over, batch in (
        ("turn", rc.Batch(mask=mask, cu_seqlens=torch.tensor([0, 9, 17, 24]), turns=turns)),
        ("sequence", rc.Batch(mask=mask, cu_seqlens=turns)),
    ):
        new = (old + 0.1 * noise).requires_grad_()
        out = rc.policy_loss(
            new, advantages, batch, rc.Loss(rc.GSPO(0.05, 0.1, through=through, over=over)), old_logp=old
        )
        found.append([out.value.item(), *torch.autograd.grad(out.value, new)[0].tolist()])
    assert found[0] == found[1]


def test_no_samples_have_no_ids():
    assert rc.correct([], [], rc.Batch(turns=[]), spec=rc.Spec(turns=True)).turns.tolist() == [0]


@pytest.mark.parametrize("wrong", [[0, 9, 3, 6], [5, 1], [-4, 2, 7], [3]])
def test_offsets_on_a_device_that_nobody_checked_break_nothing(wrong):
    """Wrong offsets of a device are not read, so they must not lead outside of memory."""
    logp = torch.zeros(6)
    batch = OpenBatch(logp, logp, None, torch.tensor([0, 4, 6]))
    batch.turns = torch.tensor(wrong).clamp(0, 6).cummax(0).values
    spec = rc.Spec(rc.Weight.geometric(over="turn"), (rc.Criterion("k3", "turn", "mean", upper=0.05),))
    found = whole.run_whole(batch, spec)
    assert found.weights.isfinite().all() and found.keep_turns.shape == (len(wrong) - 1,)


def test_a_masked_stretch_belongs_to_the_turn_before_it():
    batch = rc.Batch(mask=torch.tensor([0, 1, 1, 0, 1, 0, 1, 1]), cu_seqlens=torch.tensor([0, 6, 8]), turns="runs")
    out = rc.correct(torch.zeros(8), torch.zeros(8), batch)
    assert out.turns.tolist() == [0, 4, 6, 8] and out.metrics()["turns"] == 3
