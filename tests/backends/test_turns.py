"""Turns in every way to run: over ranks, under a compiler, in losses; and the errors of turns that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, spoil
from builders.calls import bundled_loss
from builders.kernel_cases import INTERPRETED, NARROW, WIDE, shaped
from builders.rounding import all_near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import lockstep
from builders.turns import offsets_of, random_turns
from rollout_corr.backends import whole
from rollout_corr.specs.encode import encode

pytestmark = INTERPRETED

TURN_SPECS = {
    "measure": rc.Spec(turns=True),
    "product": rc.Spec(rc.Weight.product(lower=0.8, upper=1.2, normalize="batch", over="turn"), rejected="both"),
    "unit": rc.Spec(
        rc.Weight.geometric(over="turn"),
        (
            rc.Criterion("k3", "turn", "mean", upper=0.05),
            rc.Criterion("ratio", "turn", "min", lower=0.5, drop="token", when="negative_advantage"),
            rc.Criterion("abs", "sequence", "max", upper=0.9, drop="token", when="positive_advantage"),
        ),
        rejected="both",
    ),
    "sequence": rc.Spec(
        criteria=(
            rc.Criterion("ratio", upper=1.6),
            rc.Criterion("ratio", "turn", "max", upper=1.4, drop="sequence", when="outward"),
            rc.Criterion("abs", "turn", "mean", upper=0.02, when="negative_advantage"),
        ),
        sums_over="kept",
    ),
}


@pytest.mark.parametrize("name", TURN_SPECS)
@pytest.mark.parametrize("way", ["zigzag", "ulysses", "last"])
def test_turns_split_over_ranks_give_the_bits_of_whole_ones(name, way):
    spec = TURN_SPECS[name]
    for seed, layout in enumerate(("packed", "padded_holes")):
        batch = spoil(random_sequences(seed, (5, 1, 7, 0, 4, 12)), seed)
        turns = random_turns(batch, seed)
        laid = lay_out(batch, "packed", torch.float32)
        out = laid.correct(spec, turns=offsets_of(laid, turns))
        kept = []
        found = lockstep(batch, spec, way, 3, torch.float32, layout, turns=turns, kept=kept)
        assert_same_results(found, outcome(laid, out))
        assert_same_statistics(found[3], out.statistics, rounds_means=True)
        assert kept == [out.keep_turns.tolist()] * 3


@pytest.mark.parametrize(
    ("name", "way", "layout", "shapes"),
    [("sequence", "ulysses", "packed", NARROW), ("unit", "last", "padded_holes", WIDE)],
)
def test_the_kernels_add_turns_up_over_ranks(name, way, layout, shapes, device):
    """The bits of the kernels on whole sequences, though a rank without a token of a turn cannot tell its sequence."""
    spec, batch = TURN_SPECS[name], spoil(random_sequences(3, (5, 1, 9, 0, 4, 12), advantages="sequence"), 3)
    batch = [replace(one, advantages=(-1.0) ** i) for i, one in enumerate(batch)]
    turns, kept = random_turns(batch, 3), []
    laid = lay_out(batch, layout, torch.float32).to(device)
    # One a sequence, in the only shape that no rank could take for those of its tokens.
    advantages = laid.advantages[:, None] if layout == "packed" else laid.advantages
    given = {"backend": "triton", "device": device, "turns": turns, "kept": kept, "advantages": advantages}
    with shaped(shapes):
        out = laid.correct(spec, turns=offsets_of(laid, turns).to(device), backend="triton")
        found = lockstep(batch, spec, way, 2, torch.float32, layout, **given)
    assert_same_results(found, outcome(laid, out))
    assert_same_statistics(found[3], out.statistics, rounds_means=True)
    assert kept == [out.keep_turns.tolist()] * 2


def test_a_compiled_function_corrects_by_turns():
    batch = random_sequences(1, (5, 1, 7, 4))
    laid = lay_out(batch, "packed", torch.float32)
    offsets, spec = offsets_of(laid, random_turns(batch, 1)), TURN_SPECS["unit"]

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
    torch.library.opcheck(torch.ops.rollout_corr.correct, (*operands, offsets, *encode(TURN_SPECS["unit"])))


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


def test_a_loss_corrects_by_turns_as_correct_does():
    for name, spec in TURN_SPECS.items():
        batch = random_sequences(5, (5, 1, 7, 4))
        laid = lay_out(batch, "packed", torch.float32)
        offsets = offsets_of(laid, random_turns(batch, 5))
        found, _ = loss_of(laid, spec, turns=offsets)
        out = laid.correct(spec, turns=offsets)
        assert found.mask.equal(out.mask) and found.keep_turns.equal(out.keep_turns), name
        assert (found.weights is None and out.weights is None) or found.weights.equal(out.weights), name
        assert out.metrics().items() <= found.metrics().items(), name
        assert torch.isfinite(found.value)


def test_no_samples_have_no_ids():
    assert rc.correct([], [], rc.Batch(turns=[]), spec=rc.Spec(turns=True)).turns.tolist() == [0]


def test_offsets_on_a_device_that_nobody_checked_break_nothing():
    """Wrong offsets of a device are not read, so they must not lead outside of memory."""
    from rollout_corr.backends.batch import OpenBatch

    for wrong in ([0, 9, 3, 6], [5, 1], [-4, 2, 7], [3]):
        logp = torch.zeros(6)
        batch = OpenBatch(logp, logp, None, torch.tensor([0, 4, 6]), 2, lambda x: x, None)
        batch.turns = torch.tensor(wrong).clamp(0, 6).cummax(0).values
        found = whole.run_whole(batch, TURN_SPECS["product"])
        assert found.weights.isfinite().all() and found.keep_turns.shape == (len(wrong) - 1,)


def test_a_masked_stretch_belongs_to_the_turn_before_it():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1])
    out = rc.correct(
        torch.zeros(8), torch.zeros(8), rc.Batch(mask=mask, cu_seqlens=torch.tensor([0, 6, 8]), turns="runs")
    )
    assert out.turns.tolist() == [0, 4, 6, 8] and out.metrics()["turns"] == 3
