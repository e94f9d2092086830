"""The columns of detail="full", which are kept as integers, and what plain torch adds: at the ends of their ranges."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from builders.rounding import near
from rollout_corr.metrics import schema

pytestmark = INTERPRETED

# Rows of a step and a little, in which a thread has up to 8 tokens.
SHAPE = (3, 150)


def _logp(size: float, above: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(size))
    return above - size * torch.rand(SHAPE, generator=generator)


@pytest.mark.parametrize(
    ("train", "rollout", "clamp"),
    [
        (_logp(90), _logp(91), 40.0), (_logp(3), _logp(4), 0.25), (_logp(3, 2.0), _logp(4, 2.0), 20.0),
        (_logp(1, -200.0), _logp(2, -200.0), 20.0), (-torch.zeros(SHAPE), torch.zeros(SHAPE), 20.0),
    ],
    ids=["far_apart", "small_clamp", "above_0", "improbable", "negative_zero"],
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


@pytest.mark.parametrize(
    "weight", [rc.Weight.product(upper=2.0), rc.Weight.geometric(over="turn")], ids=["sequences", "turns"]
)
def test_the_bins_of_weights_are_those_of_plain_torch(weight):
    train, rollout, mask = (x[:, :20] for x in (_logp(2), _logp(3), _logp(4) < -1.0))
    mask[0] = False
    rollout[1, mask[1]] = train[1, mask[1]]
    batch = rc.Batch(mask=mask, turns="runs" if weight.over == "turn" else None)
    spec = rc.Spec(weight, detail="full")
    found, expected = (
        rc.correct(train, rollout, batch, spec=spec, backend=backend).statistics for backend in ("triton", "torch")
    )
    bins = [i for i, name in enumerate(schema.layout(spec)[0]) if name.startswith("histogram_of_weights")]
    assert len(bins) == 512 and expected.sums[bins].sum() > 1
    assert torch.equal(found.sums[bins], expected.sums[bins])
