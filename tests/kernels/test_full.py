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
    ("train", "rollout", "clamp", "over"),
    [
        (_logp(90), _logp(91), 40.0, "sequence"), (_logp(3), _logp(4), 0.25, "turn"),
        (_logp(3, 2.0), _logp(4, 2.0), 20.0, None), (_logp(1, -200.0), _logp(2, -200.0), 20.0, None),
        (-torch.zeros(SHAPE), torch.zeros(SHAPE), 20.0, "sequence"),
    ],
    ids=["far_apart", "small_clamp", "above_0", "improbable", "negative_zero"],
)  # fmt: skip
def test_columns_of_full_detail_at_the_ends_of_their_ranges(train, rollout, clamp, over):
    """And the bins of weights, to the count."""
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[:, 7:] = True
    mask[1, 9] = False
    weight = None if over is None else rc.Weight.geometric(upper=2.0, over=over)
    batch = rc.Batch(mask=mask, turns="runs" if over == "turn" else None)
    spec = rc.Spec(weight, detail="full", clamp=clamp)
    found, expected = (rc.correct(train, rollout, batch, spec=spec, backend=name) for name in ("triton", "torch"))
    sums = [i for i, name in enumerate(schema.layout(spec)[0]) if name.startswith("histogram")]
    assert torch.equal(found.statistics.sums[sums], expected.statistics.sums[sums])
    found, expected = found.metrics(), expected.metrics()
    for name in ("sequence_train_ppl_mean", "sequence_rollout_ppl_mean"):
        # e^200, of sums in float32.
        assert found.pop(name) == near(expected.pop(name), torch.float32)
    assert found == near(expected, torch.float32)
