"""A whole step, correction and loss in one pass over the tokens, against a correction and a loss on plain torch."""

from __future__ import annotations

import math
import pickle
import weakref
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import MIDDLE, NARROW, WIDE, shaped, unchecked, watched
from builders.launches import counted_launches
from builders.step_cases import assert_one_pass, compare_step, step_batch
from lab.aot.step_variants import GEOMETRIC, REJECTION, STEP_VARIANTS, TIS, VETO
from rollout_corr.specs.terms import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

# Of a tile of 16: an empty and a one-token sequence, several in a tile, one over several tiles.
LENGTHS = (5, 1, 0, 26, 3)
# These take every branch between them; the others run as compiled code.
HERE = ("tis_packed", "tis_kl", "of_new", "bypass", "zeroed", "tis_propagate", "geometric_zeroed", "bypass_product")


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


ALL = rc.Spec(rc.Weight.token(upper=2.0), (REJECTION, GEOMETRIC, VETO))


@pytest.mark.parametrize(
    ("spec", "surrogate", "launches"),
    [(TIS, rc.PPO(), 3), (ALL, rc.PPO(), 3), (rc.Spec(rc.Weight.product(upper=2.0)), rc.PPO(), 5), (TIS, rc.GSPO(), 5)],
    ids=["token weights", "criteria of sequences too", "weights of sequences", "two passes"],
)
def test_launches(spec, surrogate, launches):
    """One pass, one launch behind it and one in backward; `read` and `decide` first where sequences have weights."""
    given = step_batch(STEP_VARIANTS["tis_packed"], LENGTHS, 0)
    new = given.new.clone().requires_grad_()
    options = {"old_logp": given.old, "rollout_logp": given.rollout, "spec": spec, "backend": "triton"}
    with counted_launches() as count, unchecked():
        out = rc.policy_loss(new, given.advantages, given.batch, rc.Loss(surrogate), **options)
        out.value.backward()
        assert count.total() == launches
        assert out.weights.shape == out.mask.shape
        assert count.total() > launches, "weights and mask are made when somebody asks"
        made = count.total()
        assert out.weights is not None and out.mask is not None and count.total() == made


THINNING = rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, drop="token")


@pytest.mark.parametrize(
    "spec",
    [
        rc.Spec(rc.Weight.token(upper=2.0, normalize="batch")),
        rc.Spec(TIS.weight, detail="full"),
        rc.Spec(TIS.weight, (THINNING,)),
        rc.Spec(TIS.weight, report=("native", "verl")),
    ],
    ids=["normalized", "full", "thinning", "report"],
)
def test_what_stays_two_calls(spec):
    """The same numbers, by a correction with a pass of its own."""
    given = step_batch(STEP_VARIANTS["tis_padded"], (9, 5, 0), 3)
    with counted_launches() as count, unchecked():
        found, slope = given.loss("triton", spec)
        made = count.total()
        assert found.weights is not None and found.mask is not None and count.total() == made
    like, like_slope = given.loss("torch", spec)
    assert_one_pass(found, slope, like, like_slope)


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


@pytest.mark.parametrize("weight", [rc.Weight.token(upper=2.0), rc.Weight.product(upper=2.0)], ids=["token", "product"])
class TestWeights:
    """With weights of tokens, and with those of sequences, which are decided about first."""

    def test_a_dry_run_takes_nothing_out_of_the_loss(self, weight):
        given = step_batch(STEP_VARIANTS["tis_packed"], (9, 1, 5), 0)
        spec = rc.Spec(weight, (REJECTION, GEOMETRIC), apply=False)
        with shaped(MIDDLE), unchecked(), watched():
            found, slope = given.loss("triton", spec)
        assert not found.keep.any() and slope.any()
        assert_one_pass(found, slope, *given.loss("torch", spec))

    def test_a_tile_without_a_valid_token_has_no_extrema(self, weight):
        """Where NaN propagates extrema are kept as integers, and one of them is of no float."""
        given = step_batch(STEP_VARIANTS["tis_padded"], (3, 20), 0, spoiled=False)
        assert not given.batch.mask[0, 16:].any(), "the second tile of the first row"
        spec = rc.Spec(weight, nonfinite="propagate")
        with shaped(NARROW), unchecked(), watched():
            found, slope = given.loss("triton", spec)
        assert math.isfinite(found.metrics()["surrogate_ratio_max"]) and math.isfinite(found.metrics()["weight_max"])
        assert_one_pass(found, slope, *given.loss("torch", spec))

    def test_what_else_a_batch_brings(self, weight):
        """Factors of tokens, two external tensors, a mean of sequences, and a ratio to what sampled the tokens.

        Then the correction's numerator is a tensor of its own, and its denominator is the loss's.
        """
        # Its tokens are weighed behind the mask of rejection too: by what is not rejected for a NaN.
        kl = rc.KL("k2", 0.1, scope="all", weight="weights") if weight.over == "sequence" else None
        variant = STEP_VARIANTS["tis_packed" if kl is None else "tis_kl"]
        objective = Objective(rc.PPO(of="new/rollout"), kl, mean=rc.Mean("sequence", "kept"))
        given = step_batch(replace(variant, objective=objective), LENGTHS, 0)
        place = torch.arange(given.new.shape[0])
        external = {"first": place % 7 / 7, "second": place % 5 / 5}
        given.batch = replace(given.batch, external=external, scale=place % 3 / 2)
        spec = rc.Spec(
            weight,
            (
                rc.Criterion("external", name="first", upper=0.8),
                rc.Criterion("external", over="sequence", reduce="max", name="second", upper=0.7),
            ),
        )
        with shaped(MIDDLE), unchecked(), watched():
            found, slope = given.loss("triton", spec)
        assert type(found) is not rc.PolicyLoss and 0 < found.metrics()["sequences_trained"] < 4 and slope.any()
        assert_one_pass(found, slope, *given.loss("torch", spec))


