"""Bounds that each group of sequences decides by its own values: `correct` beside loops, in every layout."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from backends.test_bounds_of_batch import abs_d, coarse, mask_of, rejects_nonfinite, within
from builders.batches import LAYOUTS, lay_out
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from rollout_corr.backends.select_groups import in_groups
from rollout_corr.definition.bounds_of_batch import by_sort

pytestmark = pytest.mark.usefixtures("one_thread")

# The third sequence is all invalid, so group 3 is empty; group 4 has no sequence, and group 2 has one.
INDEX = [0, 1, 3, 0, 2, 1, 0, 1]
RULES = [
    {"upper": rc.Quantile(0.7, within="group")},
    {"lower": rc.TopK(2, within="group"), "upper": rc.Quantile(0.9, "group")},
    {"upper": rc.Bottom(1000, within="group")},
    {"lower": rc.Quantile(0.4), "upper": rc.Bottom(share=0.5, within="group")},
]


COUNTING = [(rc.Quantile(0.5), "upper"), (rc.Quantile(0.07), "lower"), (rc.Bottom(3), "upper"), (rc.TopK(2), "lower")]


def expected(rules, values, group_of):
    """The places that every bound keeps, each rule among the values that it looks at."""
    good = set(values)
    for side, rule in rules.items():
        groups = {group_of(place) for place in values} if rule.within == "group" else {None}
        kept = set()
        for group in groups:
            kept |= within({side: rule}, {p: x for p, x in values.items() if group in (None, group_of(p))})
        good &= kept
    return good


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_tokens_in_every_layout(rules, way):
    spec = rc.Spec(criteria=(rc.Criterion("abs", **rules),))
    for seed, layout in itertools.product(range(2), LAYOUTS):
        batch = coarse(seed, broken=seed == 1)
        laid = lay_out(batch, layout, torch.float32)
        found = laid.correct(spec, group_index=torch.tensor(INDEX), group_count=5)
        good = expected(rules, abs_d(batch), lambda place: INDEX[place[0]])
        bad = rejects_nonfinite(batch)
        assert laid.read(found.mask) == mask_of(batch, {(s, t) for s, t in good if s not in bad}), (seed, layout)


@pytest.mark.parametrize("sums_over", ["valid", "kept"])
def test_sequences_and_tokens(sums_over, way):
    token = {"upper": rc.Quantile(0.7, within="group")}
    unit = {"upper": rc.Bottom(1, within="group")}
    spec = rc.Spec(
        criteria=(rc.Criterion("abs", over="sequence", reduce="sum", **unit), rc.Criterion("abs", **token)),
        sums_over=sums_over,
    )
    for seed in range(4):
        batch = coarse(seed)
        values = abs_d(batch)
        good = expected(token, values, lambda place: INDEX[place[0]])
        sums = {}
        for s, t in good if sums_over == "kept" else values:
            sums[s] = sums.get(s, 0.0) + values[s, t]
        standing = expected(unit, sums, INDEX.__getitem__)
        laid = lay_out(batch, "padded_left", torch.float32)
        found = laid.correct(spec, group_index=torch.tensor(INDEX), group_count=5)
        assert found.keep.tolist() == [s not in sums or s in standing for s in range(len(batch))]
        assert laid.read(found.mask) == mask_of(batch, {(s, t) for s, t in good if s in standing})


def test_turns_and_metrics(way):
    train = torch.tensor([0.0, 0.5, 0.0, 1.0, 2.0, 0.25, 0.25]) - 3.0
    rollout, cu = torch.full((7,), -3.0), torch.tensor([0, 3, 7])
    turns = torch.tensor([0, 1, 3, 5, 7])  # sums of |D|: 0, 0.5 | 3, 0.5
    rule = rc.Bottom(1, within="group")
    spec = rc.Spec(criteria=(rc.Criterion("abs", over="turn", reduce="sum", upper=rule),))
    found = rc.correct(train, rollout, cu_seqlens=cu, turns=turns, spec=spec, group_size=1)
    assert found.keep_turns.tolist() == [True, False, False, True]
    metrics = found.metrics()
    assert (metrics["turn_sum_abs/upper_min"], metrics["turn_sum_abs/upper_max"]) == (0.0, 0.5)
    nothing = rc.correct(train, rollout, mask=torch.zeros(7), cu_seqlens=cu, turns=turns, spec=spec, group_size=1)
    assert nothing.metrics()["turn_sum_abs/upper_max"] == math.inf


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(width=32), st.integers(0, 4), st.booleans()), max_size=40),
    st.sampled_from(COUNTING),
)
def test_every_group_has_the_bound_of_its_own_values(drawn, which):
    rule, side = which
    values, groups, tested = (torch.tensor(x) for x in (list(zip(*drawn, strict=True)) or ((), (), ())))
    values, groups, tested = values.float(), groups.long(), tested.bool()
    found = in_groups(rule, side, values, tested, groups, 4)
    # The last is of no group.
    assert found[4] == (math.inf if side == "upper" else -math.inf)
    for group in range(4):
        own = values[tested & (groups == group)]
        own = own[~own.isnan()]
        assert bool(found[group].isnan()) if not len(own) else torch.equal(found[group], by_sort(rule, side, own))


def test_neither_packing_nor_order_changes_a_verdict():
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.6, within="group")),))
    batch, order = coarse(3), list(range(8))
    known = None
    for seed, layout in itertools.product(range(2), LAYOUTS):
        random.Random(seed).shuffle(order)
        laid = lay_out([batch[s] for s in order], layout, torch.float32)
        out = laid.correct(spec, group_index=torch.tensor([INDEX[s] for s in order]))
        found = dict(zip(order, laid.read(out.mask), strict=True))
        known = known or found
        assert found == known


def test_groups_of_a_rank():
    """Groups that lie whole on a rank need no other; others are refused."""
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.6, within="group")),))
    batch = coarse(4)
    laid = lay_out(batch, "packed", torch.float32)

    def of_rank(rank):
        part = lay_out([batch[:4], batch[4:]][rank], "packed", torch.float32)
        member = Rank(rank=rank, ranks=2)
        with pytest.raises(ValueError, match="group_index: expected group_size beside a batch_group"):
            part.correct(spec, batch_group=member, group_index=torch.zeros(4, dtype=torch.int64), group_count=1)
        return part.read(part.correct(spec, batch_group=member, group_size=2).mask)

    first, second = Ranks(2).run(of_rank)
    assert first + second == laid.read(laid.correct(spec, group_size=2).mask)


@pytest.mark.parametrize("layout", ["packed", "padded_right", "list"])
def test_a_batch_without_sequences(layout, way):
    """No group has a bound, and so the side is open."""
    laid = lay_out([], layout)
    for criterion in (
        rc.Criterion("k1", lower=rc.Quantile(0.2, within="group"), upper=rc.Bottom(1, within="group")),
        rc.Criterion("abs", "sequence", "sum", upper=rc.Quantile(0.2, within="group")),
    ):
        out = laid.correct(rc.Spec(criteria=(criterion,)), group_index=torch.zeros(0, dtype=torch.int64))
        assert out.keep.shape == (0,) and out.metrics()[f"{criterion.label}/upper_max"] == math.inf


def test_what_cannot_be():
    x = torch.zeros(1, 3)
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.6, within="group")),))
    wrong = [
        (lambda: rc.correct(x, x, spec=spec), "group_index: .* for a bound with within='group', got None"),
        (lambda: rc.threshold_statistics(x, x, spec=spec), "spec: expected bounds within='batch', got some"),
        (lambda: rc.Weight("token", upper=rc.Quantile(0.5, "group")), "Weight.upper: .*a rule within='batch'"),
        (lambda: rc.Quantile(0.5, within="groups"), r"Quantile.within: expected one of \['batch', 'group'\]"),
        (lambda: rc.TopK(1, within="row"), "TopK.within: expected one of"),
    ]  # fmt: skip
    for call, words in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    assert "the quantile 0.6 of its group" in spec.explain() and rc.Spec.from_dict(spec.to_dict()) == spec
