"""The CPU's own sums: along tiles, of small D by a series, and of outliers one by one."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext
from unittest import mock

import pytest
import torch

from rollout_corr.backends import cpu_sums
from rollout_corr.backends.cpu_sums import SMALL_D, CpuPacked, SeriesSums, k3_within, outliers_above

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
    packed, pairs = CpuPacked(torch.tensor(ends), 1000), [*itertools.pairwise(ends)]
    tiles = cpu_sums.Tiles(packed.offsets, 1000)
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
    monkeypatch.setattr(cpu_sums, "TILED", 1000)
    with mock.patch.object(cpu_sums, "Tiles", wraps=cpu_sums.Tiles) as cut:
        for size, count, x, tiled in (
            (1000, 2, torch.ones(1000), True),
            (999, 2, torch.ones(999), False),
            (1000, 8, torch.ones(1000), False),
            (1000, 2, torch.ones(1000).double(), False),
            (1000, 2, torch.ones(1000).requires_grad_(), False),
        ):
            cut.reset_mock()
            packed = CpuPacked(torch.arange(count + 1) * (size // count), size)
            assert packed.sum(x).tolist() == [size // count] * count
            assert packed.sum_integers(x.detach().clone()).tolist() == [size // count] * count
            # Without a gradient the second is tiled; it is asked for all the same.
            assert cut.call_count == tiled or x.requires_grad


def test_flags_are_spread_by_a_running_sum() -> None:
    """As the index does it, gaps and empty sequences included."""
    offsets = torch.tensor([3, 3, 40, 41, 41, 400, 420])
    for flags in itertools.product([False, True], repeat=6):
        keep = torch.tensor(flags)
        packed = CpuPacked(offsets, 420)
        assert torch.equal(packed.spread(keep)[3:], keep.index_select(0, packed.ids)[3:])


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5000])
@pytest.mark.parametrize("places", [[], [0], [-1], [0, 1, 62], [10, 63, -1]])
def test_outliers_are_found_where_they_are(size: int, places: list[int]) -> None:
    """In stretches and behind the last whole one."""
    x = -torch.rand(size, generator=torch.Generator().manual_seed(6)).double()
    for place in places:
        if -size <= place < size:
            x[place] = 0.5
    for bound in (0.0, 0.5):
        found = outliers_above(x, bound)
        if found is not None:
            assert torch.equal(found, (x > bound).nonzero().squeeze(1))
    assert outliers_above(x, 0.5) is not None
    assert outliers_above(x, 0.0) is not None or 64 <= size < 5000
    assert outliers_above(x, -2.0) is None or size < 64


@pytest.mark.parametrize("many", [1, 700])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 3e-7), (torch.float64, 1e-14)])
def test_sums_of_small_d_and_of_outliers(dtype: torch.dtype, within: float, many: int) -> None:
    """Two sequences, one of nothing, D up to 18, against 60 digits; measured: 1.1e-7 in float32, 3e-16 in float64."""
    steps = [sign * 10.0 ** (i / 9) for i in range(-50, 11) for sign in (-1, 1)]
    d = torch.tensor([*steps, *([SMALL_D, -SMALL_D, 1e-3] * many), 18.0, -18.0, 0.0], dtype=dtype)
    outliers = outliers_above(d.abs(), SMALL_D)
    assert outliers is not None or many == 1
    outliers = (d.abs() > SMALL_D).nonzero().squeeze(1) if outliers is None else outliers
    offsets = torch.tensor([0, 70, 70, d.shape[0]])
    sums = SeriesSums(d, CpuPacked(offsets, d.shape[0]), outliers, 20.0, 18.0)
    with localcontext() as context:
        context.prec = 60
        exact = [(Decimal(x), Decimal(x).exp() - 1) for x in d.tolist()]
        of_k3 = [float(sum(e - x for x, e in exact[a:b])) for a, b in itertools.pairwise(offsets)]
        squares = [float(sum(x * x for x, _ in exact)), float(sum(e * e for _, e in exact))]
    nothing = torch.zeros(3, dtype=torch.float64)
    found = sums.excess_of_sequences(nothing, sums.outlier_excess - sums.outliers + sums.outlier_d)
    assert found.tolist() == pytest.approx(of_k3, rel=within)
    assert sums.k3 == pytest.approx(sum(of_k3), rel=within)
    assert SeriesSums(d, CpuPacked(offsets, d.shape[0]), outliers, 20.0, 18.0).k3 == pytest.approx(
        sum(of_k3), rel=within
    )
    assert [sums.d2, sums.excess2] == pytest.approx(squares, rel=within)
    each = sums.k3_of_tokens().double()
    assert each.tolist() == pytest.approx([float(e - x) for x, e in exact], rel=5e-7 if within > 1e-9 else 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [0.125, 0.5, 1.0, 3.0])
def test_the_series_of_k3_is_exact_to_roundings(dtype, largest):
    """Within 8 roundings (measured: 3) of a sum of 59 terms in float64, next to 0 and at the ends."""
    d = torch.cat([torch.linspace(-largest, largest, 4001, dtype=torch.float64), torch.logspace(-6, -1, 50).double()])
    d = d[d.abs() <= largest].to(dtype)
    exact = sum(
        d.double() ** n / float(torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64)).exp())
        for n in range(60, 1, -1)
    )
    found = k3_within(d, largest).double()
    worst = ((found - exact).abs() / exact.abs().clamp(min=1e-300)).max()
    assert worst <= 8 * torch.finfo(dtype).eps
