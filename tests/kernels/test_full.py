"""The columns of detail="full" where they are kept as integers and as a product: at the ends of their ranges."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.rounding import near

pytestmark = INTERPRETED

# Rows of a step and a little, in which a thread has up to 8 tokens.
SHAPE = (3, 150)


def _logp(size: float, above: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(size))
    return above - size * torch.rand(SHAPE, generator=generator)


@pytest.mark.parametrize(
    ("train", "rollout", "clamp"),
    [
        (_logp(90), _logp(91), 40.0), (_logp(60), _logp(61), 22.0), (_logp(60), _logp(61), 23.0),
        (_logp(3), _logp(4), 0.25), (_logp(3), _logp(4), math.log(2.0)), (_logp(3, 2.0), _logp(4, 2.0), 20.0),
        (_logp(1, -200.0), _logp(2, -200.0), 20.0), (-torch.zeros(SHAPE), torch.zeros(SHAPE), 20.0),
    ],
    ids=["products_overflow", "products_just_fit", "clamp_23", "clamp_below_2", "clamp_2", "above_0", "improbable",
         "negative_zero"],
)  # fmt: skip
def test_columns_of_full_detail_at_the_ends_of_their_ranges(train, rollout, clamp):
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[:, 7:] = True
    spec = rc.Spec(detail="full", clamp=clamp)
    found, expected = (
        rc.correct(train, rollout, mask=mask, spec=spec, backend=backend).metrics() for backend in ("triton", "torch")
    )
    for name in ("sequence_train_ppl_mean", "sequence_rollout_ppl_mean"):
        # e^200, of sums in float32.
        assert found.pop(name) == near(expected.pop(name), torch.float32)
    assert found == near(expected, torch.float32)
