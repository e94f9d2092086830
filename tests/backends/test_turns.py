"""Turns under a compiler and in losses, and offsets that nobody checked; over ranks: test_random_calls.py."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.calls import bundled_loss
from builders.kernel_cases import INTERPRETED
from builders.rounding import all_near
from builders.turns import offsets_of, random_turns
from rollout_corr.backends import whole
from rollout_corr.specs.encode import encode

pytestmark = INTERPRETED

SPEC = rc.Spec(
    rc.Weight.geometric(over="turn"),
    (
        rc.Criterion("k3", "turn", "mean", upper=0.05),
        rc.Criterion("ratio", "turn", "min", lower=0.5, drop="token", when="negative_advantage"),
        rc.Criterion("abs", "sequence", "max", upper=0.9, drop="token", when="positive_advantage"),
    ),
    rejected="both",
)


def test_a_compiled_function_corrects_by_turns():
    batch = random_sequences(1, (5, 1, 7, 4))
    laid = lay_out(batch, "packed", torch.float32)
    offsets, spec = offsets_of(laid, random_turns(batch, 1)), SPEC

    @torch.compile(backend="eager", fullgraph=True)
    def step(train, rollout, mask, advantages, turns):
        out = rc.correct(
            train,
            rollout,
            rc.Batch(mask=mask, cu_seqlens=laid.cu_seqlens, turns=turns),
            advantages=advantages,
            spec=spec,
        )
        return out.weights, out.mask, out.keep_turns, out.statistics.sums

    found = step(laid.train, laid.rollout, laid.mask, laid.advantages, offsets)
    wanted = laid.correct(spec, turns=offsets)
    assert found[0].equal(wanted.weights) and found[1].equal(wanted.mask) and found[2].equal(wanted.keep_turns)
    assert all_near(found[3], wanted.statistics.sums, torch.float32)


def test_the_operator_keeps_its_promises_with_turns():
    batch = random_sequences(1, (5, 1, 7, 4))
    laid = lay_out(batch, "packed", torch.float32)
    operands = laid.train, laid.rollout, laid.mask, laid.cu_seqlens, laid.advantages, False, [], None, None, False
    offsets = offsets_of(laid, random_turns(batch, 1))
    torch.library.opcheck(torch.ops.rollout_corr.correct, (*operands, offsets, *encode(SPEC)))


# --- losses ---


def loss_of(laid, spec=None, **more):
    new = torch.randn(laid.train.shape, generator=torch.Generator().manual_seed(0)) * 0.1 - 1.0
    new = new.requires_grad_()
    given = {"old_logp": laid.train, "rollout_logp": laid.rollout, "cu_seqlens": laid.cu_seqlens} | more
    found = rc.policy_loss(new, laid.advantages, **bundled_loss(mask=laid.mask, spec=spec, **given))
    found.value.backward()
    return found, new.grad


@pytest.mark.parametrize("surrogate", [rc.GSPO(0.05, 0.1), rc.GSPO(0.05, 0.1, through="token")])
def test_gspo_over_turns_is_gspo_whose_sequences_are_the_turns(surrogate):
    """The sum over tokens knows sequences by the ratio alone."""
    for seed in range(4):
        batch = random_sequences(seed, (5, 1, 7, 0, 4, 12))
        laid = lay_out(batch, "packed", torch.float32)
        offsets = offsets_of(laid, random_turns(batch, seed))
        over = rc.GSPO(0.05, 0.1, through=surrogate.through, over="turn")
        one, slope = loss_of(laid, surrogate=over, turns=offsets)
        other, wanted = loss_of(laid, surrogate=surrogate, cu_seqlens=offsets)
        assert one.value.equal(other.value) and slope.equal(wanted)


def test_no_samples_have_no_ids():
    assert rc.correct([], [], rc.Batch(turns=[]), spec=rc.Spec(turns=True)).turns.tolist() == [0]


def test_offsets_on_a_device_that_nobody_checked_break_nothing():
    """Wrong offsets of a device are not read, so they must not lead outside of memory."""
    from rollout_corr.backends.batch import OpenBatch

    for wrong in ([0, 9, 3, 6], [5, 1], [-4, 2, 7], [3]):
        logp = torch.zeros(6)
        batch = OpenBatch(logp, logp, None, torch.tensor([0, 4, 6]))
        batch.turns = torch.tensor(wrong).clamp(0, 6).cummax(0).values
        found = whole.run_whole(batch, SPEC)
        assert found.weights.isfinite().all() and found.keep_turns.shape == (len(wrong) - 1,)


def test_a_masked_stretch_belongs_to_the_turn_before_it():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1])
    out = rc.correct(
        torch.zeros(8), torch.zeros(8), rc.Batch(mask=mask, cu_seqlens=torch.tensor([0, 6, 8]), turns="runs")
    )
    assert out.turns.tolist() == [0, 4, 6, 8] and out.metrics()["turns"] == 3
