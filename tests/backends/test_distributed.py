"""Several ranks in real processes, over gloo: random calls, both groups, groups that are gone, ranks that stay away."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders import parts
from builders import work_of_ranks as work
from builders.rounding import assert_near, near
from builders.work_of_ranks import AWAY, BOUND, RANKS, STEPS, TIMEOUT
from frozen.runners import one_thread


def test_random_calls_are_those_of_one_process(on_ranks):
    """Of threads in place of processes test_random_calls.py has many more."""
    ended = on_ranks(work.random_calls, RANKS)
    assert [one.error for one in ended] == [""] * RANKS
    corrections, losses, reduced = (
        list(zip(*part, strict=True)) for part in zip(*[one.value for one in ended], strict=True)
    )
    with one_thread():
        for together, found, metrics in zip(work.CORRECTIONS, corrections, reduced, strict=True):
            parts.assert_one_correction(together, list(found), parts.corrected(together.call()))
            merged = near(rc.Statistics.sum(statistics for *_, statistics in found).metrics())
            assert all(of_rank == merged for of_rank in metrics), str(together)
        for together, found in zip(work.LOSSES, losses, strict=True):
            parts.assert_one_loss(together, list(found), parts.lost(together.call()))


def test_a_batch_mean_over_sequences_of_a_rank_alone(on_ranks):
    logp = torch.linspace(-2.0, -0.1, 24).view(4, 6)
    whole = rc.correct(logp, logp.flip(1), spec=rc.Spec(rc.Weight.product(normalize="batch")))
    weights = torch.cat([one.value for one in on_ranks(work.a_mean_of_both_groups, 2)])
    assert_near(weights, whole.weights, torch.float32, size=0.0)


def test_what_ranks_of_both_groups_know_counts_once(on_ranks):
    old, new = torch.linspace(-2.0, -0.1, 48).view(2, 4, 6)
    whole = rc.policy_loss(new, torch.ones(4), old_logp=old).value.item()
    assert sum(one.value for one in on_ranks(work.loss_of_one_group, 2)) == near(whole, torch.float32)


def test_the_batch_group_hears_of_a_difference_among_ranks_that_share_sequences(on_ranks):
    found = on_ranks(work.both_groups, 4)
    for one in found[:2]:
        assert re.match(r"ValueError: ranks\.batch: rank 2 raised ValueError: ranks\.sequence: .* rank 3 ", one.error)
    for one in found[2:]:
        assert one.error.startswith("ValueError: ranks.sequence: expected the same call on every rank, got Spec.weight")
        assert "upper 3.0 on rank 3 against 2.0 on rank 2" in one.error


def test_groups_that_are_gone_or_of_others(on_ranks):
    found = on_ranks(work.groups_gone, 2)[1].value
    for name, errors in (("ranks.sequence", found[:2]), ("group", found[2:])):
        assert errors == [
            f"ValueError: {name}: expected an initialized process group, got one that has been destroyed",
            f"TypeError: {name}: expected a torch.distributed process group or None, got a group that this rank does "
            "not belong to; only its members may call",
        ]


def test_tensors_on_a_device_that_the_group_does_not_carry(on_ranks):
    for one in on_ranks(work.elsewhere, 2):
        assert one.error == (
            "ValueError: correct: the sums of each sequence cannot be sent from cpu: expected tensors on cuda, for "
            "which the group has backends (cuda:gloo)"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("away", "at"), [*zip(AWAY, (0, 1, 2, 3, 0), strict=True)])
def test_a_rank_that_stays_away_is_named(on_ranks, away, at):
    found = on_ranks(work.step, 3, away, 1, at, timeout=TIMEOUT, limit=BOUND, awaited=(0, 2))
    for rank in (0, 2):
        assert work.misses(found[rank].error, STEPS[at], rank, 1), found[rank]
