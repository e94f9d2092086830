"""The Triton part of a file with a loss: equal to the kernels of the package to the bit, forward and backward."""

import pytest
import torch

from builders import ejected, ejected_losses, interpreter
from rollout_corr.eject import CannotEject, eject

# A mean over sequences; a mask as weights; weights divided by their mean; signs of advantages; two passes; a reference.
RECIPES = {
    "slime.tis": "triton", "kimi.k25": "both", "slime.mis": "triton", "prime_rl.dppo": "triton", "verl.gspo": "triton",
    "verl.geo_mean": "triton", "swift.grpo": "triton",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["slime.tis", *(pytest.param(x, marks=pytest.mark.slow) for x in RECIPES if x != "slime.tis")]
)
def test_equals_the_kernels_bit_by_bit(name):
    made = eject(name, loss=True, backend=RECIPES[name])
    assert ejected_losses.differences(made) == []


@pytest.mark.slow
def test_rows_run_as_packed_sequences():
    made, packed = (eject("slime.tis", loss=True, backend="triton", layout=layout) for layout in ("padded", "packed"))
    random = torch.Generator().manual_seed(0)
    given = {name: -torch.rand(3, 20, generator=random) for name in ("new_logp", "old_logp", "rollout_logp")}
    given |= {"advantages": torch.randn(3, 20, generator=random), "mask": torch.rand(3, 20, generator=random) > 0.2}
    flat = {name: x.flatten() for name, x in given.items()}
    with interpreter.quick(), ejected.loaded(made) as rows, ejected.loaded(packed) as sequences:
        found = rows["policy_loss"](**given)
        expected = sequences["policy_loss"](**flat, cu_seqlens=torch.tensor([0, 20, 40, 60]))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2].flatten(), expected[2])
    assert found[-1] == expected[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minirl.default", "expected criteria of train/rollout for the Triton part of a loss, got Criterion"),
        ("swift.real", "expected a surrogate of tokens"),
    ],
)
def test_refused(name, message):
    with pytest.raises(CannotEject, match=message):
        eject(name, loss=True, backend="triton")
