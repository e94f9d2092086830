"""The formulas of a token, and the search for rare tokens."""

from __future__ import annotations

import itertools
from decimal import Decimal, localcontext

import pytest
import torch

from rollout_corr.definition.near import NEAR, Each, Near, few_above
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.tokens import GRID_OF_D, k3, to_grid


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5000])
@pytest.mark.parametrize("places", [[], [0], [-1], [0, 1, 62], [10, 63, -1]])
def test_few_are_found_where_they_are(size: int, places: list[int]) -> None:
    """In stretches and behind the last whole one."""
    x = -torch.rand(size, generator=torch.Generator().manual_seed(6)).double()
    for place in places:
        if -size <= place < size:
            x[place] = 0.5
    for bound in (0.0, 0.5):
        found = few_above(x, bound)
        if found is not None:
            assert torch.equal(found, (x > bound).nonzero().squeeze(1))
    assert few_above(x, 0.5) is not None
    assert few_above(x, 0.0) is not None or 64 <= size < 5000
    assert few_above(x, -2.0) is None or size < 64


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-14), (torch.float64, 1e-14)])
@pytest.mark.parametrize("clamp", [20.0, 2.0])
def test_sums_of_each_token(dtype: torch.dtype, within: float, clamp: float) -> None:
    """Two sequences, one of nothing, D up to 18, against 60 digits; measured: 4e-16."""
    steps = [sign * 10.0 ** (i / 9) for i in range(-50, 11) for sign in (-1, 1)]
    d = torch.tensor([*steps, 18.0, -18.0, 0.0], dtype=dtype)
    offsets = torch.tensor([0, 70, 70, d.shape[0]])
    sums = Each(d, Packed(offsets, d.shape[0]), clamp, 18.0)
    with localcontext() as context:
        context.prec = 60
        exact = [(Decimal(x), Decimal(min(max(x, -clamp), clamp))) for x in d.tolist()]
        exact = [(x, y, y.exp() - 1) for x, y in exact]
        pairs = list(itertools.pairwise(offsets.tolist()))
        of_k3 = [float(sum(e - y for _, y, e in exact[a:b])) for a, b in pairs]
        of_excess = [float(sum(e for *_, e in exact[a:b])) for a, b in pairs]
        of_squares = [float(sum(e * e for *_, e in exact[a:b])) for a, b in pairs]
        of_d2 = [float(sum(x * x for x, *_ in exact[a:b])) for a, b in pairs]
    near = {"rel": within, "abs": 1e-18}
    assert sums.k3_of_sequences().tolist() == pytest.approx(of_k3, **near)
    assert sums.excess_of_sequences(offsets[1:], sums.few_excess).tolist() == pytest.approx(of_excess, **near)
    assert sums.excess2_of_sequences(sums.few_excess).tolist() == pytest.approx(of_squares, **near)
    assert sums.d2_of_sequences().tolist() == pytest.approx(of_d2, **near)
    assert [sums.k3, sums.excess2] == pytest.approx([sum(of_k3), sum(of_squares)], **near)
    assert sums.d2 == pytest.approx(sum(of_d2), rel=3e-7 if dtype == torch.float32 else within)
    assert sums.excess(offsets) == pytest.approx(sum(of_excess), **near)
    assert sums.added(torch.ones(3, dtype=torch.float64), sums.few_excess).tolist() == pytest.approx(
        [1.0 + x for x in of_excess], **near
    )
    of_tokens = torch.tensor([float(e - y) for _, y, e in exact], dtype=torch.float64)
    torch.testing.assert_close(sums.k3_of_tokens().double(), of_tokens, rtol=1e-6, atol=1e-9)
    assert torch.equal(sums.d, torch.tensor(d.tolist(), dtype=dtype)) and sums.largest_near() == -float("inf")


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
def test_k3_is_accurate_and_knows_no_neighbours(dtype: torch.dtype, within: float) -> None:
    """Against 60 decimal digits; measured: 4.2e-7 just above |D| = 1/2 in float32, 7.4e-16 in float64."""
    steps = [sign * 10.0 ** (i / 40) for i in range(-320, 52) for sign in (-1, 1)]
    d = torch.tensor([*steps, *(i / 1000 for i in range(-600, 601)), 0.0], dtype=dtype)
    with localcontext() as context:
        context.prec = 60
        exact = [float(Decimal(x).exp() - 1 - Decimal(x)) for x in d.tolist()]
    wanted = torch.tensor(exact, dtype=torch.float64)
    assert ((k3(d).double() - wanted).abs() <= within * wanted).all()
    alone = torch.cat([k3(x[None]) for x in d])
    assert torch.equal(alone, k3(d))


