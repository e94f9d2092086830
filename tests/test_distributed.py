"""What crosses ranks today: merged statistics, and the mean of batch normalisation. Real processes, gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

import rollout_corr as rc
from ranks import RANKS, part, work
from rollout_corr.testing import example_batch


def test_ranks_agree_with_one_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=RANKS)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]
    whole = part(example_batch(sequences=30, median_length=40), 0, 30)
    weights = torch.cat([rank["weights"] for rank in found])
    # The mean is a float64 sum of two parts instead of one: its last bit may differ, and so may the weights'.
    assert torch.allclose(weights, whole.weights, rtol=2e-7, atol=0.0)
    assert not torch.allclose(weights, part_alone(whole), rtol=1e-3)
    expected = whole.metrics()
    for rank in found:
        assert rank["calls"] == 2
        assert set(rank["metrics"]) == set(expected)
        for key, value in expected.items():
            assert abs(rank["metrics"][key] - value) <= 1e-6 * max(1.0, abs(value)), key


def part_alone(whole: rc.Correction) -> torch.Tensor:
    """The weights that ranks would get without a group, each divided by its own mean."""
    batch = example_batch(sequences=30, median_length=40)
    alone = torch.cat([part(batch, 0, 7).weights, part(batch, 7, 30).weights])
    assert alone.shape == whole.weights.shape
    return alone
