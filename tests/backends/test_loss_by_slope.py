"""Losses of a block on the CPU by the slope that a surrogate gives: the bits of the definition and autograd."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near, near
from frozen.runners import run_as
from rollout_corr.backends import loss_blocks
from rollout_corr.backends.loss_blocks import READS_VALUES, by_slope
from rollout_corr.definition import loss
from rollout_corr.definition.loss import Operands
from rollout_corr.definition.sequences import Packed
from rollout_corr.specs.surrogate import Decided
from rollout_corr.specs.terms import KL, Objective, SquaredLogRatio

LENGTHS = torch.tensor([40, 1, 0, 200, 59])
SURROGATES = [
    rc.PPO(0.2, 0.3),
    rc.PPO(0.2, 0.2, dual=3.0),
    rc.PPO(0.1, 0.4, dual=1.5, delta=1.3),
    rc.PPO(1.0, math.inf),
    rc.PPO(0.0, 0.0),
    rc.ClipCov(0.2, 0.2, dual=3.0),
]


def operands(dtype=torch.float32, weighted=False, trains="all", spread=0.3, many=1) -> Operands:
    lengths = LENGTHS * many
    size, generator = int(lengths.sum()), torch.Generator().manual_seed(11)
    new, noise, advantages = torch.randn(3, size, generator=generator, dtype=torch.float64).to(dtype).unbind()
    advantages[::7] = 0.0
    x = spread * noise
    # On both sides of every bound and, as far as exp can tell, on it.
    x[:6] = torch.tensor([0.8, 1.2, 1.3, 3.0, 0.7, 1.5][:size], dtype=torch.float64).log().to(dtype)
    which = {
        "all": None,
        "some": torch.rand(size, generator=generator) > 0.4,
        "none": torch.zeros(size, dtype=torch.bool),
    }
    which["every one"] = torch.ones(size, dtype=torch.bool)
    return Operands(
        sequences=Packed.of_lengths(lengths, size),
        n_valid=lengths,
        new=new,
        base=new - x,
        advantages=advantages,
        weights=2.0 * torch.rand(size, generator=generator).to(dtype) if weighted else None,
        ref=None,
        valid=None,
        trains=which[trains],
        of_backend=READS_VALUES,
    )


def by_definition(given: Operands, objective: Objective):
    plain = replace(given, new=given.new.clone().requires_grad_(), all_finite=False, by_slope=False, of_backend=None)
    total, _, sums, maxima = loss.evaluate(plain, objective)
    gradient = torch.autograd.grad(total, plain.new)[0]
    return total.detach(), gradient, sums, maxima


CASES = itertools.product(SURROGATES, ("all", "every one", "some", "none"))
MEANS = rc.Mean(over="kept"), rc.Mean("sequence", over="kept"), rc.Mean("sequence")


@pytest.mark.parametrize(("number", "surrogate", "trains"), [(i, *case) for i, case in enumerate(CASES)], ids=str)
def test_bits_of_the_definition(number, surrogate, trains):
    """Value and gradient equal; counts and ends equal, sums of ratios within rounding: measured 3e-7 of the largest."""
    mean, dtype = MEANS[number % 3], (torch.float32, torch.float64)[number // 4 % 2]
    given = operands(dtype, number % 2 == 0, trains)
    if isinstance(surrogate, rc.ClipCov):
        given.decided = Decided((torch.arange(given.new.shape[0]) % 5 == 1,), {})
    objective = Objective(surrogate, mean=mean)
    wanted = by_definition(given, objective)
    before = [x.clone() for x in (given.new, given.base, given.advantages)]
    found = by_slope(given, objective)
    assert found is not None
    total, gradient, sums, maxima = found
    assert torch.equal(total, wanted[0]) and torch.equal(gradient, wanted[1])
    assert list(sums) == list(wanted[2]) and list(maxima) == list(wanted[3])
    for name, x in wanted[2].items():
        exact = name.startswith(("clip", "loss_"))
        assert sums[name] == (float(x) if exact else near(float(x), torch.float32)), name
    assert maxima == {name: float(x) for name, x in wanted[3].items()}
    # Inputs are as they were.
    assert all(torch.equal(x, y) for x, y in zip(before, (given.new, given.base, given.advantages), strict=True))


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_many_tokens(spread, monkeypatch):
    """Beyond the number up to which statistics are taken in float64."""
    given, objective = operands(many=4, weighted=True, spread=spread), Objective(SURROGATES[1])
    found = by_slope(given, objective)
    monkeypatch.setattr(loss_blocks, "SMALL", 100)
    other = by_slope(given, objective)
    assert found is not None and other is not None
    assert torch.equal(found.total, other.total) and torch.equal(found.gradient, other.gradient)
    one, two = ({name: float(x) for name, x in each.sums.items()} for each in (other, found))
    assert one == near(two, torch.float32)


def test_what_is_not_for_it():
    """Other surrogates, further terms, what is not finite, x beyond the clamp, nothing at all."""
    plain, ppo = operands(weighted=True), SURROGATES[0]
    objectives = [
        Objective(rc.GSPO()),
        Objective(rc.PPO(coef=2.0)),
        Objective(ppo, kl=KL("k1", 0.1)),
        Objective(ppo, regularizer=SquaredLogRatio(0.1)),
        Objective(ppo, weights_are_the_ratio=True),
        Objective(rc.PPO(clamp=0.5)),
    ]
    assert all(by_slope(plain, objective) is None for objective in objectives)
    assert by_slope(plain, Objective(ppo)) is not None
    for name in ("new", "base", "advantages", "weights"):
        for bad in (math.nan, math.inf, -math.inf):
            given = operands(weighted=True)
            getattr(given, name)[17] = bad
            assert by_slope(given, Objective(ppo)) is None, (name, bad)
    scaled = operands()
    scaled.scales = torch.full_like(scaled.new, 0.5)
    assert by_slope(scaled, Objective(ppo)) is None
    alone = operands()
    alone.base = None
    nothing = operands(many=0)
    assert by_slope(alone, Objective(ppo)) is None is by_slope(nothing, Objective(ppo))


@pytest.mark.parametrize("way", ["blocks", "small blocks", "whole"])
@pytest.mark.parametrize("mean", [None, rc.Mean("token", over="kept")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_whose_reference_is_broken_does_not_train(bad, mean, way):
    """As where the training mask leaves it out; a KL with a mean of its own is no part of the slope."""
    old, ref, trains = torch.linspace(-1.0, -0.1, 24).view(2, 12), torch.full((2, 12), -0.5), torch.ones(2, 12)
    ref[0, 3], trains[0, 3] = bad, 0.0
    loss, found = rc.Loss(rc.PPO(), kl=rc.KL("k3", 0.5, mean=mean)), []
    for given in ({"ref_logp": ref}, {"ref_logp": torch.full((2, 12), -0.5), "correction": rc.Factors(mask=trains)}):
        new = (old + 0.1 * old.cos()).requires_grad_()
        with run_as(way):
            out = rc.policy_loss(new, torch.ones(2), loss=loss, old_logp=old, **given)
        assert out.metrics()["tokens_trained"] == 23
        found.append([out.value.item(), *torch.autograd.grad(out.value, new)[0].flatten().tolist()])
    assert found[0] == near(found[1], torch.float32) and found[0][4] == 0.0


def test_weights_whose_sum_overflows_train():
    """The sum of a block's finite numbers is no sign of one that is not."""
    new, old, found = torch.linspace(-2.0, -0.1, 40).view(2, 20).requires_grad_(), torch.full((2, 20), -1.0), []
    for way in ("blocks", "whole"):
        with run_as(way):
            factors = rc.Factors(weights=torch.full((2, 20), 3e37))
            out = rc.policy_loss(new, torch.ones(2), old_logp=old, correction=factors)
        found.append([*torch.autograd.grad(out.value, new)[0].flatten().tolist(), out.metrics()["tokens_trained"]])
    assert found[0] == near(found[1], torch.float32) and found[0][-1] == 40


