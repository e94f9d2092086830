"""The formulas of a token, and the search for rare tokens."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
import torch

from rollout_corr.definition.tokens import few_above, k3


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5000])
@pytest.mark.parametrize("places", [[], [0], [-1], [0, 1, 62], [10, 63, -1]])
def test_few_are_found_where_they_are(size: int, places: list[int]) -> None:
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


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 5e-7), (torch.float64, 1e-15)])
def test_k3_is_accurate_and_knows_no_neighbours(dtype: torch.dtype, within: float) -> None:
    """Against 60 decimal digits; measured: 4.2e-7 just above |D| = 1/2 in float32, 7.4e-16 in float64."""
    steps = [sign * 10.0 ** (i / 40) for i in range(-320, 52) for sign in (-1, 1)]
    d = torch.tensor([*steps, *(i / 1000 for i in range(-600, 601)), 0.0], dtype=dtype)
    with localcontext() as context:
        context.prec = 60
        exact = [float(Decimal(x).exp() - 1 - Decimal(x)) for x in d.tolist()]
    wanted = torch.tensor(exact, dtype=torch.float64)
    crowd = torch.cat([d, torch.zeros(20 * d.shape[0], dtype=dtype)])
    for found in (k3(d), k3(d, float(d.abs().max())), k3(crowd, float(d.abs().max()))[: d.shape[0]]):
        assert ((found.double() - wanted).abs() <= within * wanted).all()
    alone = torch.cat([k3(x[None], float(x.abs())) for x in d])
    assert torch.equal(alone, k3(d, float(d.abs().max())))
    assert torch.equal(alone, k3(crowd, float(d.abs().max()))[: d.shape[0]])