@pytest.mark.parametrize("many", [1, 700])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 3e-7), (torch.float64, 1e-14)])
def test_sums_near_0_and_of_a_few_others(dtype: torch.dtype, within: float, many: int) -> None:
    """Two sequences, one of nothing, D up to 18, against 60 digits; measured: 1.1e-7 in float32, 3e-16 in float64."""
    steps = [sign * 10.0 ** (i / 9) for i in range(-50, 11) for sign in (-1, 1)]
    d = torch.tensor([*steps, *([NEAR, -NEAR, 1e-3] * many), 18.0, -18.0, 0.0], dtype=dtype)
    few = few_above(d.abs(), NEAR)
    assert few is not None or many == 1
    few = (d.abs() > NEAR).nonzero().squeeze(1) if few is None else few
    offsets = torch.tensor([0, 70, 70, d.shape[0]])
    sums = Near(d, Packed(offsets, d.shape[0]), few, 20.0, 18.0)
    with localcontext() as context:
        context.prec = 60
        exact = [(Decimal(x), Decimal(x).exp() - 1) for x in d.tolist()]
        of_k3 = [float(sum(e - x for x, e in exact[a:b])) for a, b in itertools.pairwise(offsets)]
        squares = [float(sum(x * x for x, _ in exact)), float(sum(e * e for _, e in exact))]
    near_k3 = sums.near_k3_of_sequences()
    assert sums.added(near_k3, sums.few_excess - sums.few).tolist() == pytest.approx(of_k3, rel=within)
    assert sums.k3 == pytest.approx(sum(of_k3), rel=within)
    assert Near(d, Packed(offsets, d.shape[0]), few, 20.0, 18.0).k3 == pytest.approx(sum(of_k3), rel=within)
    assert [sums.d2, sums.excess2] == pytest.approx(squares, rel=within)
    # Those of sequences, which share memory, in either order and again.
    for _ in range(2):
        of_sequences = sums.excess2_of_sequences(sums.few_excess), sums.d2_of_sequences()
        assert [x.sum().item() for x in reversed(of_sequences)] == pytest.approx(squares, rel=within)
    each = sums.k3_of_tokens().double()
    assert each.tolist() == pytest.approx([float(e - x) for x, e in exact], rel=5e-7 if within > 1e-9 else 1e-13)


def test_the_grid_is_rounded_once() -> None:
    """Whole numbers, those of trunc(grid * x + copysign(0.5, x)) in float32, which is what the kernels compute."""
    halves = torch.arange(-9, 10) / (2.0 * GRID_OF_D)
    odd = torch.tensor([2.0**23 - 1, 2.0**23 + 1, 2.0**24 - 1, 2.0**24 + 2, 2.0**38]) / GRID_OF_D
    x = torch.cat([halves, halves * 0.999, odd, -odd, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e-39])])
    found = to_grid(x, GRID_OF_D)
    assert torch.equal(found, (x * GRID_OF_D + torch.copysign(torch.tensor(0.5), x)).trunc())
    assert found.tolist()[:4] == [-5.0, -4.0, -4.0, -3.0]
