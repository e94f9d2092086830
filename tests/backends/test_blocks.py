"""How a batch is cut into blocks, and the sums that the CPU takes apart."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from frozen.runners import run_as
from rollout_corr.backends import blocks, cpu_sums
from rollout_corr.backends.batch import OpenBatch, slots_outside
from rollout_corr.backends.cpu_sums import SMALL
from rollout_corr.backends.read import Given, read_batch


@pytest.mark.parametrize(
    ("outside", "lower", "upper", "beyond", "small"),
    [
        ("clamp", 0.3, 2.0, 0, 0),
        ("clamp", 0.3, 2.0, 3, 0),
        ("zero", 0.3, 2.0, 3, 0),
        ("zero", 0.3, 2.0, 2000, 0),
        ("clamp", 0.3, 2.0, 2000, SMALL),
        ("zero", 0.3, 2.0, 3, SMALL),
        # A token that is small otherwise is beyond the bound.
        ("zero", 0.92, 2.0, 3, 0),
        ("clamp", 0.3, 1.09, 3, 0),
    ],
)
def test_outliers_beyond_the_bounds_are_counted_like_many_tokens(
    outside: str, lower: float, upper: float, beyond: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few outliers the sums of their sequences are corrected; with many, or without the CPU's sums, all are summed.

    Up to a number of tokens all are taken one by one.
    """
    monkeypatch.setattr(cpu_sums, "SMALL", small)
    generator = torch.Generator().manual_seed(8)
    rollout = -torch.rand((4, 1500), generator=generator)
    train = rollout + 0.02 * torch.randn(rollout.shape, generator=generator)
    far = torch.randperm(train.numel(), generator=generator)[:beyond]
    train.view(-1)[far] += torch.where(far % 3 == 0, -2.0, 1.5)
    train[0, 7] = 25.0  # beyond the clamp too
    train[0, 8:10] = rollout[0, 8:10] + torch.tensor([0.1, -0.1])
    mask = (torch.arange(1500) < torch.tensor([1500, 3, 900, 1200])[:, None]).long()
    spec = rc.Spec(weight=rc.Weight.token(lower=lower, upper=upper, outside=outside))
    with mock.patch.object(cpu_sums, "BoundedSums", wraps=cpu_sums.BoundedSums) as bounded:
        metrics = rc.correct(train, rollout, mask=mask, spec=spec).metrics()
    assert bounded.call_count == (beyond < 2000 or small > 0)
    with run_as("whole"):
        wanted = rc.correct(train, rollout, mask=mask, spec=spec).metrics()
    # Measured: 2e-7, because float32 sums have another order; e^20 adds 1e-8. The other way rounds weights near 1 to
    # float32, by up to 6e-8, which their standard deviation keeps.
    wrong = {key: (x, metrics[key]) for key, x in wanted.items() if abs(metrics[key] - x) > 1e-6 * max(0.06, abs(x))}
    assert list(metrics) == list(wanted) and not wrong
    ratios = (train - rollout)[mask == 1].tolist()
    assert metrics["weight_above_upper_fraction"] == sum(x > math.log(upper) for x in ratios) / len(ratios)
    assert metrics["weight_below_lower_fraction"] == sum(x < math.log(lower) for x in ratios) / len(ratios)


@pytest.mark.parametrize("size", [1, 6, 12, 1000])
@pytest.mark.parametrize("lengths", [[], [0, 0], [5, 1, 0, 7, 20, 0, 3, 3, 3, 2]])
def test_spans_are_as_large_as_they_may_be(lengths: list[int], size: int) -> None:
    """Every sequence is in one span; a further one would be too much."""
    offsets = torch.tensor([4, *lengths]).cumsum(0)
    batch = OpenBatch(torch.zeros(60), torch.zeros(60), None, offsets)
    found = list(blocks.spans(batch, size))
    assert [i for rows, _ in found for i in range(rows.start, rows.stop)] == [*range(len(lengths))]
    assert len(found) == 1 or all(rows.stop > rows.start for rows, _ in found)
    for rows, slots in found:
        span, longer = lengths[rows], lengths[rows.start : rows.stop + 1]
        assert slots == slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        assert sum(span) <= size or len(span) == 1
        assert rows.stop == len(lengths) or sum(longer) > size


def test_a_batch_a_little_larger_than_a_block_is_one_where_that_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a mask, tokens outside, or room of the caller's, with which a larger block would be more memory."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    spec = rc.Spec(weight=rc.Weight.token(upper=1.1))

    def cut(size: int, of: rc.Spec = spec, outside: int = 0, **more: object) -> int:
        x, offsets = torch.zeros(size), torch.tensor([0, 40, size - outside])
        batch = read_batch(Given(x, x, rc.Batch(cu_seqlens=offsets), of))
        for name, value in more.items():
            setattr(batch, name, value)
        return len(list(blocks.blocks_of(batch, blocks.slots_of(batch, of, slots_outside(batch)))))

    assert [cut(size) for size in (64, 72, 73)] == [1, 1, 2]
    assert cut(72, outside=1) == cut(72, mask=torch.ones(72)) == cut(72, weights_out=torch.zeros(72)) == 2
    assert [cut(size, rc.Spec()) for size in (128, 129)] == [1, 2]
