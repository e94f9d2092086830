"""Surrogates that look at the batch or at groups, where random calls do not: draws, ties, far scores, wrong calls.

test_random_calls.py judges all others by loops, test_invariance.py shuffles them, and tests/backends has them on ranks.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.rounding import assert_near, near
from builders.threaded_ranks import Rank, Ranks
from oracles import loss as oracle
from rollout_corr.backends import sees_batch, sequence_groups

pytestmark = pytest.mark.usefixtures("one_thread")

OF_ROWS = rc.Mean("sequence", over="kept")


@pytest.mark.parametrize("surrogate", [rc.ClipCov(), rc.KLCov(), rc.REAL()], ids=str)
def test_nothing_to_see(surrogate):
    x, loss, groups = torch.zeros(2, 3, requires_grad=True), rc.Loss(surrogate), rc.Groups(size=1)
    masked = rc.Batch(mask=torch.zeros(2, 3), groups=groups)
    out = rc.policy_loss(x, torch.ones(2, 3), masked, loss, old_logp=x.detach())
    out.value.backward()
    assert out.value.item() == 0.0 and not x.grad.any()
    assert all(math.isfinite(value) for value in out.metrics().values())
    empty = rc.Batch(cu_seqlens=torch.zeros(1, dtype=torch.int64), groups=groups)
    assert rc.policy_loss(torch.zeros(0), torch.zeros(0), empty, loss, old_logp=torch.zeros(0)).value.item() == 0.0


def test_a_criterion_of_new_old_counts_tokens_that_rollout_has_no_number_for():
    zeros = torch.zeros(2, 2)
    rollout = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    spec = rc.Spec(criteria=(rc.Criterion("external", upper=9.0, of="new/old", name="x", label="c"),))
    batch = rc.Batch(external={"x": torch.full((2, 2), 3.0)})
    given = {"old_logp": zeros, "rollout_logp": rollout, "spec": spec}
    found = rc.policy_loss(zeros, zeros, batch, rc.Loss(rc.KLCov()), **given).metrics()
    assert (found["c/mean"], found["c/min"], found["c/max"], found["c/std"]) == (3.0, 3.0, 3.0, 0.0)


# --- draws ---


def test_the_draw_is_splitmix():
    place, number = torch.arange(50), torch.tensor([[3], [-5], [2**40]])
    for seed in (0, 1, 2**63 - 1):
        found = sees_batch.uniform(seed, number, place)
        assert found.tolist() == [[oracle.drawn(seed, n, t) for t in range(50)] for n in (3, -5, 2**40)]


def test_ranks_draw_other_places():
    """Without numbers the first sequences of all ranks would lose the same ones."""
    x = torch.linspace(-3.0, -1.0, 40).view(1, 40)

    def of_rank(rank):
        new, batch = x.clone().requires_grad_(), rc.Batch(ranks=rc.Ranks(batch=Rank(rank=rank, ranks=2)))
        loss = rc.Loss(rc.ClipCov(lower=-9.0, upper=9.0, share=0.5))
        rc.policy_loss(new, torch.ones_like(x), batch, loss, old_logp=x).value.backward()
        return new.grad == 0

    one, two = Ranks(2).run(of_rank)
    assert int(one.sum() + two.sum()) == 40 and not torch.equal(one, two)


def test_ties_share_their_fate():
    """All covariances are equal, so all tokens are the largest."""
    x = torch.full((2, 4), -1.0)
    out = rc.policy_loss(x, torch.ones(2, 4), loss=rc.Loss(rc.KLCov(0.01, 1.0)), old_logp=x - 0.5)
    assert out.metrics()["cov_chosen_fraction"] == 1.0


# --- groups ---


def of_sequences(x, advantages, surrogate, batch, **given):
    """The loss of three tokens of each log-ratio, and its slope by sequence."""
    new = torch.zeros(len(advantages), 3, dtype=x.dtype, requires_grad=True)
    old, loss = x[:, None].expand_as(new), rc.Loss(surrogate, OF_ROWS)
    out = rc.policy_loss(new, torch.tensor(advantages), batch, loss, old_logp=old, **given)
    return out, torch.autograd.grad(out.value, new)[0].sum(1)


def test_far_scores_and_the_smallest_temperature_stay_finite():
    """Scores of +-15 at 0.01: e^1500 has no number. At 1e-30 slopes are 1e30; those of 1e-40 would be infinite."""
    x = torch.tensor([15.0, -15.0, 15.0, -15.0], dtype=torch.float64)
    out, slopes = of_sequences(x, [1.0, 1.0, -1.0, -1.0], rc.REAL(0.01), rc.Batch(groups=rc.Groups(size=4)))
    assert out.value.item() == near(3000.0)
    assert_near(slopes, torch.tensor([-100.0, 0.0, 0.0, 100.0], dtype=torch.float64))
    half, groups = torch.full((16,), -0.5), rc.Groups(size=16)
    out, slopes = of_sequences(half, [1.0, -1.0] * 8, rc.REAL(1e-30), rc.Batch(groups=groups))
    assert out.value.isfinite() and slopes.isfinite().all() and slopes.abs().max() > 1e28


def test_groups_of_neighbors_stay_on_their_rank():
    """`Groups(size=)` counts whole groups on each rank, so ranks exchange nothing for it."""
    x, advantages = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5, 1.0, 0.0, -2.0]), [1.0, -1.0] * 4
    pairs = rc.Groups(size=2)

    def of_rank(rank):
        batch = rc.Batch(groups=pairs, ranks=rc.Ranks(batch=Rank(rank=rank, ranks=2)), total=8.0)
        part = slice(4 * rank, 4 * rank + 4)
        new = torch.zeros(4, 3, requires_grad=True)
        loss = rc.Loss(rc.REAL(), rc.Mean("sequence"))
        out = rc.policy_loss(new, torch.tensor(advantages[part]), batch, loss, old_logp=x[part, None].expand(4, 3))
        return torch.autograd.grad(out.value, new)[0].sum(1)

    alone = of_sequences(x, advantages, rc.REAL(), rc.Batch(groups=pairs))[1]
    assert torch.equal(torch.cat(Ranks(2).run(of_rank)), alone)


def test_a_sequence_of_no_group_has_no_loss():
    """Such as its number is on a device, where numbers are not looked at."""
    x, advantages, groups = torch.tensor([0.5, -1.0, 2.0, 0.25]), [1.0, -1.0, 1.0, -1.0], torch.tensor([0, 0, 99, 99])
    with mock.patch.object(sequence_groups.torch.compiler, "is_compiling", return_value=True):
        given = rc.Groups(index=groups), "REAL()", 4, torch.device("cpu"), False, False
        read = sequence_groups.read_groups(*given)
    with mock.patch("rollout_corr.api.loss_request.groups_of", return_value=read):
        _, slopes = of_sequences(x, advantages, rc.REAL(), rc.Batch(groups=rc.Groups(index=groups)))
    assert slopes[:2].all() and not slopes[2:].any()


# --- what cannot be ---

X, IDS, INDEX = torch.zeros(4, 3), torch.arange(4), torch.zeros(4, dtype=torch.int64)


def call(surrogate, **options):
    return rc.policy_loss(X, X, **bundled_loss(old_logp=X, surrogate=surrogate, **options))


def on_a_rank(surrogate, over, **options):
    return Ranks(1).run(lambda rank: call(surrogate, **{over: Rank(rank=rank, ranks=1)}, **options))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: call(rc.ClipCov(), sequence_ids=[0, 1]), "sequence_ids: expected a tensor, got list"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS.float()), "sequence_ids: .* int64, got float32"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS[:3]), r"sequence_ids: expected shape \[4\]"),
        (lambda: call(rc.ClipCov(), sequence_ids=IDS.to("meta")), "sequence_ids: expected device cpu"),
        (lambda: call(rc.REAL()), r"groups: expected rc\.Groups\(index=.* for the surrogate REAL\(\), got None"),
        (lambda: call(rc.REAL(), group_size=3), r"groups\.size: expected a divisor of the 4 sequences, got 3"),
        (lambda: call(rc.REAL(), group_index=INDEX + 4), r"groups\.index: expected numbers from 0 to 3"),
        (lambda: call(rc.REAL(), group_index=INDEX[:2]), r"groups\.index: expected shape \[4\]"),
        (lambda: on_a_rank(rc.REAL(), over="batch_group", group_index=INDEX), r"groups\.count: expected the number"),
        (lambda: on_a_rank(rc.KLCov(), over="sequence_group"), r"Loss\.surrogate: .* does not look .* got KLCov\(\)"),
        *((lambda tau=tau: rc.REAL(tau), r"REAL\.tau: expected a (finite )?number") for tau in (0.0, 9e-31, math.nan)),
        (lambda: rc.ClipCov(share=0.0), "ClipCov.share: expected a number above 0 and at most 1, got 0.0"),
        (lambda: rc.KLCov(1.5), "KLCov.share: expected a number above 0 and at most 1, got 1.5"),
        (lambda: rc.ClipCov(lower=2.0, upper=1.0), "ClipCov.upper: expected a number >= lower=2.0, got 1.0"),
        (lambda: rc.ClipCov(seed=1.0), "ClipCov.seed: expected an integer, got float 1.0"),
        (lambda: rc.ClipCov(seed=-1), "ClipCov.seed: expected an integer from 0"),
        (lambda: rc.KLCov(penalty=-1.0), "KLCov.penalty: expected a number >= 0"),
        (lambda: rc.KLCov(penalty=math.inf), r"KLCov.penalty: expected a number >= 0 and <= 3.4.*got inf"),
    ],
)
def test_what_is_wrong_is_named(made, words):
    with pytest.raises((ValueError, TypeError), match=words):
        made()
