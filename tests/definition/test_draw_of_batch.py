"""The draw of surrogates that look at the whole batch: by sequence and place, alike for all tokens, apart on ranks."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from oracles import batch_losses as oracle
from rollout_corr.backends import sees_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def test_without_numbers_ranks_draw_apart():
    """Else the first sequences of all ranks would lose the same places."""
    x = torch.linspace(-2.0, -1.0, 40).view(1, 40)
    surrogate = rc.ClipCov(share=0.5, lower=-9.0, upper=9.0)

    def of_rank(rank):
        new = x.clone().requires_grad_()
        batch = rc.Batch(ranks=rc.Ranks(batch=Rank(rank=rank, ranks=2)))
        rc.policy_loss(new, torch.ones(1, 40), batch, rc.Loss(surrogate), old_logp=x).value.backward()
        return new.grad == 0

    one, two = Ranks(2).run(of_rank)
    assert int(one.sum() + two.sum()) == 40 and not torch.equal(one, two)


def test_the_padding_does_not_matter_to_the_draw():
    new = torch.linspace(-3.0, -1.0, 30)
    surrogate = rc.ClipCov(share=0.3, lower=-9.0, upper=9.0, seed=11)

    def zeros(front, back):
        x = torch.cat((torch.full((front,), -7.0), new, torch.full((back,), math.nan)))[None].requires_grad_()
        mask = torch.zeros(1, front + 30 + back)
        mask[:, front : front + 30] = 1
        rc.policy_loss(
            x, torch.ones_like(x.detach()), loss=rc.Loss(surrogate), mask=mask, old_logp=x.detach()
        ).value.backward()
        return (x.grad == 0)[0, front : front + 30].tolist()

    assert zeros(0, 0) == zeros(5, 0) == zeros(0, 3) == zeros(2, 9)
    assert sum(zeros(0, 0)) == 9


def test_the_draw_is_splitmix():
    place, number = torch.arange(50), torch.tensor([[3], [-5], [2**40]])
    for seed in (0, 1, 2**63 - 1):
        found = sees_batch.uniform(seed, number, place)
        wanted = [[oracle.drawn(seed, n, t) for t in range(50)] for n in (3, -5, 2**40)]
        assert found.tolist() == wanted


def test_every_eligible_token_is_drawn_alike():
    """Over 200 seeds each of 40 tokens is drawn about 50 times: within five deviations of a binomial."""
    x = torch.linspace(-3.0, -1.0, 40).view(2, 20)
    counts = torch.zeros(2, 20)
    for seed in range(200):
        new = x.clone().requires_grad_()
        surrogate = rc.ClipCov(share=0.25, lower=-9.0, upper=9.0, seed=seed)
        rc.policy_loss(new, torch.ones(2, 20), loss=rc.Loss(surrogate), old_logp=x).value.backward()
        gone = new.grad == 0
        assert int(gone.sum()) == 10
        counts += gone
    assert (counts - 50).abs().max() < 5 * math.sqrt(200 * 0.25 * 0.75)


def test_ties_share_their_fate():
    """All covariances are equal, so all tokens are the largest."""
    x = torch.full((2, 4), -1.0)
    out = rc.policy_loss(x, torch.ones(2, 4), loss=rc.Loss(rc.KLCov(0.01, 1.0)), old_logp=x - 0.5)
    assert out.metrics()["cov_chosen_fraction"] == 1.0
