"""Surrogates whose look at the whole batch chooses tokens, on the kernels: beside loops, and beside plain torch."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import error
from builders.kernel_cases import NARROW, WIDE, between_fences, fenced, shaped, unchecked, watched
from builders.loss_cases import OF_BATCH, LaidLoss, only, random_batch
from builders.loss_kernel_cases import assert_close
from oracles import looks as oracle
from rollout_corr.spec.encode import decode, encode
from rollout_corr.spec.loss import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

CHOOSING = [name for name, surrogate in OF_BATCH.items() if surrogate.chooses]
LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3)


def by_kernels(batch, layout, device, dtype=torch.float64, **options):
    """The loss by the kernels between fences, and its gradient in the caller's layout."""
    laid = LaidLoss(batch, layout, dtype)
    laid.laid = between_fences(laid.laid, device)
    laid.new = laid.leaf(laid.laid.train)
    laid.arguments = {name: fenced(x, device) for name, x in laid.arguments.items()}
    with unchecked(), watched():
        out = laid(backend="triton", **options)
        return out, laid.gradient(out.value)


def test_which_choose():
    assert {type(OF_BATCH[name]) for name in CHOOSING} == {rc.ClipCov, rc.KLCov}


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left"])
def test_value_gradient_and_choice(name, layout, device):
    """In float64 as the loops have them; and as many tokens chosen."""
    surrogate, batch = OF_BATCH[name], only(random_batch(11, LENGTHS), "old", "weights", "train_mask")
    losses = oracle.token_losses(surrogate, batch, None)
    n = sum(m != 0 for q in batch for m in q.mask)
    with shaped(NARROW):
        out, (rows, elsewhere) = by_kernels(batch, layout, device, surrogate=surrogate)
    wanted = sum(batch[s].weights[t] * value for (s, t), (value, _) in losses.items()) / n
    assert error(out.value.item(), wanted) <= 3e-8 and not any(elsewhere)
    for s, row in enumerate(rows):
        for t, slope in enumerate(row):
            here = losses.get((s, t), (0.0, 0.0))[1]
            here = batch[s].weights[t] * here / n if here else 0.0
            assert error(slope, here) <= 3e-8 and (slope == 0) == (here == 0), (s, t)
    tokens = oracle.tokens_of(surrogate, batch)
    picked = oracle.chosen(surrogate, tokens, list(range(len(batch))))
    assert out.metrics()["cov_chosen_fraction"] == pytest.approx(len(picked) / len(tokens), rel=1e-15)


@pytest.mark.parametrize("name", CHOOSING)
def test_beside_plain_torch(name, device):
    """A KL by weights stays at the tokens chosen, and every statistic is that of plain torch."""
    batch = only(random_batch(48, LENGTHS), "old", "weights", "train_mask", "ref")
    options = {
        "surrogate": OF_BATCH[name],
        "kl": rc.KL("k3", 0.3, weight="weights"),
        "regulariser": rc.SquaredLogRatio(0.2),
        "reduction": "sequence_mean_token_mean",
    }
    laid = LaidLoss(batch, "packed", torch.float32)
    like = laid(backend="torch", **options)
    like_rows, _ = laid.gradient(like.value)
    with shaped(WIDE):
        out, (rows, _) = by_kernels(batch, "packed", device, torch.float32, **options)
    assert_close(out.value, like.value, 1e-6, 1.0, name)
    for got, wanted in zip(rows, like_rows, strict=True):
        assert_close(torch.tensor(got), torch.tensor(wanted), 1e-6, 0.01, name)
    found, expected = out.metrics(), like.metrics()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for key in ("cov_chosen_fraction", "cov_chosen_mean", "loss_tokens", "clip_fraction_high", "clip_fraction_low"):
        assert found[key] == expected[key], key


@pytest.mark.parametrize("surrogate", [rc.ClipCov(seed=2**62 + 1, dual=3.0), rc.KLCov(0.5)])
def test_an_objective_survives_the_operator(surrogate):
    assert decode(*encode(Objective(surrogate))) == Objective(surrogate)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip cov", "kl cov"])
def test_inside_a_compiled_function(name):
    """The look is traced, and the kernels are the operator."""
    laid = LaidLoss(only(random_batch(4, LENGTHS), "old"), "padded_right", torch.float32)
    new = torch.nan_to_num(laid.new.detach()).requires_grad_()
    given = new, laid.laid.advantages, laid.laid.mask, laid.arguments["old_logp"]

    def loss(new, advantages, mask, old, backend):
        surrogate = OF_BATCH[name]
        return rc.policy_loss(new * 1.0, advantages, mask=mask, old_logp=old, surrogate=surrogate, backend=backend)

    eager = loss(*given, "torch").value
    value = torch.compile(lambda *given: loss(*given, "triton").value, fullgraph=True, backend="aot_eager")(*given)
    (wanted,), (found,) = torch.autograd.grad(eager, new), torch.autograd.grad(value, new)
    assert torch.allclose(value, eager, rtol=1e-6) and torch.allclose(found, wanted, rtol=1e-6, atol=1e-8)
