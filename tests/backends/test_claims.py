"""Calls compared over ranks, in real processes: what differs is named with its rank, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import rollout_corr as rc
from attack.ranks import AWAY, BOUND, PLANTED, STEPS, TIMEOUT, differing, merging, misses, names, step
from builders.forked_ranks import starter
from builders.ranks import counted


@pytest.fixture(scope="module")
def run():
    """Run a function on ranks; see builders/forked_ranks.py."""
    with starter() as started:
        yield started


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_call_that_differs_is_named_on_every_rank(run, plant):
    for rank, one in enumerate(run(differing, 3, plant, 1)):
        assert one.error.startswith("ValueError: ")
        if rank != 1 or not PLANTED[plant].startswith("raised"):
            assert names(one.error, 1, 3, PLANTED[plant]), one.error


@pytest.mark.parametrize("plant", [plant for plant in PLANTED if PLANTED[plant].startswith("Spec")])
def test_statistics_of_unequal_specs_do_not_merge_over_ranks(run, plant):
    for one in run(merging, 3, plant, 0):
        assert one.error.startswith("ValueError: Statistics.all_reduce: expected the same call on every rank")
        assert names(one.error, 0, 3, PLANTED[plant]), one.error


def test_the_sentence(run):
    one = run(differing, 4, next(iter(PLANTED)), 3)[0]
    assert one.error == (
        "ValueError: sequence_group: expected the same call on every rank, got Spec.weight.upper 2.0000000000000004 on "
        "rank 3 against 2.0 on ranks 0, 1, 2"
    )


LOSS = {"surrogate": rc.PPO(0.2, 0.28), "reduction": "token_mean", "denominator": "original"}
OTHER_LOSSES = {
    "Objective.surrogate.high": {"surrogate": rc.PPO(0.2, 0.3)},
    "Objective.surrogate ": {"surrogate": rc.GSPO()},
    "Objective.reduction": {"reduction": "sequence_mean_token_mean"},
    "Objective.kl": {"kl": rc.KL("k3", 0.1), "ref_logp": torch.zeros(2, 3)},
    "denominator 7.0 on": {"denominator": 7.0},
    "mode": {"old_logp": None, "rollout_logp": torch.zeros(2, 3)},
    "Spec Spec on": {"spec": rc.Spec(), "rollout_logp": torch.zeros(2, 3)},
    "weights float32 on": {"weights": torch.ones(2, 3)},
    "wants a gradient": {"new_logp": torch.zeros(2, 3, requires_grad=True)},
}


def losing(rank, ranks, options, name):
    """Run a loss, on the last rank with other options, over a group of all ranks."""
    zeros = torch.zeros(2, 3)
    given = {"new_logp": zeros, "advantages": torch.zeros(2), "old_logp": zeros, **LOSS}
    if name == "denominator 7.0 on":
        given["denominator"] = 6.0
    if rank == ranks - 1:
        given |= options
    rc.policy_loss(**given, validate=True, sequence_group=dist.group.WORLD)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_a_loss_that_differs_is_named_on_every_rank(run, name):
    for one in run(losing, 3, OTHER_LOSSES[name], name):
        assert names(one.error, 2, 3, name), one.error


def both_groups(rank, ranks):
    """Ranks 0, 1 and 2, 3 share sequences; rank 3's Spec is another one. All of them take one batch mean."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    spec = rc.Spec(rc.Weight("token", upper=3.0 if rank == 3 else 2.0, normalize="batch"))
    groups = {"sequence_group": halves[rank // 2], "batch_group": dist.group.WORLD}
    rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), spec=spec, validate=True, **groups)


def test_the_batch_group_hears_of_a_difference_among_ranks_that_share_sequences(run):
    found = run(both_groups, 4)
    for one in found[:2]:
        assert re.match(r"ValueError: batch_group: rank 2 raised ValueError: sequence_group: .* rank 3 ", one.error)
    for one in found[2:]:
        assert one.error.startswith("ValueError: sequence_group: expected the same call on every rank, got Spec.weight")
        assert "upper 3.0 on rank 3 against 2.0 on rank 2" in one.error


def data_parallel(rank, ranks):
    """Ranks with other numbers of sequences, in other layouts, which agree on everything else."""
    n, spec = 1 + rank, rc.Spec(rc.Weight("token", normalize="batch"))
    layout = {} if rank else {"cu_seqlens": torch.tensor([0, n])}
    zeros = torch.zeros(n, 3) if rank else torch.zeros(n)
    return rc.correct(zeros, zeros, spec=spec, validate=True, batch_group=dist.group.WORLD, **layout).keep.tolist()


def test_a_batch_group_holds_other_sequences(run):
    assert [one.value for one in run(data_parallel, 3)] == [[True], [True] * 2, [True] * 3]


def collectives_of(rank, ranks, validate):
    group = dist.new_group([0, 2] if rank == 0 else [2, 0])
    if rank == 1:
        return "outside"
    with counted() as calls:
        zeros = torch.zeros(2, 3)
        rc.correct(zeros, zeros, sequence_group=group, batch_group=group, validate=validate)
    return len(calls)


def test_the_comparison_costs_one_collective_and_the_order_of_a_group_is_torchs(run):
    assert [one.value for one in run(collectives_of, 3, False)] == [1, "outside", 1]
    assert [one.value for one in run(collectives_of, 3, True)] == [2, "outside", 2]


def groups_gone(rank, ranks):
    """The errors of groups that cannot be used, from a call and from statistics."""
    zeros, destroyed, others = torch.zeros(2, 3), dist.new_group([0, 1]), dist.new_group([0])
    dist.destroy_process_group(destroyed)
    statistics, found = rc.correct(zeros, zeros).statistics, []
    for call in (lambda g: rc.correct(zeros, zeros, sequence_group=g), statistics.all_reduce):
        for group in (destroyed, others):
            try:
                found.append(call(group) and "no error")
            except (TypeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_groups_that_are_gone_or_of_others(run):
    found = run(groups_gone, 2)[1].value
    for name, (destroyed, others) in (("sequence_group", found[:2]), ("group", found[2:])):
        assert destroyed == f"ValueError: {name}: expected a living process group, got one that has been destroyed"
        assert others == (
            f"TypeError: {name}: expected a torch.distributed process group or None, got a group that this rank does "
            "not belong to; only its members may call"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("away", "at"), [*zip(AWAY, (0, 1, 2, 3, 0), strict=True)])
def test_a_rank_that_stays_away_is_named(run, away, at):
    found = run(step, 3, away, 1, at, timeout=TIMEOUT, limit=BOUND, awaited=(0, 2))
    for rank in (0, 2):
        assert misses(found[rank].error, STEPS[at], rank, 1), found[rank]


def test_tensors_on_a_device_that_the_group_does_not_carry(run):
    for one in run(elsewhere, 2):
        assert one.error == (
            "ValueError: correct: the sums of each sequence cannot travel from cpu: expected tensors on cuda, for "
            "which the group has backends (cuda:gloo)"
        )


def elsewhere(rank, ranks):
    """Split tensors of the CPU over a group for those of a GPU."""
    zeros = torch.zeros(2, 3)
    rc.correct(zeros, zeros, sequence_group=dist.new_group(backend="cuda:gloo"))
