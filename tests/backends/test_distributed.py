"""Several ranks: real processes, gloo. One start of 2 ranks and one of 4 does everything; see ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import rollout_corr as rc
from builders import ranks as worker
from builders.batches import lay_out, one_thread, random_sequences
from builders.loss_cases import LaidLoss, only, random_batch
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import SPECS, joined, together


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)))
def found(request, tmp_path_factory):
    """Run the work of every rank in a process of its own and load the results."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker.work, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def test_split_sequences_equal_whole_ones(found):
    with one_thread():
        for i, (_, batch, spec, way, _, dtype) in enumerate(worker.cases_of(len(found))):
            laid = lay_out(batch, "packed", dtype)
            whole = outcome(laid, laid.correct(spec))
            parts = [rank["split_batches"][i][0] for rank in found]
            split = joined(parts, batch, way, len(found))
            assert_same_results(split, whole)
            if spec.nonfinite != "propagate":
                assert_same_statistics(split[3], whole[3], rounds_means=True)


def test_one_collective_whatever_the_spec(found):
    for rank in found:
        for (case, *_), (_, calls) in zip(worker.cases_of(len(found)), rank["split_batches"], strict=True):
            assert calls == 1, case


def test_losses_of_split_sequences_equal_those_of_whole_ones(found):
    for i, (case, batch, options, way, _, dtype) in enumerate(worker.loss_cases_of(len(found))):
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


def test_collectives_of_a_loss(found):
    """One for the sums of sequences, one more each for a Spec and for a gradient through sums of sequences."""
    for rank in found:
        for (case, _, options, *_), (_, calls) in zip(
            worker.loss_cases_of(len(found)), rank["split_losses"], strict=True
        ):
            surrogate = options["surrogate"]
            through = isinstance(surrogate, (rc.GMPO, rc.AveragePPO)) or (
                isinstance(surrogate, rc.GSPO) and surrogate.through == "sequence"
            )
            assert calls == 1 + through + ("spec" in options), case


def test_a_denominator_counted_over_ranks(found):
    batch = only(random_batch(3, (9, 4, 6, 5)), "old", "weights")
    for i, options in enumerate(worker.SHARED_DENOMINATORS):
        laid = LaidLoss(batch, "packed", torch.float64)
        whole = laid(**options)
        parts = [rank["shared_denominator"][i] for rank in found]
        assert abs(sum(part[0] for part in parts) - whole.value.item()) <= 1e-12
        assert [part[2] for part in parts] == [1] * len(found)
        expected = laid.gradient(whole.value)[0]
        for number, part in enumerate(parts):
            for row, wanted in zip(part[1], expected[number :: len(found)], strict=True):
                assert torch.allclose(torch.tensor(row), torch.tensor(wanted), rtol=1e-12, atol=0.0)


def test_ranks_agree_with_one_process(found):
    whole = worker.part(worker.example(), 0, 30)
    weights = torch.cat([rank["uneven_shares"]["weights"] for rank in found])
    # The mean is a float64 sum of two parts instead of one: its last bit may differ, and so may the weights'.
    assert torch.allclose(weights, whole.weights, rtol=2e-7, atol=0.0)
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


def test_unequal_numbers_of_sequences_are_reported_on_every_rank(found):
    others = "rank 0" if len(found) == 2 else "ranks 0, 2, 3"
    for rank in found:
        assert f"got sequences 4 on rank 1 against 3 on {others}" in rank["unequal_counts"]


def test_the_exchange_can_overlap_with_other_work(found):
    for rank in found:
        assert rank["asynchronous"] == (1, 1, True, True)


def test_a_batch_mean_over_split_sequences(found):
    batch, spec = random_sequences(9, (9, 4, 6, 5)), SPECS["token"]
    laid = lay_out(batch, "packed", torch.float32)
    whole = laid.correct(spec)
    half = len(found) // 2
    for i in range(2):
        rows = []
        for first, mine in ((0, batch[:2]), (half, batch[2:])):
            parts = [rank["both_groups"][i][0] for rank in found[first : first + half]]
            rows += together(parts, mine, "zigzag", half)
        for row, expected in zip(rows, laid.read(whole.weights), strict=True):
            assert torch.allclose(torch.tensor(row), torch.tensor(expected), rtol=2e-7, atol=0.0)
        for rank in found:
            assert_same_statistics(rank["both_groups"][i][1], whole.statistics, rounds_means=True)


def test_a_denominator_of_split_sequences_counts_each_once(found):
    laid = LaidLoss(only(random_batch(3, (9, 4, 6, 5)), "old", "weights"), "packed", torch.float64)
    whole = laid(mean=rc.Mean(over="kept")).value.item()
    for i in (2, 3):
        assert abs(sum(rank["both_groups"][i] for rank in found) - whole) <= 1e-12
