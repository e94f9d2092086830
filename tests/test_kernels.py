"""The kernels against the reference and the oracle: interpreted on a CPU, compiled on a GPU, the same tests.

`backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import pytest

from batches import one_thread, wild
from kernel_cases import VARIANTS, WIDE, batch, check, fitted, shaped

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


def cut_batch(name):
    """A batch of one of the variants, and its Spec with bounds that cut it."""
    number = list(VARIANTS).index(name)
    sequences = batch(number, advantages="sequence" if number % 3 == 0 else "token")
    if number % 4 == 1:
        sequences = wild(sequences)
    return sequences, fitted(VARIANTS[name], sequences)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, device):
    """Every branch over many small tiles; every criterion rejects something and keeps something."""
    sequences, spec = cut_batch(name)
    # The interpreter takes half a second a call, so there each variant has one layout, and all of them are slow.
    layouts = ("packed_gaps", "padded_left")
    for layout in layouts if device == "cuda" else [layouts[list(VARIANTS).index(name) % 2]]:
        with shaped(WIDE):
            _, expected = check(sequences, spec, layout, device)
    for criterion, verdict in zip(spec.criteria, expected.verdicts, strict=True):
        rows = [row if isinstance(row, list) else [row] for row in verdict.failed]
        assert {failed for row in rows for failed in row} == {True, False}, criterion
