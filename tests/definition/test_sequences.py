"""Reductions over the tokens of a sequence, padded and packed."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch

from rollout_corr.definition import sequences
from rollout_corr.definition.sequences import Packed, Rows


def test_sequences_answer_alike() -> None:
    """`Rows` and `Packed` are two shapes of the same questions, gaps and empty sequences included."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 70, generator=generator)
    rows, packed = Rows(6), Packed(torch.arange(7) * 70, 420)
    integers = (x * 1000).long()
    assert torch.equal(rows.sum_integers(integers), packed.sum_integers(integers.flatten().clone()))
    assert torch.equal(rows.max(x), packed.max(x.flatten()))
    assert all(torch.equal(*pair) for pair in zip(rows.ends(x), packed.ends(x.flatten()), strict=True))
    assert torch.allclose(rows.sum(x), packed.sum(x.flatten()), rtol=1e-12)
    gaps = Packed(torch.tensor([3, 3, 40, 41, 41, 400]), 420)
    flat = integers.flatten()
    wanted = [flat[a:b].sum() for a, b in ((3, 3), (3, 40), (40, 41), (41, 41), (41, 400))]
    assert torch.equal(gaps.sum_integers(flat.clone()), torch.stack(wanted))
    assert gaps.max(x.flatten())[0] == -torch.inf
    assert torch.equal(gaps.spread(torch.arange(5))[3:400], torch.tensor([1] * 37 + [2] + [4] * 359))


ENDS = [
    [5, 5, 21, 21, 22, 300, 300, 301, 512, 700, 704, 704],
    [0, 64, 128, 1000],
    [0, 0, 63, 65, 1000],
    [70, 90, 91, 999, 1000],
    [0, 1000],
    [3, 960],
    [1000, 1000],
]


@pytest.mark.parametrize("ends", ENDS)
def test_sums_along_tiles(ends: list[int]) -> None:
    """Sequences that share a tile or are empty, tokens before and behind all, and beyond the last whole tile."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1000, generator=generator) * 1e3
    whole = (torch.randn(1000, generator=generator) * 2.0**30).round()
    packed, pairs = Packed(torch.tensor(ends), 1000), [*itertools.pairwise(ends)]
    tiles = sequences.Tiles(packed.offsets, 1000)
    found, wanted = tiles.sum(x), [math.fsum(x[a:b].tolist()) for a, b in pairs]
    scales = [math.fsum(x[a:b].abs().tolist()) for a, b in pairs]
    assert found.dtype == torch.float64
    # Sums of 64 in float32; measured: 1.1e-7 of the sum of absolute values.
    assert all(abs(a - b) <= 3e-7 * c for a, b, c in zip(found.tolist(), wanted, scales, strict=True))
    for largest in (math.inf, float(whole.abs().max())):
        assert tiles.sum_integers(whole.clone(), largest).tolist() == [int(whole[a:b].long().sum()) for a, b in pairs]
    assert tiles.max(x).tolist() == [max(x[a:b].tolist(), default=-math.inf) for a, b in pairs]
    for found_ends, wanted_ends in zip(tiles.ends(x), (tiles.max(x), tiles.max(-x)), strict=True):
        assert torch.equal(found_ends, wanted_ends)
    # Nothing in one sequence touches another.
    first, last = pairs[len(pairs) // 2]
    x[:first], x[last:] = math.nan, math.inf
    assert tiles.sum(x)[len(pairs) // 2] == found[len(pairs) // 2]
    assert tiles.max(x)[len(pairs) // 2] == max(x[first:last].tolist(), default=-math.inf)
    assert tiles.ends(x)[1][len(pairs) // 2] == -min(x[first:last].tolist(), default=math.inf)


def test_long_sequences_are_summed_along_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most tiles are whole; short ones, other dtypes and what has a gradient are summed token by token."""
    monkeypatch.setattr(sequences, "TILED", 1000)
    with mock.patch.object(sequences, "Tiles", wraps=sequences.Tiles) as cut:
        for size, count, x, tiled in (
            (1000, 2, torch.ones(1000), True),
            (999, 2, torch.ones(999), False),
            (1000, 8, torch.ones(1000), False),
            (1000, 2, torch.ones(1000).double(), False),
            (1000, 2, torch.ones(1000).requires_grad_(), False),
        ):
            cut.reset_mock()
            packed = Packed(torch.arange(count + 1) * (size // count), size)
            assert packed.sum(x).tolist() == [size // count] * count
            assert packed.sum_integers(x.detach().clone()).tolist() == [size // count] * count
            # Without a gradient the second is tiled; it is asked for all the same.
            assert cut.call_count == tiled or x.requires_grad


def test_flags_are_spread_by_a_running_sum() -> None:
    """As the index does it, gaps and empty sequences included."""
    offsets = torch.tensor([3, 3, 40, 41, 41, 400, 420])
    for flags in itertools.product([False, True], repeat=6):
        keep = torch.tensor(flags)
        packed = Packed(offsets, 420)
        assert torch.equal(packed.spread(keep)[3:], keep.index_select(0, packed.ids)[3:])
