"""Entropy that the caller brings: in criteria, in metrics, and as a bonus with its gradient."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.calls import bundled_loss
from builders.kernel_cases import INTERPRETED
from builders.loss_cases import COUNTED, MEANS
from builders.rounding import near
from oracles.entropy_bonus import bonus
from rollout_corr.specs.choices import REDUCTIONS

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("one_thread")]


def with_entropy(seed, **options):
    """Random sequences whose entropies are not negative, some of them NaN or infinite."""
    rng = random.Random(seed)
    sequences = random_sequences(seed, (5, 1, 7, 0, 4, 6, 9), **options)
    for sequence in sequences:
        rows = sequence.external["entropy"]
        sequence.external["entropy"] = [
            rng.choice((math.nan, math.inf)) if rng.random() < 0.05 else rng.expovariate(1.5) if m else h
            for h, m in zip(rows, sequence.mask, strict=True)
        ]
    return sequences


def test_a_nan_fails_its_unit_and_is_counted():
    x = torch.zeros(3, 2)
    entropy = torch.tensor([[1.0, math.nan], [0.5, 0.5], [math.inf, 0.5]])
    out = rc.correct(
        x,
        x,
        rc.Batch(entropy=entropy),
        spec=rc.Spec(criteria=(rc.Criterion("entropy", "sequence", "mean", upper=2.0),)),
    )
    assert out.keep.tolist() == [False, True, False]
    found = out.metrics()
    assert found["tokens_entropy_nonfinite"] == 2 and found["entropy_mean"] == 0.625 and found["entropy_max"] == 1.0


UNITS = [("token", None), *(("sequence", name) for name in REDUCTIONS), ("turn", "sum")]
MOMENTS = ("mean", "std", "min", "max")


def judged(values, device, backend, of, **criterion):
    """The mask, and the metrics of one criterion of the entropy, or of another tensor of the caller's."""
    x = torch.zeros(values.shape, device=device)
    given = {"entropy": values.to(device)} if of == "entropy" else {"external": {of: values.to(device)}}
    turns = "runs" if criterion["over"] == "turn" else None
    batch = rc.Batch(mask=torch.ones(values.shape, device=device), turns=turns, **given)
    which = {"stat": "entropy"} if of == "entropy" else {"stat": "external", "name": of}
    spec = rc.Spec(criteria=(rc.Criterion(**which, **criterion, label="it"),))
    out = rc.correct(x, x, batch, spec=spec, backend=backend)
    return out.mask.tolist(), [out.metrics()[f"it/{key}"] for key in MOMENTS]


@pytest.mark.parametrize(("over", "reduce"), UNITS)
def test_an_entropy_that_is_not_finite_passes_no_bound(over, reduce, device):
    """And is in no metric of the criterion."""
    each = 2.0 if reduce == "sum" else 1.0
    entropy = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0]])
    for backend, bound in itertools.product(("torch", "triton"), ({"lower": 0.0}, {"upper": 9.0})):
        mask, found = judged(entropy, device, backend, "entropy", over=over, reduce=reduce, **bound)
        assert mask == [[1.0, 1.0], *[[0.0, float(over == "token")]] * 3], (backend, bound)
        assert found == [each, 0.0, each, each], (backend, bound)


@pytest.mark.parametrize(("over", "reduce"), UNITS)
def test_values_of_the_caller_that_are_not_finite_are_in_no_metric(over, reduce, device):
    """Means are over the finite ones; the extremes of none are 0, as of everything else."""
    each = 2.0 if reduce == "sum" else 1.0
    for backend in ("torch", "triton"):
        values = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
        _, found = judged(values, device, backend, "own", over=over, reduce=reduce, upper=9.0)
        assert found == [each, 0.0, each, each], backend
        assert judged(values[2:], device, backend, "own", over=over, reduce=reduce, upper=9.0)[1] == [0.0] * 4, backend


def test_a_correction_and_a_loss_of_one_batch_join():
    """Both count the entropy of the Batch, and it is reported once, before ages and bounds."""
    train, rollout, entropy = (torch.linspace(-2.0, -0.1, 12).view(3, 4) * factor for factor in (1.0, 1.1, -1.0))
    spec = rc.Spec(rc.Weight.token(upper=rc.Quantile(0.8), normalize="sequence"))
    for versions in (None, rc.Versions(torch.arange(3), 4)):
        batch = rc.Batch(entropy=entropy, versions=versions)
        loss = rc.policy_loss(train, train, batch, old_logp=train)
        for held in (batch, replace(batch, entropy=None)):
            found = rc.correct(train, rollout, held, spec=spec)
            joined = found.statistics.join(loss.statistics).metrics()
            assert joined.items() >= (found.metrics() | loss.metrics()).items()