def test_an_expanded_advantage_that_is_infinite_selects_no_sequence():
    """To a criterion it is one of tokens, and the finite ones count; the loss may read it once a row."""
    given = step_batch(STEP_VARIANTS["tis_padded"], (3, 5), 0, spoiled=False)
    given.advantages = torch.tensor([[math.inf], [1.0]]).expand(2, 10)
    spec = rc.Spec(
        criteria=(rc.Criterion("abs", over="sequence", reduce="max", upper=1e-6, when="positive_advantage"),)
    )
    with shaped(MIDDLE), unchecked():
        found, slope = given.loss("triton", spec)
    assert found.keep.tolist() == [True, False]
    assert_one_pass(found, slope, *given.loss("torch", spec))


@pytest.mark.parametrize("name", ["rollout_logp", "kept_mass", "cu_seqlens"])
def test_tensors_of_inference_mode(name):
    """Nobody counts the writes to them, and autograd does not save them."""
    variant = STEP_VARIANTS["tis_packed"]
    given = step_batch(
        replace(variant, objective=replace(variant.objective, mean=rc.Mean("sequence"))), (3, 5), 0, False
    )
    with torch.inference_mode():
        if name == "rollout_logp":
            given.rollout = given.rollout.clone()
        elif name == "kept_mass":
            given.batch = replace(given.batch, kept_mass=rc.KeptMass(torch.zeros_like(given.rollout)))
        else:
            given.batch = replace(given.batch, cu_seqlens=given.batch.cu_seqlens.clone())
    with shaped(MIDDLE), unchecked():
        assert_one_pass(*given.loss("triton"), *given.loss("torch"))


# What backward multiplies by: nothing to do for 1; else in place, or into a new tensor where the graph is kept.
UPSTREAM = (1.0, 3.0, 0.0, math.nan, 1.0)


@pytest.mark.parametrize("name", ["tis_packed", "tis_padded", "tis_bf16"])
def test_upstream_gradients(name):
    """A gradient over the divisor that was assumed, or over another: right whatever comes, and however often."""
    given = step_batch(STEP_VARIANTS[name], (5, 9), 1, spoiled=False)
    options = {"old_logp": given.old, "rollout_logp": given.rollout, "spec": TIS, "backend": "triton"}
    leaf = given.new.clone().requires_grad_()
    close = {"rtol": 2 * torch.finfo(leaf.dtype).eps, "atol": 0.0, "equal_nan": True}
    with unchecked():
        value = rc.policy_loss(leaf, given.advantages, given.batch, **options).value
        (wanted,) = torch.autograd.grad(value, leaf, retain_graph=True)
        wanted = wanted.clone()
        assert wanted.any()
        for factor in UPSTREAM:
            (slope,) = torch.autograd.grad(value, leaf, torch.tensor(factor), retain_graph=True)
            torch.testing.assert_close(slope[wanted != 0], (wanted * factor)[wanted != 0], **close)
        # The last pass may take the tensor itself, and a leaf may keep it as its gradient.
        (3.0 * value).backward()
        torch.testing.assert_close(leaf.grad, 3.0 * wanted, **close)
        kept = leaf.grad
        again = rc.policy_loss(leaf, given.advantages, given.batch, **options).value
        again.expand(2).sum().backward()
        torch.testing.assert_close(leaf.grad, 5.0 * wanted, **(close | {"atol": 1e-9, "rtol": 4 * close["rtol"]}))
        assert leaf.grad is kept, "gradients accumulate where the first one was left"
        with pytest.raises(RuntimeError, match="second time"):
            again.backward()
        with torch.no_grad():
            assert torch.equal(rc.policy_loss(leaf, given.advantages, given.batch, **options).value, value)


def test_weights_of_inputs_that_were_written_to_are_refused():
    given = step_batch(STEP_VARIANTS["tis_packed"], LENGTHS, 0)
    with unchecked():
        out, _ = given.loss("triton")
        given.rollout.add_(1.0)
        with pytest.raises(RuntimeError, match="rollout_logp was changed in place"):
            _ = out.weights
        assert "weights=(not made yet), keep=bool[5]" in repr(out)


def test_weights_that_are_not_made_yet_keep_no_tensor_of_the_loss():
    given = step_batch(STEP_VARIANTS["tis_packed"], LENGTHS, 0)
    new, ref = given.new.clone().requires_grad_(), given.new.detach() - 0.1
    alive = weakref.ref(ref)
    options = {"old_logp": given.old, "rollout_logp": given.rollout, "spec": TIS, "backend": "triton"}
    with unchecked():
        loss = rc.Loss(kl=rc.KL("k3", 0.1))
        out = rc.policy_loss(new, given.advantages, given.batch, loss, ref_logp=ref, **options)
        del ref
        assert "weights=(not made yet)" in repr(out) and alive() is None
        assert out.weights is not None


def test_a_pickle_has_the_weights_and_the_mask():
    given = step_batch(STEP_VARIANTS["tis_packed"], (3, 5), 0)
    with unchecked():
        out, _ = given.loss("triton")
        again = pickle.loads(pickle.dumps(out))
    assert again.weights.equal(out.weights) and again.mask.equal(out.mask) and again.value == out.value
    assert again.metrics() == out.metrics()
