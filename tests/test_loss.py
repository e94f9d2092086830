"""`policy_loss` against the third oracle: every surrogate, mode, term, reduction, denominator and layout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from batches import LAYOUTS, one_thread
from loss_cases import SURROGATES, LaidLoss, check, objective, only, random_batch
from rollout_corr.surrogates import DENOMINATORS, KINDS, KL_WEIGHTS, LOSS_REDUCTIONS, SCOPES

DECOUPLED = ("old", "weights", "train_mask")


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


BATCHES = [random_batch(0), random_batch(1, advantages="sequence"), random_batch(2, (3, 8, 2), scale=0.8)]
BROKEN = [random_batch(seed, broken=True) for seed in (3, 4)]


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("whole", [False, True])
def test_surrogates(name, whole):
    for batch in (*BATCHES, *BROKEN):
        check(only(batch, *DECOUPLED), objective(name), whole=whole)
        check(only(batch, "old"), objective(name), whole=whole)
        check(only(batch, "rollout", "train_mask"), objective(name), whole=whole)
        check(only(batch, "weights"), objective(name), whole=whole)
        check(only(batch), objective(name), "padded_left", whole=whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for name, whole in itertools.product(("ppo dual", "gspo", "gmpo"), (False, True)):
        for batch in (BATCHES[0], BATCHES[1], BROKEN[0]):
            check(only(batch, *DECOUPLED), objective(name, reduction="sequence_mean_token_mean"), layout, whole=whole)


@pytest.mark.parametrize("denominator", [*DENOMINATORS, 7.0])
@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_reductions(reduction, denominator):
    length = 16.0 if reduction == "token_sum_norm" else None
    counted = denominator if isinstance(denominator, str) else "original"
    given = None if isinstance(denominator, str) else denominator
    for name, batch, whole in itertools.product(("ppo", "gspo"), (*BATCHES, BROKEN[0]), (False, True)):
        wanted = objective(name, reduction=reduction, denominator=counted, max_length=length)
        if reduction == "sum" and denominator != "original":
            with pytest.raises(ValueError, match="^denominator: expected the default with reduction"):
                check(only(batch, *DECOUPLED), wanted, given=given)
        else:
            check(only(batch, *DECOUPLED), wanted, given=given, whole=whole)


@pytest.mark.parametrize("kind", KINDS)
def test_kl(kind):
    for gradient, weight, scope in itertools.product((None, *KINDS), (None, *KL_WEIGHTS), SCOPES):
        upper = 1.1 if weight in ("ratio", "stopped_ratio") else None
        term = rc.KL(kind, 0.3, gradient=gradient, weight=weight, weight_upper=upper, scope=scope)
        check(only(BATCHES[0], *DECOUPLED, "ref"), objective("ppo", kl=term))
    clamped = rc.KL(kind, 0.3, log_clamp=0.4, value_clamp=0.06)
    for batch in (*BATCHES, *BROKEN):
        check(only(batch, *DECOUPLED, "ref"), objective("gmpo", kl=clamped, reduction="sequence_mean_token_mean"))
        check(only(batch, "rollout", "ref"), objective("score", kl=rc.KL(kind, 0.3)), whole=True)


@pytest.mark.parametrize("scope", SCOPES)
def test_regulariser(scope):
    for batch, whole in itertools.product((*BATCHES, *BROKEN), (False, True)):
        wanted = objective("reinforce", regulariser=rc.SquaredLogRatio(0.2, scope))
        check(only(batch, "rollout", "train_mask"), wanted, whole=whole)
        check(only(batch, *DECOUPLED), replace(wanted, reduction="sequence_mean_token_sum"), whole=whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_log_probs(dtype):
    """Computed in float32: the value is as far from the oracle as its inputs' rounding makes it, and no further."""
    for name in SURROGATES:
        batch = only(BATCHES[0], *DECOUPLED)
        exact = LaidLoss(batch, "packed", torch.float64)
        low = LaidLoss(batch, "packed", dtype)
        for key in ("old_logp", "weights"):
            exact.arguments[key] = low.arguments[key].double()
        exact.new = low.new.detach().double().requires_grad_()
        exact.laid.advantages = low.laid.advantages.double()
        one, other = exact(surrogate=SURROGATES[name]), low(surrogate=SURROGATES[name])
        assert other.value.dtype == torch.float32
        torch.testing.assert_close(other.value.double(), one.value, rtol=1e-6, atol=1e-6)
        (slope,) = torch.autograd.grad(other.value, low.new)
        (wanted,) = torch.autograd.grad(one.value, exact.new)
        assert slope.dtype == dtype
        torch.testing.assert_close(slope, wanted.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
