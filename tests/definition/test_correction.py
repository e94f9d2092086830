"""`correct` against the third oracle: every layout, weight, criterion, policy and dtype on small random batches.

Decisions and masks are compared exactly, all else but for rounding. Bounds are drawn from the batch, in the
middle of gaps, so that some units pass and some fail and none lies next to a bound.
"""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import (
    LAYOUTS,
    MASK_DTYPES,
    check,
    compare,
    fitted,
    lay_out,
    random_sequences,
    spoil,
)
from builders.random_calls import random_batch, random_spec
from builders.rounding import margin
from oracles import correction as oracle
from rollout_corr.specs.choices import STATS

pytestmark = pytest.mark.usefixtures("one_thread")

INF = math.inf


@pytest.mark.parametrize("stat", STATS)
def test_random_specs(stat):
    """Weights of every kind, and criteria of one statistic over every unit."""
    failed = set()
    for seed in range(40):
        rng = random.Random(f"{stat} {seed}")
        sequences = random_batch(rng)
        spec = random_spec(rng, sequences, (stat,))
        _, answer = check(sequences, spec, rng.choice(LAYOUTS), whole=rng.random() < 0.3)
        failed.update(x for outcome in answer.outcomes for row in outcome.failed for x in row)
    assert failed == {True, False}, "every unit passed, or every unit failed: the bounds cut nothing"


def specs_for_layouts(sequences):
    """A handful of specs that reach every part of the computation, cut to this batch."""

    def one(stat, over="token", reduce=None, lower=0.1, upper=1.0, **others):
        criterion = rc.Criterion(stat, over, reduce, lower=lower, upper=upper, **others)
        return fitted(rc.Spec(criteria=(criterion,)), sequences).criteria[0]

    k1 = one("k1", when="outward")
    geometric = one("ratio", "sequence", "mean")
    veto = one("ratio", "sequence", "min", upper=None)
    k3 = one("k3", "sequence", "sum", lower=None)
    external = one("external", "sequence", "max", name="entropy", when="negative_advantage", drop="token")
    return [
        rc.Spec(),
        rc.Spec(rc.Weight.token(upper=1.3)),
        rc.Spec(rc.Weight.token(lower=0.8, upper=1.2, outside="zero", normalize="batch"), (k1,), "both"),
        rc.Spec(rc.Weight.product(upper=1.5, normalize="batch"), (geometric, veto), detail="full"),
        rc.Spec(rc.Weight.geometric(lower=0.9), (k3, external), "zero", sums_over="kept"),
        rc.Spec(None, (k1, k3), "both", sums_over="kept", detail="full"),
        rc.Spec(None, (geometric,), "zero"),
        rc.Spec(rc.Weight.token(), (k1, veto), apply=False),
    ]


@functools.cache
def batch_and_specs(seed, mask_values, advantages):
    """A batch and the specs cut to it, which take an oracle each."""
    sequences = random_sequences(seed, mask_values=mask_values, advantages=advantages)
    return sequences, specs_for_layouts(sequences)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_mask_dtypes(layout):
    """Every layout with every mask dtype: 0.3 stays 0.3, byte 2 is valid and comes back as 2. Batches take turns."""
    batches = itertools.cycle(itertools.product((0, 1), ("token", "sequence")))
    for mask_dtype, (seed, advantages) in zip(MASK_DTYPES, batches, strict=False):
        values = (1,) if mask_dtype is torch.bool else (0.3, 1, 2) if mask_dtype.is_floating_point else (1, 2, 3)
        sequences, specs = batch_and_specs(seed, values, advantages)
        for number, spec in enumerate(specs[seed::2]):
            check(sequences, spec, layout, mask_dtype=mask_dtype, whole=number % 2 == 1)


def test_mask_of_none_means_all_valid_and_comes_back_as_bool():
    sequences = random_sequences(1, (3, 2, 0, 4), invalid=0.0)
    sequences[2:3] = []
    for layout, spec in itertools.product(("packed", "packed_row", "list", "jagged"), specs_for_layouts(sequences)):
        laid = lay_out(sequences, layout)
        laid.mask = None
        out = laid.correct(spec)
        expected = oracle.correct(sequences, spec)
        compare(laid, out, expected, torch.bool, margin(), f"mask None {layout} {spec}")
        for mask in out.mask if layout == "list" else [out.mask]:
            assert mask.dtype == torch.bool


def test_mask_of_none_is_false_outside_every_interval():
    """There is no given mask to hand back, so what belongs to no sequence does not train."""
    for spec in (
        rc.Spec(),
        rc.Spec(rc.Weight.token(), rejected="zero"),
        rc.Spec(criteria=(rc.Criterion("abs", upper=1),)),
    ):
        out = rc.correct(torch.zeros(6), torch.zeros(6), cu_seqlens=torch.tensor([1, 3, 4]), spec=spec)
        assert out.mask.tolist() == [False, True, True, True, False, False]
        assert out.metrics()["tokens_outside"] == 3


def test_inputs_are_left_as_they_are():
    sequences = spoil(random_sequences(0), 0)
    for layout, spec in itertools.product(LAYOUTS, specs_for_layouts(sequences)):
        laid, copy = lay_out(sequences, layout), lay_out(sequences, layout)
        laid.correct(spec)
        pairs = [(laid.train, copy.train), (laid.rollout, copy.rollout), (laid.mask, copy.mask)]
        pairs += [(laid.advantages, copy.advantages), (laid.external["entropy"], copy.external["entropy"])]
        for got, wanted in pairs:
            for a, b in zip(*((x if layout == "list" else [x]) for x in (got, wanted)), strict=True):
                a, b = (x.values() if x.is_nested else x for x in (a, b))
                assert torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))


@pytest.mark.parametrize("layout", ["list", "jagged"])
def test_advantages_of_sequences_where_there_are_as_many_tokens(layout):
    """A plain tensor given with samples or a jagged tensor is per sequence, also where it would fit the tokens."""
    samples = [torch.tensor([-0.1, -0.9]), torch.tensor([]), torch.tensor([-0.3])]
    others = [x - 0.5 for x in samples]
    if layout == "jagged":
        samples, others = (torch.nested.nested_tensor(x, layout=torch.jagged) for x in (samples, others))
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=0.1, when="negative_advantage"),))
    out = rc.correct(samples, others, spec=spec, advantages=torch.tensor([1.0, 1.0, -1.0]))
    kept = out.mask if layout == "list" else out.mask.unbind()
    assert [x.tolist() for x in kept] == [[True, True], [], [False]]