# --- the bonus ---


def loss_arguments(laid):
    mask = None if laid.mask is None else laid.mask
    return {"old_logp": laid.rollout, "mask": mask, "cu_seqlens": laid.cu_seqlens}


CALLS = [
    *({"mean": replace(mean, over=over)} for mean in MEANS if mean.of != "sum" for over in COUNTED),
    *({"mean": mean, "total": 7.0} for mean in MEANS if mean.of != "sum"),
    {"mean": rc.Mean("sum")},
]


@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left", "list"])
def test_the_bonus_and_its_gradient_against_loops(layout):
    sequences = with_entropy(9, advantages="sequence")
    laid = lay_out(sequences, layout)
    train_mask = laid.correct(rc.Spec(criteria=(rc.Criterion("ratio", lower=0.8),))).mask
    trains = [[x != 0 for x in row] for row in laid.read(train_mask)]
    entropies, masks = laid.read(laid.external["entropy"]), [q.mask for q in sequences]
    for call, scope in itertools.product(CALLS, ("kept", "all")):
        if layout == "list":
            entropy = [row.clone().requires_grad_() for row in laid.external["entropy"]]
        else:
            entropy = laid.external["entropy"].detach().clone().requires_grad_()
        arguments = {**loss_arguments(laid), "train_mask": train_mask, **call}
        plain = rc.policy_loss(laid.train, laid.advantages, **bundled_loss(**arguments))
        out = rc.policy_loss(
            laid.train,
            laid.advantages,
            **bundled_loss(entropy=entropy, entropy_bonus=rc.EntropyBonus(0.3, scope), **arguments),
        )
        out.value.backward()
        value, slopes = bonus(entropies, masks, trains, 0.3, scope, **call)
        assert out.value.item() - plain.value.item() == near(value), (call, scope)
        got = [row.grad for row in entropy] if layout == "list" else entropy.grad
        for ours, theirs in zip(laid.read(got), slopes, strict=True):
            assert ours == near(theirs, size=0.0), (call, scope)
        assert not any(laid.elsewhere(got))


def test_both_gradients_at_once_and_by_finite_differences():
    generator = torch.Generator().manual_seed(3)
    new, entropy = (torch.rand(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    new, old = -new, -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])

    def value(new, entropy):
        return rc.policy_loss(
            new,
            torch.tensor([1.0, -1.0, 0.5]),
            rc.Batch(mask=mask, entropy=entropy),
            rc.Loss(rc.GSPO(0.2, 0.2), mean=rc.Mean("sequence"), entropy_bonus=rc.EntropyBonus(0.05)),
            old_logp=old,
        ).value

    one, other = new.clone().requires_grad_(), entropy.clone().requires_grad_()
    (3.0 * value(one, other)).backward()
    assert torch.autograd.gradcheck(value, (one, other), eps=1e-7, atol=1e-7)
    apart = new.clone().requires_grad_()
    (3.0 * value(apart, entropy)).backward()
    assert torch.equal(apart.grad, one.grad)
    assert (other.grad != 0).equal(mask != 0)
    with torch.no_grad():
        assert value(one, other).item() == value(new, entropy).item()


def test_a_scale_multiplies_the_bonus_too():
    entropy = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    new, scale = -torch.rand(2, 3, dtype=torch.float64), torch.tensor([[1.0, 0.5, 2.0], [0.0, 3.0, torch.nan]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    call = {"mask": mask, "scale": scale, "entropy": entropy, "entropy_bonus": rc.EntropyBonus(0.3)}
    out = rc.policy_loss(new, torch.zeros(2), **bundled_loss(**call))
    out.value.backward()
    factors = scale.where(mask != 0, 0.0).double()
    torch.testing.assert_close(entropy.grad, -0.3 * factors / 5)
    torch.testing.assert_close(out.value, -0.3 * (factors * entropy.detach()).sum() / 5)


@pytest.mark.parametrize(("nonfinite", "slopes"), [("reject", [0.0, -0.1, -0.1]), ("propagate", [-0.1] * 3)])
def test_a_token_that_cannot_train_has_no_bonus_unless_its_nan_passes(nonfinite, slopes):
    new, entropy = torch.tensor([[math.nan, -1.0, -2.0]]), torch.ones(1, 3, requires_grad=True)
    call = {"entropy": entropy, "entropy_bonus": rc.EntropyBonus(0.3), "spec": rc.Spec(nonfinite=nonfinite)}
    logp = torch.full((1, 3), -1.0)
    rc.policy_loss(new, torch.ones(1), **bundled_loss(old_logp=logp, rollout_logp=logp, **call)).value.backward()
    assert entropy.grad[0].tolist() == near(slopes, torch.float32)
