"""Random Specs of tokens, turns, prefixes and sequences against the oracle, in every layout and every way to run."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, compare_all, run_as
from builders.rounding import near
from builders.unit_cases import LABELS, made
from oracles import correction as oracle
from oracles import metrics as oracle_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WAYS = ("blocks", "small blocks", "whole")


def check(seed, layout, ways):
    dtype = DTYPES[seed % len(DTYPES)]
    case = made(seed, layout, dtype)
    expected = oracle.correct(case.sequences, case.spec, case.groups)
    for way in ways:
        with run_as(way):
            out = case.correct()
        text = f"{way} {seed} {layout} {dtype} {case.spec}"
        metrics = out.metrics()
        outside = metrics.pop("place/sequences_outside")
        compare_all(case.laid, out, expected, case.spec, torch.bool, dtype, text, metrics=metrics)
        valid = [any(q.mask) for q in case.sequences]
        assert outside == sum(some and label not in (0, 1, 2) for some, label in zip(valid, case.labels, strict=True))
        check_labels(case, out.metrics(by="place"), text)
    assert rc.Spec.from_dict(case.spec.to_dict()) == case.spec and case.spec.explain()


def check_labels(case, found, text):
    """The counts of each label, which are those of its sequences alone."""
    for label, name in enumerate(LABELS):
        alone = [q for q, own in zip(case.sequences, case.labels, strict=True) if own == label]
        wanted = oracle_metrics.metrics(oracle.correct(alone, case.spec), case.spec)
        for key, value in wanted.items():
            own = f"place/{name}/{key}"
            if own in found and (isinstance(value, int) or key.endswith("rejected_fraction")):
                assert found[own] == near(value), f"{own}: {text}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_together(layout):
    for seed in range(12):
        check(seed + 100 * LAYOUTS.index(layout), layout, [WAYS[seed // 3 % 3]])


def test_a_prefix_of_no_survivor_is_that_of_its_sequence():
    """Where a token criterion takes a sequence and sums run over survivors, product and prefix are both of none."""
    train = torch.tensor([0.5, 2.0, -0.5, 0.25, 0.5])
    taken = rc.Criterion("ratio", upper=4.0, drop="sequence")

    def run(weight, *more):
        spec = rc.Spec(weight, (taken, *more), sums_over="kept")
        return rc.correct(train, torch.zeros(5), cu_seqlens=torch.tensor([0, 3, 5]), spec=spec)

    assert run(rc.Weight.product(normalize="batch")).weights[0] < 1.0
    for growth in (None, "sqrt"):
        prefix = run(rc.Weight("prefix", upper=9.0, growth=growth)).weights
        assert prefix[:3].tolist() == [1.0] * 3 and prefix[4] == torch.tensor(0.75).exp()
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
