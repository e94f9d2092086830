"""Sequences split over ranks that this process plays: what is sent, how often, and what warmup compiles for it.

That the results are those of whole sequences is in test_random_calls.py.
"""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled, example
from builders.kernel_cases import INTERPRETED
from builders.launches import key
from builders.threaded_ranks import Rank, Ranks
from rollout_corr.backends.split import from_limbs, to_limbs
from rollout_corr.kernels import grid, launches
from rollout_corr.kernels.grid import Shape

pytestmark = INTERPRETED

# Three sequences of four tokens; each of two ranks has two tokens of each.
TRAIN, ROLLOUT = torch.linspace(-2.0, -0.1, 12), torch.linspace(-1.5, -0.4, 12)


def of_ranks(group, spec=None, loss=None):
    """The results of two ranks."""

    def of_rank(rank):
        held = torch.arange(12).view(3, 2, 2)[:, rank].flatten()
        batch = rc.Batch(cu_seqlens=torch.tensor([0, 2, 4, 6]), ranks=rc.Ranks(sequence=Rank(rank=rank, ranks=2)))
        train, rollout = TRAIN[held], ROLLOUT[held]
        if loss is None:
            return rc.correct(train, rollout, batch, spec=spec)
        new, more = train.clone().requires_grad_(), {} if spec is None else {"spec": spec, "rollout_logp": rollout}
        out = rc.policy_loss(new, torch.ones(6), batch, loss, old_logp=train, **more)
        out.value.backward()
        return out

    return group.run(of_rank)


def test_sums_travel_to_the_nearest_76th_bit():
    sums = torch.tensor([3.75, -0.25, 0.75, -1e18, math.pi]) * torch.tensor([1, 2.0**-76, 2.0**-76, 1, 1]).double()
    wanted = [3.75, 0.0, 2.0**-76, float(sums[3]), float(sums[4])]
    assert from_limbs(to_limbs(sums, 2)).tolist() == wanted


def test_what_a_rank_adds_is_of_its_tokens_or_of_whole_sequences():
    outs = of_ranks(Ranks(2), rc.Spec(rc.Weight.product(), detail="full"))
    first, other = (out.statistics.metrics_async().values() for out in outs)
    assert (first["tokens"], other["tokens"], other["sequences"]) == (12.0, 0.0, 0.0)
    assert 0.0 < other["abs_d"] < first["abs_d"] + other["abs_d"]
    assert other["max_raw"] == -math.inf and math.isfinite(other["max_d"])


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (rc.Spec(), 12),
        (rc.Spec(rc.Weight.product(upper=2.0)), 12),
        (rc.Spec(criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", upper=1.1),)), 12),
        (rc.Spec(rc.Weight.token(upper=2.0)), 20),
        (rc.Spec(criteria=(rc.Criterion("k3", over="sequence", reduce="mean", upper=1.1),)), 14),
        (rc.Spec(criteria=(rc.Criterion("ratio", over="sequence", reduce="min", lower=0.1),)), 12 + 2),
    ],
)
def test_what_a_sequence_sends(spec, columns):
    group = Ranks(2)
    of_ranks(group, spec)
    assert [(table.dtype, table.numel()) for table in group.sent] == [(torch.int64, columns * 3)] * 2


@pytest.mark.parametrize(
    ("surrogate", "spec", "rounds"),
    [
        (rc.PPO(), None, 1),
        (rc.PPO(), rc.Spec(rc.Weight.product()), 2),
        (rc.GSPO(through="token"), None, 1),
        (rc.GSPO(), None, 2),
        (rc.GMPO(), rc.Spec(), 3),
    ],
    ids=repr,
)
def test_how_often_a_loss_exchanges_sums(surrogate, spec, rounds):
    """Once for those of sequences, once for a Spec, once for a gradient through such sums."""
    group = Ranks(2)
    of_ranks(group, spec, rc.Loss(surrogate))
    assert group.rounds == rounds


