"""`selection` next to plain loops; its alarm, where length decides and where it does not."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

import rollout_corr as rc

NAN = math.nan


def drawn(seed, sequences=400, spread=1.0):
    """Draw lengths and rewards of sequences, and a generator for more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(sequences, generator=generator) * spread + 5.0).exp().clamp(8, 32768).long()
    return lengths, torch.rand(sequences, generator=generator), generator


def test_means_next_to_plain_loops():
    """Empty sequences and rewards that are not finite count in nothing."""
    kept = torch.tensor([True, False, True, False, True, True])
    lengths = torch.tensor([4, 10, 0, 6, 2, 9])
    rewards = torch.tensor([1.0, 0.5, 7.0, NAN, 0.0, 3.0])
    found = rc.selection(kept, lengths, rewards=rewards, advantages=-rewards).metrics("x/")
    assert found == {
        "x/kept/length_mean": statistics.fmean([4, 2, 9]),
        "x/rejected/length_mean": 8.0,
        "x/kept/reward_mean": pytest.approx(4.0 / 3.0),
        "x/rejected/reward_mean": 0.5,
        "x/kept/advantage_mean": pytest.approx(-4.0 / 3.0),
        "x/rejected/advantage_mean": -0.5,
    }
    shares = rc.selection(torch.tensor([0.5, 1.0]), torch.tensor([10, 40])).metrics()
    assert shares == {"kept/length_mean": 30.0, "rejected/length_mean": 10.0}
    # Nor do shares that are not finite: the second and the last sequence are left out.
    more = torch.tensor([0.5, NAN, 1.0, math.inf]), torch.tensor([10, 70, 40, 90])
    unknown = rc.selection(*more, rewards=torch.tensor([1.0, 5.0, 4.0, 5.0])).metrics()
    assert unknown == {**shares, "kept/reward_mean": 3.0, "rejected/reward_mean": 1.0}
    nothing = rc.selection(kept[:0], lengths[:0])
    assert nothing.metrics() == {"kept/length_mean": 0.0, "rejected/length_mean": 0.0} and nothing.warnings() == []


def test_errors_are_those_of_shuffled_values():
    """A rejection that does not look at a quantity is, in standard errors, a draw of variance 1."""
    lengths, rewards, generator = drawn(0, 200)
    shares = torch.rand(200, generator=generator)
    errors = []
    for _ in range(300):
        order = torch.randperm(200, generator=generator)
        by = {one.name: one for one in rc.selection(shares, lengths, rewards=rewards[order]).compared()}
        errors.append(by["reward"].errors)
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.2)
    assert statistics.stdev(errors) == pytest.approx(1.0, abs=0.15)


def test_batches_and_ranks_add_up():
    lengths, rewards, generator = drawn(1)
    keep = torch.rand(400, generator=generator) > 0.2
    whole = rc.selection(keep, lengths, rewards=rewards)
    parts = [rc.selection(keep[i], lengths[i], rewards=rewards[i]) for i in torch.arange(400).split(150)]
    torch.testing.assert_close(sum(parts[1:], parts[0]).sums, whole.sums)
    assert "names" in repr(whole)


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_a_rejection_by_chance_is_no_alarm(spread):
    for seed in range(100):
        lengths, _, generator = drawn(seed, 64 + 32 * (seed % 8), spread)
        keep = torch.rand(len(lengths), generator=generator) > (0.01, 0.1, 0.5)[seed % 3]
        assert rc.selection(keep, lengths).warnings() == []


def test_a_product_rejects_long_answers():
    """The same noise of tokens: bounds of a product see its sum, which grows with the length, and a mean shrinks."""
    lengths, _, generator = drawn(2, 300)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rollout = torch.full((int(lengths.sum()),), -1.0)
    train = rollout + 0.05 * torch.randn(rollout.shape, generator=generator)

    def warned(**criterion):
        rejection = rc.Criterion("ratio", over="sequence", **criterion)
        spec = rc.Spec(criteria=(rejection,))
        out = rc.correct(train, rollout, cu_seqlens=cu_seqlens, spec=spec)
        assert 10 < int(out.keep.sum()) < 290
        return rc.selection(out.keep, lengths).warnings()

    assert "rejection prefers short answers: kept sequences have" in warned(reduce="sum", lower=0.5, upper=2.0)[0]
    assert warned(reduce="mean", lower=0.995, upper=1.005) == []
