"""Several ranks: real processes, gloo. One start of two ranks does everything; see ranks.py."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders import ranks as worker
from builders.batches import lay_out, one_thread, random_sequences
from builders.loss_cases import LaidLoss
from builders.rounding import all_near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import SPECS, joined, together

RANKS = 2


@pytest.fixture(scope="module")
def found(on_ranks):
    """Run the work of every rank in a process of its own."""
    ended = on_ranks(worker.work, RANKS)
    assert [one.error for one in ended] == [""] * RANKS
    return [one.value for one in ended]


def test_split_sequences_equal_whole_ones(found):
    with one_thread():
        for i, (case, batch, spec, way, _, dtype) in enumerate(worker.CASES):
            assert [rank["split_batches"][i][1] for rank in found] == [1] * RANKS, f"collectives of {case}"
            laid = lay_out(batch, "packed", dtype)
            whole = outcome(laid, laid.correct(spec))
            parts = [rank["split_batches"][i][0] for rank in found]
            split = joined(parts, batch, way, len(found))
            assert_same_results(split, whole)
            if spec.nonfinite != "propagate":
                assert_same_statistics(split[3], whole[3], rounds_means=True)


def test_losses_of_split_sequences_equal_those_of_whole_ones(found):
    for i, (case, batch, options, way, _, dtype) in enumerate(worker.LOSS_CASES):
        # One collective for the sums of sequences, one more each for a Spec and for a gradient through such sums.
        surrogate = options["surrogate"]
        through = isinstance(surrogate, (rc.GMPO, rc.AveragePPO)) or surrogate == rc.GSPO(0.05, 0.06)
        assert {rank["split_losses"][i][1] for rank in found} == {1 + through + ("spec" in options)}, case
        laid = LaidLoss(batch, "packed", dtype)
        value, gradient, mask, statistics = worker.outcome_of_loss(laid, laid(**options))
        parts = [rank["split_losses"][i][0] for rank in found]
        values, gradients, masks, parts_statistics = zip(*parts, strict=True)
        within = 1e-12 if dtype == torch.float64 else 2e-6
        assert abs(sum(values) - value) <= within * max(1.0, abs(value)), case
        assert together(masks, batch, way, len(found)) == mask, case
        for row, expected in zip(together(gradients, batch, way, len(found)), gradient, strict=True):
            for a, b in zip(row, expected, strict=True):
                assert abs(a - b) <= within * max(1.0, abs(b)), (case, a, b)
        assert any(x for row in gradient for x in row), case
        merged = rc.Statistics.sum(parts_statistics)
        assert_same_statistics(merged, statistics, rounds_means=True)


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


def test_a_batch_mean_over_split_sequences(found):
    batch, spec = random_sequences(9, (9, 4, 6, 5)), SPECS["token"]
    laid = lay_out(batch, "packed", torch.float32)
    whole = laid.correct(spec)
    rows = []
    for rank, mine in zip(found, (batch[:2], batch[2:]), strict=True):
        rows += together([rank["both_groups"][0]], mine, "zigzag", 1)
        assert_same_statistics(rank["both_groups"][1], whole.statistics, rounds_means=True)
    for row, expected in zip(rows, laid.read(whole.weights), strict=True):
        assert all_near(torch.tensor(row), torch.tensor(expected), torch.float32, size=0.0)
