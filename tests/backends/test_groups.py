"""Calls compared over ranks, in real processes: what differs is named with its rank, on every rank."""

from __future__ import annotations

import re

import pytest

from builders.planted_ranks import (
    AWAY,
    BOUND,
    OTHER_LOSSES,
    PLANTED,
    STEPS,
    TIMEOUT,
    WRONG_MASK,
    both_groups,
    collectives_of,
    data_parallel,
    differing,
    elsewhere,
    groups_gone,
    losing,
    merging,
    misses,
    names,
    step,
)
from rollout_corr.metrics.collectives import difference


@pytest.mark.parametrize("what", PLANTED)
def test_a_call_that_differs_is_named_on_every_rank(on_ranks, what):
    for rank, one in enumerate(on_ranks(differing, 3, what, 1)):
        assert one.error.startswith("ValueError: ")
        if rank != 1 or what != WRONG_MASK:
            assert names(one.error, 1, 3, what), one.error


@pytest.mark.parametrize("what", ["Spec.weight", "Spec.criteria[0].upper"])
def test_statistics_of_unequal_specs_do_not_merge_over_ranks(on_ranks, what):
    for one in on_ranks(merging, 3, what, 0):
        assert one.error.startswith("ValueError: Statistics.all_reduce: expected the same call on every rank")
        assert names(one.error, 0, 3, what), one.error


def test_the_sentence(on_ranks):
    one = on_ranks(differing, 4, next(iter(PLANTED)), 3)[0]
    assert one.error == (
        "ValueError: ranks.sequence: expected the same call on every rank, got Spec.weight.upper 2.0000000000000004 on "
        "rank 3 against 2.0 on ranks 0, 1, 2"
    )


def test_an_argument_that_some_ranks_do_not_have():
    every = [{"call": "correct"}, {"call": "correct", "entropy": "float32"}, {"call": "correct"}]
    assert difference(every, (4, 5, 7)) == "expected the same call on every rank, got entropy on rank 5 alone"


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_a_loss_that_differs_is_named_on_every_rank(on_ranks, name):
    for one in on_ranks(losing, 3, OTHER_LOSSES[name], name):
        assert names(one.error, 2, 3, name), one.error


def test_the_batch_group_hears_of_a_difference_among_ranks_that_share_sequences(on_ranks):
    found = on_ranks(both_groups, 4)
    for one in found[:2]:
        assert re.match(r"ValueError: ranks\.batch: rank 2 raised ValueError: ranks\.sequence: .* rank 3 ", one.error)
    for one in found[2:]:
        assert one.error.startswith("ValueError: ranks.sequence: expected the same call on every rank, got Spec.weight")
        assert "upper 3.0 on rank 3 against 2.0 on rank 2" in one.error


def test_a_batch_group_holds_other_sequences(on_ranks):
    assert [one.value for one in on_ranks(data_parallel, 3)] == [[True], [True] * 2, [True] * 3]


def test_the_comparison_costs_one_collective_and_the_order_of_a_group_is_torchs(on_ranks):
    assert [one.value for one in on_ranks(collectives_of, 3, False)] == [1, "outside", 1]
    assert [one.value for one in on_ranks(collectives_of, 3, True)] == [2, "outside", 2]


def test_groups_that_are_gone_or_of_others(on_ranks):
    found = on_ranks(groups_gone, 2)[1].value
    for name, (destroyed, others) in (("ranks.sequence", found[:2]), ("group", found[2:])):
        assert (
            destroyed == f"ValueError: {name}: expected an initialized process group, got one that has been destroyed"
        )
        assert others == (
            f"TypeError: {name}: expected a torch.distributed process group or None, got a group that this rank does "
            "not belong to; only its members may call"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("away", "at"), [*zip(AWAY, (0, 1, 2, 3, 0), strict=True)])
def test_a_rank_that_stays_away_is_named(on_ranks, away, at):
    found = on_ranks(step, 3, away, 1, at, timeout=TIMEOUT, limit=BOUND, awaited=(0, 2))
    for rank in (0, 2):
        assert misses(found[rank].error, STEPS[at], rank, 1), found[rank]


def test_tensors_on_a_device_that_the_group_does_not_carry(on_ranks):
    for one in on_ranks(elsewhere, 2):
        assert one.error == (
            "ValueError: correct: the sums of each sequence cannot be sent from cpu: expected tensors on cuda, for "
            "which the group has backends (cuda:gloo)"
        )
