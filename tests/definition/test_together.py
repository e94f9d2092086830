"""All units in one Spec against loops that know them all, in every layout and every way to run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, error
from builders.unit_cases import LABELS, made
from oracles import together as oracle
from rollout_corr.backends import blocks
from rollout_corr.backends.run import CORRECTIONS
from rollout_corr.backends.whole import run_whole

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Measured over seeds 0 to 1,500 in the three dtypes: 2e-15, 2e-7 of fp32 weights.
WITHIN = {torch.float64: 1e-12, torch.float32: 4e-7, torch.bfloat16: 4e-7}
WAYS = {"blocks": (False, blocks.BLOCK), "small blocks": (False, 5), "whole": (True, blocks.BLOCK)}


def off(case, out, within):
    """Names of what differs from the oracle."""
    wanted, read, found = oracle.correct(case.told, case.spec), case.laid.read, []
    if out.keep.tolist() != wanted.keep:
        found.append("keep")
    if out.keep_turns.tolist() != wanted.keep_turns:
        found.append("keep_turns")
    if [[x != 0 for x in row] for row in read(out.mask)] != [[x != 0 for x in row] for row in wanted.mask]:
        found.append("mask")
    if (out.weights is None) != (wanted.weights is None):
        found.append("whether there are weights")
    elif wanted.weights is not None:
        pairs = zip(read(out.weights), wanted.weights, strict=True)
        worst = max((error(a, b) for one, two in pairs for a, b in zip(one, two, strict=True)), default=0.0)
        if worst > within or any(case.laid.elsewhere(out.weights)):
            found.append(f"weights by {worst}")
    metrics, by = out.metrics(), out.metrics(by="place")
    found += [key for key, value in wanted.counts.items() if error(metrics[key], value) > 1e-15]
    if wanted.ages and (metrics["age_max"], metrics["age_min"]) != (max(wanted.ages), min(wanted.ages)):
        found.append("ages")
    for label, name in enumerate(LABELS):
        mine = {key.split("/", 2)[2]: x for key, x in by.items() if key.startswith(f"place/{name}/")}
        of_units = {key: x for key, x in wanted.by[label].items() if "turn" not in key}
        found += [f"{name}: {key}" for key, x in of_units.items() if error(mine[key], x) > 1e-15]
    return found


def check(seed, layout):
    dtype = DTYPES[seed % len(DTYPES)]
    case = made(seed, layout, dtype)
    for way, (whole, block) in WAYS.items():
        runs = mock.patch.dict(CORRECTIONS, blocks=run_whole if whole else blocks.run_blocks)
        with mock.patch.object(blocks, "BLOCK", block), runs:
            assert not off(case, case.correct(), WITHIN[dtype]), f"{way} {seed} {layout} {dtype} {case.spec}"
    assert rc.Spec.from_dict(case.spec.to_dict()) == case.spec and case.spec.explain()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_together(layout):
    for seed in range(8):
        check(seed + 100 * LAYOUTS.index(layout), layout)


@pytest.mark.slow  # a minute; the same in short above
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_together_at_length(layout):
    for seed in range(2000, 2000 + 300):
        check(seed + 1000 * LAYOUTS.index(layout), layout)


def test_a_prefix_of_no_survivor_is_that_of_its_sequence():
    """Where a token criterion takes a sequence and sums run over survivors, product and prefix are both of none."""
    train = torch.tensor([0.5, 2.0, -0.5, 0.25, 0.5])
    given = {"cu_seqlens": torch.tensor([0, 3, 5]), "sums_over": "kept"}
    taken = rc.Criterion("ratio", upper=4.0, drop="sequence")

    def run(weight, *more):
        spec = rc.Spec(weight, (taken, *more), sums_over="kept")
        return rc.correct(train, torch.zeros(5), cu_seqlens=given["cu_seqlens"], spec=spec)

    product = run(rc.Weight.product(normalize="batch")).weights
    for growth in (None, "sqrt"):
        prefix = run(rc.Weight("prefix", upper=9.0, growth=growth)).weights
        assert prefix[:3].tolist() == [1.0] * 3 and prefix[4] == torch.tensor(0.75).exp()
    assert product[0] < 1.0
    late = run(None, rc.Criterion("ratio", "prefix", "sum", upper=1.1, drop="rest", label="late")).metrics()
    assert late["late/sequences_rejected_fraction"] == 0.5 and late["late/tokens_rejected_fraction"] == 0.4


@pytest.mark.parametrize(("stat", "bound", "d"), [("k2", 0.5, 1.25), ("ratio_error", 2.0, 1.0)])
def test_bounds_that_grow_are_of_the_statistic_whatever_it_is_compared_by(stat, bound, d):
    """The extremum of k2 is compared as |D|, whose bound is a root: that times sqrt(t) would be k2 within t bounds."""
    spec = rc.Spec(criteria=(rc.Criterion(stat, "prefix", "max", upper=bound, growth="sqrt"),))
    found = rc.correct(torch.full((1, 6), d), torch.zeros(1, 6), spec=spec).mask
    value = {"k2": d * d / 2, "ratio_error": torch.tensor(d).exp().item()}[stat]
    assert found.tolist() == [[value <= bound * t**0.5 for t in range(1, 7)]]
    assert found[0, -1] and not found[0, 0]
