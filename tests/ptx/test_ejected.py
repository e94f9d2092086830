"""Kernels of ejected files as compiled code, on the CPU: nothing out of bounds, no race, the package's results."""

from __future__ import annotations

import pytest

from ptx import ejected
from ptx.worker import outcome_of, start


@pytest.fixture(scope="module")
def process():
    """One process, in which kernels are compiled."""
    with start() as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl.token_truncate", "trl.sequence_mask"])
def test_a_file_of_kernels(name, process):
    assert process.submit(outcome_of, ejected.run_ejected, name).result() == ""
