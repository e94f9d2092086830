"""`filter_groups` next to plain loops: baselines of groups from the samples that are kept."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near

NAN = math.nan
# Group 0 has a rejected sample, 1 one kept of two, 2 none, 4 one alone; 3 is left out.
REWARDS = [1.0, 100.0, -2.0, 0.5, 7.0, NAN, 0.25, 4.0]
KEEP = [True, False, True, True, False, False, True, True]
GROUP = [0, 0, 0, 0, 1, 2, 4, 1]


@pytest.mark.parametrize("alone", ["zero", "reward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_next_to_plain_loops(alone, dtype):
    """What a rejected sample holds moves nobody, be it 100 or NaN; its own difference is 0."""
    found = rc.filter_groups(torch.tensor(REWARDS, dtype=dtype), torch.tensor(KEEP), torch.tensor(GROUP), alone=alone)
    mean, std, centered = [], [], []
    for reward, keep, group in zip(REWARDS, KEEP, GROUP, strict=True):
        others = [r for r, k, g in zip(REWARDS, KEEP, GROUP, strict=True) if k and g == group]
        apart = alone == "reward" and len(others) == 1
        mean.append(0.0 if apart or not others else statistics.fmean(others))
        std.append(1.0 if apart else statistics.pstdev(others) if others else 0.0)
        centered.append(reward - mean[-1] if keep else 0.0)
    computes = torch.promote_types(dtype, torch.float32)
    assert found.size.tolist() == [3, 3, 3, 3, 1, 0, 1, 1]
    for got, wanted in ((found.mean, mean), (found.std, std), (found.centered, centered)):
        assert got.dtype == computes and got.tolist() == near(wanted, computes)


def test_no_sample():
    nothing = torch.zeros(0)
    assert [x.shape for x in rc.filter_groups(nothing, nothing > 0, nothing.long())] == [(0,)] * 4