def test_the_exchange_can_overlap_with_other_work():
    """It is started by `correct_async`, and awaited once the result is asked for."""
    group, spec = Ranks(2), rc.Spec(rc.Weight.geometric(upper=2.0))

    def of_rank(rank):
        held = torch.arange(12).view(3, 2, 2)[:, rank].flatten()
        batch = rc.Batch(cu_seqlens=torch.tensor([0, 2, 4, 6]), ranks=rc.Ranks(sequence=Rank(rank=rank, ranks=2)))
        pending = rc.correct_async(TRAIN[held], ROLLOUT[held], batch, spec=spec)
        before = group.rounds, pending.done()
        out = pending.result()
        assert pending.done() and pending.result() is out
        return before, out.weights

    found, at_once = group.run(of_rank), of_ranks(Ranks(2), spec)
    assert [before for before, _ in found] == [(0, False)] * 2 and group.rounds == 1
    assert [weights.tolist() for _, weights in found] == [out.weights.tolist() for out in at_once]


def test_offsets_of_turns_may_be_as_many_as_the_tokens_of_a_rank():
    """Ids are refused there, so nothing is ambiguous: a rank that raised would leave the others waiting."""

    def of_rank(rank):
        logp, ranks = torch.zeros(3), rc.Ranks(sequence=Rank(rank=rank, ranks=2))
        batch = rc.Batch(cu_seqlens=torch.tensor([0, 3]), turns=torch.tensor([0, 1, 3]), ranks=ranks)
        return rc.correct(logp, logp, batch, spec=rc.Spec(turns=True))

    assert [out.keep_turns.tolist() for out in Ranks(2).run(of_rank)] == [[True, True]] * 2


def test_tokens_outside_are_counted_where_they_lie():
    def of_rank(rank):
        logp, ranks = torch.zeros(5), rc.Ranks(sequence=Rank(rank=rank, ranks=2))
        return rc.correct(logp, logp, rc.Batch(cu_seqlens=torch.tensor([1, 3]), ranks=ranks)).statistics

    assert rc.Statistics.sum(Ranks(2).run(of_rank)).metrics()["tokens_outside"] == 6


@pytest.mark.usefixtures("quick_interpreter")
def test_warmup_compiles_what_a_split_batch_launches(alone, monkeypatch):
    monkeypatch.setattr(grid, "SHAPES", ((32, Shape(64, 16, 2, 2)), (0, Shape(32, 16, 2, 2))))
    launched = []
    run = launches.Launch.run
    monkeypatch.setattr(launches.Launch, "run", lambda launch: (launched.append(key(launch)), run(launch)))
    spec = rc.Spec(rc.Weight.product(upper=2.0))
    like = example(ranks=rc.Ranks(sequence=alone))
    assert rc.warmup(*like, spec=spec, loss=rc.Loss(rc.GSPO())) == 4
    signed = rc.Spec(criteria=(rc.Criterion("k1", "sequence", "mean", upper=1.0, when="negative_advantage"),))
    assert rc.warmup(*like, spec=signed, advantages=torch.zeros(2, 1), aligned=True) == 2
    known, launched[:] = set(launched), []
    zeros, mask, offsets = torch.zeros(192), torch.ones(192, dtype=torch.bool), torch.tensor([0, 80, 192]).int()
    batch = rc.Batch(mask=mask, cu_seqlens=offsets, ranks=rc.Ranks(sequence=alone))
    rc.correct(zeros, zeros, batch, spec=spec, backend="triton")
    assert len(launched) == 4 and set(launched) <= known
    options = {"mask": mask, "cu_seqlens": offsets, "advantages": torch.zeros(2, 1), "backend": "triton"}
    launched.clear()
    rc.correct(zeros, zeros, **bundled(spec=signed, sequence_group=alone, **options))
    assert launched and set(launched) <= known
