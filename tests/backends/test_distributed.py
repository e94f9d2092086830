"""Several ranks: real processes, gloo. One start of two ranks does everything; see ranks.py."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders import parts
from builders import ranks as worker
from builders.batches import one_thread
from builders.parts import corrected, lost
from builders.ranks import RANKS
from builders.rounding import all_near


@pytest.fixture(scope="module")
def found(on_ranks):
    """Run the work of every rank in a process of its own."""
    ended = on_ranks(worker.work, RANKS)
    assert [one.error for one in ended] == [""] * RANKS
    return [one.value for one in ended]


@pytest.mark.parametrize("number", range(len(worker.CORRECTIONS)))
def test_split_sequences_equal_whole_ones(found, number):
    together = worker.CORRECTIONS[number]
    with one_thread():
        parts.assert_one_correction(
            together, [rank["corrections"][number] for rank in found], corrected(together.call())
        )


@pytest.mark.parametrize("number", range(len(worker.LOSSES)))
def test_losses_of_split_sequences_equal_those_of_whole_ones(found, number):
    together = worker.LOSSES[number]
    with one_thread():
        parts.assert_one_loss(together, [rank["losses"][number] for rank in found], lost(together.call()))


def test_ranks_agree_with_one_process(found):
    whole = worker.part(worker.example(), 0, 30)
    weights = torch.cat([rank["uneven_shares"]["weights"] for rank in found])
    # The mean is a float64 sum of two parts instead of one: its last bit may differ, and so may the weights'.
    assert all_near(weights, whole.weights, torch.float32, size=0.0)
    alone = torch.cat([worker.part(worker.example(), *edges).weights for edges in ((0, 7), (7, 30))])
    assert not torch.allclose(weights, alone, rtol=1e-3)
    for rank in found:
        assert rank["uneven_shares"]["calls"] == (1, 2)
        same_metrics(rank["uneven_shares"]["metrics"], whole.metrics())


def test_unequal_numbers_of_micro_batches_merge(found):
    expected = worker.part(worker.example(), 0, 30).metrics()
    for rank in found:
        same_metrics(rank["micro_batches"], expected)


def same_metrics(got, expected):
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert abs(got[key] - value) <= 1e-6 * max(1.0, abs(value)), key


def test_the_exchange_can_overlap_with_other_work(found):
    for rank in found:
        assert rank["asynchronous"] == (1, 1, True, True)


def test_a_batch_mean_over_sequences_of_a_rank_alone(found):
    logp = torch.linspace(-2.0, -0.1, 24).view(4, 6)
    whole = rc.correct(logp, logp.flip(1), spec=worker.NORMALIZED)
    assert all_near(torch.cat([rank["both_groups"][0] for rank in found]), whole.weights, torch.float32, size=0.0)
    for rank in found:
        same_metrics(rank["both_groups"][1], whole.metrics())
