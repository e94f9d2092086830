"""The CPU's own sums: of whole numbers as floats, of small D by a series, and of outliers one by one."""

from __future__ import annotations

import itertools
from decimal import Decimal, localcontext

import pytest
import torch

from rollout_corr.backends.cpu_sums import SMALL_D, SeriesSums, k3_within, outliers_above
from rollout_corr.definition.sequences import Packed


def test_whole_numbers_are_summed_where_float64_holds_them() -> None:
    """Up to 2^53 in all; a running sum of int64 beyond, where float64 would lose the last digit."""
    x = torch.tensor([2.0**52, 2.0**52 - 1.0, 1.0, -(2.0**52)], dtype=torch.float64)
    packed = Packed(torch.tensor([0, 2, 2, 4]), 4)
    assert packed.sum_integers(x.clone(), 2.0**51).dtype == torch.float64
    for largest in (2.0**52, None):
        counted = packed.sum_integers(x.clone(), largest)
        assert counted.dtype == torch.int64 and counted.tolist() == [2**53 - 1, 0, 1 - 2**52]


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
    sums = SeriesSums(d, Packed(offsets, d.shape[0]), outliers, 20.0, 18.0)
    with localcontext() as context:
        context.prec = 60
        exact = [(Decimal(x), Decimal(x).exp() - 1) for x in d.tolist()]
        of_k3 = [float(sum(e - x for x, e in exact[a:b])) for a, b in itertools.pairwise(offsets)]
        squares = [float(sum(x * x for x, _ in exact)), float(sum(e * e for _, e in exact))]
    nothing = torch.zeros(3, dtype=torch.float64)
    # Of sums of D that are 0 what is left is k3.
    found = sums.excess_of_sequences(nothing, sums.outlier_excess)
    assert found.tolist() == pytest.approx(of_k3, rel=within)
    assert sums.k3 == pytest.approx(sum(of_k3), rel=within)
    assert SeriesSums(d, Packed(offsets, d.shape[0]), outliers, 20.0, 18.0).k3 == pytest.approx(sum(of_k3), rel=within)
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
