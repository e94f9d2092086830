"""The kernels as compiled code, on the CPU: right numbers, nothing out of bounds, no race, whatever the order."""

from __future__ import annotations

import pytest

from ptx.cases import CASES
from ptx.worker import attempt, start

# The rest are slow: a variant costs three seconds of Triton's compiler where its cache is cold, and two here.
FEW = ("metrics_short", "product_geometric_padded", "loss_ppo_packed")


@pytest.fixture(scope="module")
def process():
    """One process, so that what it has compiled and read serves every test."""
    with start() as pool:
        yield pool


@pytest.mark.parametrize("name", FEW)
def test_some_variants(name, process):
    assert process.submit(attempt, name, 0).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_variant(name, process):
    """Under two orders."""
    for seed in (1000, 2000):
        assert process.submit(attempt, name, seed).result() == ""
