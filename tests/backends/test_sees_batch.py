"""The look at a whole batch where values may be read: the bits of the look where they may not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from rollout_corr.backends import sees_batch
from rollout_corr.backends.search import begin, values_of
from rollout_corr.backends.sees_batch import AsMany, WholeBatch
from rollout_corr.definition.sequences import Packed


def searched(x, side, count):
    search, values = begin(AsMany(torch.tensor(float(count))), side, x.dtype, x.device), values_of(side, x, None)
    while not search.over():
        search = search.narrowed(search.table(values))
    return search.bound()


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_value_that_is_chosen(side, dtype):
    """Ties, infinities, zeros of both signs, NaN, and more asked for than there are."""
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 7, 300):
        x = (torch.randn(size, generator=generator) * 4).round().to(dtype) / 2
        x[::5] = torch.tensor([math.nan, math.inf, -0.0, -math.inf]).repeat(size)[: x[::5].shape[0]].to(dtype)
        for count in {1, 2, max(1, size // 3), size, size + 1}:
            assert sees_batch._last_of(x, side, count) == searched(x, side, count), (size, count)
    assert searched(x[:0], side, 1) == sees_batch._last_of(x[:0], side, 1)


def seen(x, trains, block):
    """A batch of sequences of one length, as it is read whole or as a block."""
    found = SimpleNamespace(tokens=None, counted=trains, x=x)
    batch = SimpleNamespace(train=x)
    return WholeBatch(batch, found, torch.arange(5), lambda total: total, block, True)


@pytest.mark.parametrize("largest", [0.5, 30.0, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean(largest, dtype):
    """Of more tokens than a chunk has, with values that a chunk's int64 does not hold, and with tokens left out."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3 * sees_batch.CHUNK + 5, generator=generator, dtype=torch.float64).to(dtype)
    x[7] = largest
    for trains in (None, torch.rand(x.shape[0], generator=generator) < 0.7):
        kept = x.clone()
        by_block, whole = (seen(x, trains, block).mean(x) for block in (Packed(torch.tensor([0, 1]), 1), None))
        assert by_block == whole and x.equal(kept)
        if largest < 1e3:
            assert whole.item() == pytest.approx(
                kept[... if trains is None else trains].double().mean().item(), abs=1e-7
            )


def test_nothing_trains():
    nothing = torch.zeros(4, dtype=torch.bool)
    for block in (Packed(torch.tensor([0, 4]), 4), None):
        assert seen(torch.ones(4), nothing, block).mean(torch.ones(4)) == 0.0
