"""Calls compared over ranks, which threads play: what differs is named with its rank, on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled, bundled_loss
from builders.threaded_ranks import Rank, Ranks
from rollout_corr.metrics import collectives
from rollout_corr.metrics.collectives import difference

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = rc.Spec(
    rc.Weight.product(upper=2.0), (rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, label="drift"),)
)
HALF, THREE, PACKED = torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(3, 4), torch.zeros(6)
# What differs on rank 1, by the words that name it.
PLANTED = {
    "Spec.weight.upper": {"spec": replace(SPEC, weight=replace(SPEC.weight, upper=math.nextafter(2.0, 3.0)))},
    "Spec.criteria": {"spec": replace(SPEC, criteria=())},
    "Spec.criteria[0].upper": {"spec": replace(SPEC, criteria=(replace(SPEC.criteria[0], upper=0.2),))},
    "Spec.weight": {"spec": replace(SPEC, weight=None)},
    "rollout_logp": {"rollout_logp": HALF},
    "sequences": {"train_logp": THREE, "rollout_logp": THREE, "advantages": torch.zeros(3), "turns": None},
    "turns 3": {"turns": torch.tensor([0, 1, 4, 8])},
    "advantages[1]": {"advantages": torch.tensor([0.5, 0.25])},
    "layout": {
        "train_logp": PACKED, "rollout_logp": PACKED, "cu_seqlens": torch.tensor([0, 4, 6]),
        "turns": torch.tensor([0, 4, 6]), "advantages": torch.tensor([[0.5], [-0.5]]),
    },
    "rollout_corr": {},
}  # fmt: skip


def arguments(rank, **changes):
    """Those of `correct` on a rank, which holds some tokens of two sequences; on rank 1 some are changed."""
    n = 3 + rank
    given = {"train_logp": -torch.rand(2, n), "rollout_logp": -torch.rand(2, n), "turns": torch.tensor([0, n, 2 * n])}
    return given | {"spec": SPEC, "advantages": torch.tensor([0.5, -0.5])} | (changes if rank == 1 else {})


def errors_of(call, ranks=3):
    """The error of each rank as text, by its number and its member of a process group; "" where it raises none."""

    def of_rank(rank):
        try:
            call(rank, Rank(rank=rank, ranks=ranks))
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return Ranks(ranks).run(of_rank)


@pytest.mark.parametrize("what", PLANTED)
def test_a_call_that_differs_is_named_on_every_rank(what, monkeypatch):
    def call(rank, group):
        other = what == "rollout_corr" and rank == 1
        monkeypatch.setattr(collectives, "__version__", "0.0.9" if other else rc.__version__)
        rc.correct(**bundled(sequence_group=group, validate=True, **arguments(rank, **PLANTED[what])))

    for error in errors_of(call):
        assert error.startswith("ValueError: ranks.sequence: expected the same call on every rank, got ")
        assert what in error and "on rank 1 against" in error, error


def test_an_error_of_one_rank_reaches_the_others():
    """Its own mask is wrong; the others say which rank raised what."""

    def call(rank, group):
        given = arguments(rank, mask=torch.ones(5))
        rc.correct(**bundled(sequence_group=group, validate=True, **given))

    own, *others = (error.partition("mask: expected")[0] for error in sorted(errors_of(call), key=len))
    assert own == "ValueError: " and others == ["ValueError: ranks.sequence: rank 1 raised ValueError: "] * 2


def test_the_sentence():
    def call(rank, group):
        spec = SPEC if rank < 3 else PLANTED["Spec.weight.upper"]["spec"]
        batch = rc.Batch(ranks=rc.Ranks(sequence=group), validate=True)
        rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), batch, spec=spec)

    assert errors_of(call, 4)[0] == (
        "ValueError: ranks.sequence: expected the same call on every rank, got Spec.weight.upper 2.0000000000000004 on "
        "rank 3 against 2.0 on ranks 0, 1, 2"
    )


def test_an_argument_that_some_ranks_do_not_have():
    every = [{"call": "correct"}, {"call": "correct", "entropy": "float32"}, {"call": "correct"}]
    assert difference(every, (4, 5, 7)) == "expected the same call on every rank, got entropy on rank 5 alone"


@pytest.mark.parametrize("what", ["Spec.weight", "Spec.criteria[0].upper"])
def test_statistics_of_unequal_specs_do_not_merge_over_ranks(what):
    def call(rank, group):
        rc.correct(**bundled(**arguments(rank, **PLANTED[what]))).statistics.all_reduce(group)

    for error in errors_of(call):
        assert error.startswith("ValueError: Statistics.all_reduce: expected the same call on every rank")
        assert what in error and "on rank 1 against" in error, error


OTHER_LOSSES = {
    "Objective.surrogate.high": {"surrogate": rc.PPO(0.2, 0.3)},
    "Objective.surrogate ": {"surrogate": rc.GSPO()},
    "Objective.mean.of": {"mean": rc.Mean("sequence")},
    "Objective.kl": {"kl": rc.KL("k3", 0.1), "ref_logp": torch.zeros(2, 3)},
    "total 7.0 on": {"total": 7.0},
    "mode": {"old_logp": None, "rollout_logp": torch.zeros(2, 3)},
    "Spec Spec on": {"spec": rc.Spec(), "rollout_logp": torch.zeros(2, 3)},
    "weights float32 on": {"weights": torch.ones(2, 3)},
    "wants a gradient": {"new_logp": torch.zeros(2, 3, requires_grad=True)},
}


@pytest.mark.parametrize("what", OTHER_LOSSES)
def test_a_loss_that_differs_is_named_on_every_rank(what):
    def call(rank, group):
        zeros = torch.zeros(2, 3)
        given = {"new_logp": zeros, "advantages": torch.zeros(2), "old_logp": zeros, "surrogate": rc.PPO(0.2, 0.28)}
        given |= {"mean": rc.Mean()} | ({"total": 6.0} if "total" in what else {})
        given |= OTHER_LOSSES[what] if rank == 2 else {}
        rc.policy_loss(**bundled_loss(**given, validate=True, sequence_group=group))

    for error in errors_of(call):
        assert what in error and "on rank 2 against" in error, error


def test_a_batch_group_holds_other_sequences():
    """As many as each rank has, in its own layout."""

    def of_rank(rank):
        n, spec = 1 + rank, rc.Spec(rc.Weight.token(normalize="batch"))
        zeros, offsets = (torch.zeros(n, 3), None) if rank else (torch.zeros(n), torch.tensor([0, n]))
        batch = rc.Batch(cu_seqlens=offsets, ranks=rc.Ranks(batch=Rank(rank=rank, ranks=3)), validate=True)
        return rc.correct(zeros, zeros, batch, spec=spec).keep.tolist()

    assert Ranks(3).run(of_rank) == [[True], [True] * 2, [True] * 3]


@pytest.mark.parametrize("validate", [False, True])
def test_the_comparison_costs_one_collective(validate):
    """And a reduction of statistics two, whatever is measured."""
    ranks = Ranks(2)

    def of_rank(rank):
        group, zeros = Rank(rank=rank, ranks=2), torch.zeros(2, 3)
        batch = rc.Batch(ranks=rc.Ranks(batch=group, sequence=group), validate=validate)
        out = rc.correct(zeros, zeros, batch, spec=rc.Spec(rc.Weight.product(), detail="full"))
        before = ranks.rounds
        out.statistics.all_reduce(group)
        return before, ranks.rounds - before

    assert ranks.run(of_rank)[0] == (1 + validate, 2)