class Doubled(rc.PPO):
    def loss(self, tokens):
        found = super().loss(tokens)
        return found._replace(value=2.0 * found.value)


class SquaredWeights(rc.PPO):
    def factor(self, tokens, weights):
        return weights * weights


class Mixed(SquaredWeights, Doubled):
    pass


class OtherBounds(rc.PPO):
    @property
    def ratio_bounds(self):
        return 0.9, 1.1, math.inf


@pytest.mark.parametrize("surrogate", [Doubled(), SquaredWeights(), Mixed(), OtherBounds()], ids=repr)
def test_a_derived_surrogate_has_the_gradient_of_its_own_formula(surrogate):
    """The slope of PPO is that of PPO's formula: a class that overrides `loss` or `factor` does not inherit it."""
    given, objective = operands(torch.float64, weighted=True), Objective(surrogate)
    _, wanted, *_ = by_definition(given, objective)
    new = given.new.clone().requires_grad_()
    found = rc.policy_loss(
        new,
        given.advantages,
        loss=rc.Loss(surrogate, mean=rc.Mean("sum")),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]),
        old_logp=given.base,
        correction=rc.Factors(weights=given.weights),
    )
    found.value.backward()
    assert new.grad is not None
    assert_near(new.grad, wanted, size=0.0)
