"""The formulas of a token."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
import torch

from rollout_corr.definition.tokens import GRID_OF_D, k3, to_grid


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
def test_k3_is_accurate_and_knows_no_neighbors(dtype: torch.dtype, within: float) -> None:
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


def test_the_grid_is_rounded_once() -> None:
    """Whole numbers, those of trunc(grid * x + copysign(0.5, x)) in float32, which is what the kernels compute."""
    halves = torch.arange(-9, 10) / (2.0 * GRID_OF_D)
    odd = torch.tensor([2.0**23 - 1, 2.0**23 + 1, 2.0**24 - 1, 2.0**24 + 2, 2.0**38]) / GRID_OF_D
    x = torch.cat([halves, halves * 0.999, odd, -odd, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e-39])])
    found = to_grid(x, GRID_OF_D)
    assert torch.equal(found, (x * GRID_OF_D + torch.copysign(torch.tensor(0.5), x)).trunc())
    assert found.tolist()[:4] == [-5.0, -4.0, -4.0, -3.0]
