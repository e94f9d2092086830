"""A whole step, correction and loss in one pass over the tokens, against a correction and a loss on plain torch."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from aot.step_variants import GEOMETRIC, REJECTION, STEP_VARIANTS, TIS, VETO
from builders.kernel_cases import MIDDLE, NARROW, WIDE, shaped, unchecked, watched
from builders.launches import counted_launches
from builders.step_cases import compare_step, step_batch

pytestmark = pytest.mark.usefixtures("one_thread")

# Of a tile of 16: an empty and a one-token sequence, several in a tile, one over several tiles.
LENGTHS = (5, 1, 0, 26, 3)
# These take every branch between them; the others run as compiled code.
HERE = ("tis_packed", "geometric_veto_padded", "tis_kl", "of_new", "bypass", "zeroed")


@pytest.mark.parametrize("name", HERE)
def test_variants(name):
    number = list(STEP_VARIANTS).index(name)
    given = step_batch(STEP_VARIANTS[name], LENGTHS, number)
    with shaped(MIDDLE), unchecked(), watched():
        compare_step(given)


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [True, False])
@pytest.mark.parametrize("shapes", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", STEP_VARIANTS)
def test_every_variant(name, shapes, spoiled):
    number = list(STEP_VARIANTS).index(name)
    given = step_batch(STEP_VARIANTS[name], LENGTHS, 100 + number, spoiled)
    with shaped(shapes), unchecked(), watched():
        compare_step(given)


@pytest.mark.parametrize("spec", [TIS, rc.Spec(rc.Weight.token(upper=2.0), (REJECTION, GEOMETRIC, VETO))])
def test_three_launches(spec):
    """One pass over the tokens, one launch behind it, one in backward: criteria of sequences take no pass of theirs."""
    given = step_batch(STEP_VARIANTS["tis_packed"], LENGTHS, 0)
    with counted_launches() as count, unchecked():
        out, _ = given.loss("triton", spec)
        assert count.total() == 3
        assert out.weights.shape == out.mask.shape
        assert count.total() > 3, "weights and mask are made when somebody asks"
        made = count.total()
        assert out.weights is not None and out.mask is not None and count.total() == made


@pytest.mark.parametrize(
    ("spec", "loss"),
    [
        (rc.Spec(rc.Weight.product(upper=2.0)), rc.Loss()),
        (rc.Spec(rc.Weight.token(upper=2.0, normalize="batch")), rc.Loss()),
        (rc.Spec(TIS.weight, detail="full"), rc.Loss()),
        (
            rc.Spec(TIS.weight, (rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, drop="token"),)),
            rc.Loss(),
        ),
        (rc.Spec(TIS.weight, report=("native", "verl")), rc.Loss()),
        (TIS, rc.Loss(rc.GSPO())),
        (TIS, rc.Loss(rc.PPO(), kl=rc.KL("k2", 0.1, scope="all"))),
        (rc.Spec(TIS.weight, (VETO,), rejected="zero"), rc.Loss(rc.PPO(), regularizer=rc.SquaredLogRatio(0.1))),
    ],
    ids=["product", "normalized", "full", "thinning", "report", "gspo", "kl of all", "zeroed with a regularizer"],
)
def test_what_stays_two_calls(spec, loss):
    """The same numbers, by a correction with a pass of its own."""
    variant = STEP_VARIANTS["tis_padded" if loss.kl is None else "tis_kl"]
    given = step_batch(variant, (9, 5, 0), 3)
    old = {"old_logp": given.old, "rollout_logp": given.rollout, "ref_logp": None if loss.kl is None else given.ref}
    found = []
    for backend in ("triton", "torch"):
        new = given.new.clone().requires_grad_()
        with counted_launches() as count, unchecked():
            out = rc.policy_loss(new, given.advantages, given.batch, loss, spec=spec, backend=backend, **old)
        found.append((out.value.item(), out.keep, out.mask))
        assert count.total() in (0, *range(4, 8)), count
    (value, *decided), (wanted, *expected) = found
    assert value == pytest.approx(wanted, rel=1e-5) and all(map(torch.equal, decided, expected))


def test_a_sequence_that_its_last_token_rejects_has_no_gradient():
    """Its gradient was written before anybody saw the token: in another tile, by another program."""
    given = step_batch(STEP_VARIANTS["tis_packed"], (3, 40, 5), 0, spoiled=False)
    last = given.batch.cu_seqlens[2] - 1
    given.batch.mask[last] = True
    for bad in (math.nan, -math.inf):
        given.rollout[last] = bad
        with shaped(NARROW), unchecked(), watched():
            out, slope = given.loss("triton")
        assert out.keep.tolist() == [True, False, True]
        assert not slope[given.batch.cu_seqlens[1] : last + 1].any() and slope[: given.batch.cu_seqlens[1]].any()
        assert out.metrics()["sequences_trained"] == 2 and math.isfinite(out.value.item())


def test_weights_of_inputs_that_were_written_to_are_refused():
    given = step_batch(STEP_VARIANTS["tis_packed"], LENGTHS, 0)
    with unchecked():
        out, _ = given.loss("triton")
        given.rollout.add_(1.0)
        with pytest.raises(RuntimeError, match="rollout_logp was written to"):
            _ = out.weights
