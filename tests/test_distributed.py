"""Several ranks: real processes, gloo. One start of 2 ranks and one of 4 does everything; see ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import ranks as worker
from batches import assert_same_results, assert_same_statistics, lay_out, one_thread, outcome, random_sequences
from split_cases import SPECS, joined, together


@pytest.fixture(scope="module", params=(2, 4))
def found(request, tmp_path_factory):
    """What every rank found."""
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


def test_ranks_agree_with_one_process(found):
    whole = worker.part(worker.example(), 0, 30)
    weights = torch.cat([rank["uneven_shares"]["weights"] for rank in found])
    # The mean is a float64 sum of two parts instead of one: its last bit may differ, and so may the weights'.
    assert torch.allclose(weights, whole.weights, rtol=2e-7, atol=0.0)
    alone = torch.cat([worker.part(worker.example(), *edges).weights for edges in ((0, 7), (7, 30))])
    assert not torch.allclose(weights, alone, rtol=1e-3)
    for rank in found:
        assert rank["uneven_shares"]["calls"] == 2
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
    for number, rank in enumerate(found):
        expected = f"got {3 + (number == 1)} on this one and 3 to 4 on all"
        assert expected in rank["unequal_counts"], rank["unequal_counts"]


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
