"""Tolerances of all comparisons of floats in the tests: how far rounding may move a result.

A rounding of a number as large as `size` is off by at most u * size, where u is half the epsilon of the dtype. Those of
n operations have random signs and add up to sqrt(n) of that; beyond four deviations no machine goes, whatever its
vectors, its exponentials and the order of its sums. So

    margin(dtype, terms, size) = 4 u sqrt(terms) size,

whose relative part goes with the result's own size. The absolute part goes with what the result is made of: |q - p|
of two probabilities is a difference of numbers as large as 1, and is off by u however small it is. Most results of
this package are made of ratios, probabilities and log-probs, which are about 1, the default; a tensor's are about its
largest value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Of a formula, and of a sum over a test's batch with a formula in each term.
FORMULA, SUM = 16, 1024
# What looks at a batch adds up multiples of this, so that nothing depends on the order of tokens.
GRID = 2.0**-38


def margin(dtype: torch.dtype = torch.float64, terms: int = SUM, size: float = 1.0) -> float:
    """The error of a result of so many operations on numbers as large as `size`, computed in a dtype."""
    return 2.0 * torch.finfo(dtype).eps * math.sqrt(terms) * size


def near(wanted: Any, dtype: torch.dtype = torch.float64, terms: int = SUM, size: float = 1.0) -> Any:
    """Numbers, a list or a mapping of them to compare with by ==; a size of 0 leaves the relative part alone."""
    # lab.aot imports this module where .ci/release/smoke.py runs: with torch alone, without pytest.
    import pytest

    return pytest.approx(wanted, rel=margin(dtype, terms), abs=margin(dtype, terms, size), nan_ok=True)


def assert_near(
    found: Tensor, wanted: Tensor, dtype: torch.dtype | None = None, terms: int = SUM, size: float | None = None
) -> None:
    """Require tensors equal but for the rounding of `terms` operations in `dtype` on numbers of `size`, or `wanted`."""
    dtype = found.dtype if dtype is None else dtype
    if size is None:
        sizes = wanted.detach().abs()
        size = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0
    within = {"rtol": margin(dtype, terms), "atol": margin(dtype, terms, size)}
    torch.testing.assert_close(found, wanted, **within, equal_nan=True)
