"""Offsets and lengths from outside: every wrong one is named, whatever its differences and sums wrap around to."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from rollout_corr.definition.offsets import LISTED, OffsetsError, checked_lengths, checked_offsets, offsets_of

BIG = 2**62
WRAPS = [0, BIG, -(2**63), -BIG, 0]

WRONG_OFFSETS = {
    "differences wrap around": (WRAPS, 1, f"do not decrease, got cu_seqlens[1]={BIG} > cu_seqlens[2]={-(2**63)}"),
    "negative": ([-1, 5], 0, "expected offsets within [0, 8] tokens, got cu_seqlens[0]=-1"),
    "beyond": ([0, 9, 9], 1, "expected offsets within [0, 8] tokens, got cu_seqlens[1]=9"),
    "far beyond": ([0, 2**63 - 1], 1, f"got cu_seqlens[1]={2**63 - 1}"),
    "falling": ([0, 4, 2, 5], 1, "expected offsets that do not decrease, got cu_seqlens[1]=4 > cu_seqlens[2]=2"),
    "equal lengths": ([2, 2, 2, 2], 0, "which add lengths up, got lengths: 4 times 2 of 8 tokens"),
    "one length": ([8], 0, "got lengths: 1 times 8 of 8 tokens"),
    "not whole": ([0.0, 2.5, 8.0], 1, "whole numbers within [0, 8] tokens, got cu_seqlens[1]=2.5"),
    "not a number": ([0.0, float("nan")], 1, "got cu_seqlens[1]=nan"),
    "1e30": ([0.0, 1e30], 1, "whole numbers within [0, 8] tokens, got cu_seqlens[1]=1"),
    "bool": ([False, True], None, "expected whole numbers, got bool"),
    "nothing": ([], None, "expected shape [sequences + 1], got [0]"),
    "2-D": ([[0, 8]], None, "expected shape [sequences + 1], got [1, 2]"),
}


@pytest.mark.parametrize("case", WRONG_OFFSETS)
def test_wrong_offsets_are_named(case: str) -> None:
    values, index, message = WRONG_OFFSETS[case]
    with pytest.raises(OffsetsError) as caught:
        checked_offsets(torch.tensor(values), 8)
    assert caught.value.index == index and message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "index", "message"),
    [
        ([BIG] * 4, 0, f"expected lengths within [0, 8] tokens, got lengths[0]={BIG}"),
        ([4, -1], 1, "expected lengths within [0, 8] tokens, got lengths[1]=-1"),
        ([3, 9], 1, "expected lengths within [0, 8] tokens, got lengths[1]=9"),
        ([4, 3, 2], 2, "expected lengths of together at most 8 tokens, got 9 up to lengths[2]=2"),
        ([[8]], None, "expected shape [sequences], got [1, 1]"),
    ],
)
def test_wrong_lengths_are_named(values: list[int], index: int, message: str) -> None:
    with pytest.raises(OffsetsError) as caught:
        offsets_of(torch.tensor(values), 8)
    assert caught.value.index == index and message in str(caught.value)


def test_a_sum_that_wraps_around_is_too_long() -> None:
    """Lengths that are possible one by one; four of them wrap around to 0 together."""
    with pytest.raises(OffsetsError, match=rf"got {2 * BIG} up to lengths\[1\]={BIG}"):
        offsets_of(torch.tensor([BIG] * 4), BIG)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64, torch.half, torch.float64]
)
def test_every_dtype_is_given_as_int64(dtype: torch.dtype) -> None:
    offsets = checked_offsets(torch.tensor([0, 3, 3, 8]).to(dtype), 8)
    lengths = checked_lengths(torch.tensor([3, 0, 5]).to(dtype), 8)
    assert offsets.dtype == lengths.dtype == torch.int64
    assert offsets.tolist() == [0, 3, 3, 8] and lengths.tolist() == [3, 0, 5]
    assert offsets_of(torch.tensor([3, 0, 5]).to(dtype), 8).tolist() == [0, 3, 3, 8]


def test_more_offsets_than_are_listed() -> None:
    """Of many offsets, which are compared as tensors: empty sequences are none that fall."""
    offsets = torch.arange(2 * LISTED) // 2
    assert checked_offsets(offsets, LISTED).equal(offsets)
    offsets[LISTED] = 0
    with pytest.raises(OffsetsError, match="do not decrease") as caught:
        checked_offsets(offsets, LISTED)
    assert caught.value.index == LISTED - 1


def test_unsigned_values_above_int64() -> None:
    with pytest.raises(OffsetsError, match="expected offsets"):
        checked_offsets(torch.tensor([0, 2**64 - 1], dtype=torch.uint64), 8)


def test_random_values() -> None:
    """Python's own integers judge 2,000 random rows; most have values near the ends of int64."""
    draw = random.Random(7)
    right = 0
    for _ in range(2000):
        tokens = draw.choice([0, 5, 40, BIG])
        ends = [-(2**63), -BIG, -1, 0, tokens, BIG, 2**63 - 1]
        values = [draw.choice(ends) if draw.random() < 0.3 else draw.randint(0, tokens) for _ in range(4)]
        values = sorted(values) if draw.random() < 0.6 else values
        total = list(accumulate(values))
        fits = all(0 <= x <= tokens for x in values)
        offsets_fit = fits and values == sorted(values) and not 0 < values[0] == values[-1] == tokens / 4
        for check, good in ((checked_offsets, offsets_fit), (offsets_of, fits and total[-1] <= tokens)):
            try:
                found = check(torch.tensor(values), tokens).tolist()
            except OffsetsError:
                assert not good, values
            else:
                assert good and found == (values if check is checked_offsets else [0, *total]), values
                right += 1
    assert right > 300
