"""Bounds that each group of sequences decides by its own values: `correct` against loops, in every layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out
from builders.calls import bundled
from builders.coarse import abs_d, coarse, mask_of, rejects_nonfinite, within
from builders.launches import Reads
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks
from rollout_corr.backends import search as searches
from rollout_corr.backends.run import CORRECTIONS
from rollout_corr.definition.bounds_of_batch import by_sort

pytestmark = pytest.mark.usefixtures("one_thread")

# The third sequence is all invalid, so group 3 is empty; group 4 has no sequence, and group 2 has one.
INDEX = [0, 1, 3, 0, 2, 1, 0, 1]
RULES = [
    {"upper": rc.Quantile(0.7, within="group")},
    {"lower": rc.TopK(2, within="group"), "upper": rc.Quantile(0.9, "group")},
    {"upper": rc.Bottom(1000, within="group")},
    {"lower": rc.Quantile(0.4), "upper": rc.Bottom(share=0.5, within="group")},
    {"upper": rc.MeanBelow(0.2, within="group")},
]


COUNTING = [(rc.Quantile(0.5), "upper"), (rc.Quantile(0.07), "lower"), (rc.Bottom(3), "upper"), (rc.TopK(2), "lower")]
COUNTING += [(rc.MeanBelow(0.25), "upper"), (rc.MeanBelow(3.0), "upper")]


def searched(rule, side, parts, count):
    """The bounds of groups from the tables of several parts: values, which of them are tested, their groups."""
    dtype, device = parts[0][0].dtype, parts[0][0].device
    search = searches.begin(rule, side, dtype, device, count)
    while not search.over():
        search = search.narrowed(sum(search.table(search.values(*part, False)) for part in parts))
    return search.bound()


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
    for seed, layout in enumerate(LAYOUTS[::3]):
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
    found = rc.correct(train, rollout, rc.Batch(cu_seqlens=cu, turns=turns, groups=rc.Groups(size=1)), spec=spec)
    assert found.keep_turns.tolist() == [True, False, False, True]
    metrics = found.metrics()
    assert (metrics["turn_sum_abs/upper_min"], metrics["turn_sum_abs/upper_max"]) == (0.0, 0.5)
    nothing = rc.correct(
        train, rollout, rc.Batch(mask=torch.zeros(7), cu_seqlens=cu, turns=turns, groups=rc.Groups(size=1)), spec=spec
    )
    assert nothing.metrics()["turn_sum_abs/upper_max"] == math.inf


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(width=32), st.integers(0, 4), st.booleans()), max_size=40), st.sampled_from(COUNTING)
)
def test_every_group_has_the_bound_of_its_own_values(drawn, which):
    rule, side = which
    values, groups, tested = (torch.tensor(x) for x in (list(zip(*drawn, strict=True)) or ((), (), ())))
    values, groups, tested = values.float(), groups.long(), tested.bool()
    found = searched(rule, side, [(values, tested, groups)], 4)
    # The last is of no group.
    assert found[4] == (math.inf if side == "upper" else -math.inf)
    for group in range(4):
        own = values[tested & (groups == group)]
        own = own[~own.isnan()]
        assert bool(found[group].isnan()) if not len(own) else torch.equal(found[group], by_sort(rule, side, own))


TOGETHER = {
    "tokens": rc.Spec(criteria=(rc.Criterion("abs", **RULES[1]),)),
    "the mean of tokens": rc.Spec(criteria=(rc.Criterion("abs", **RULES[4]),)),
    "sequences": rc.Spec(criteria=(rc.Criterion("abs", "sequence", "sum", upper=rc.Bottom(1, within="group")),)),
    "survivors, and a bound of the batch": rc.Spec(
        criteria=(
            rc.Criterion("abs", "sequence", "mean", lower=rc.Quantile(0.2), upper=rc.Quantile(0.7, within="group")),
            rc.Criterion("abs", upper=rc.MeanBelow(0.2, within="group")),
        ),
        sums_over="kept",
    ),
}


def told(spec, found, laid):
    bounds = {key: x for key, x in found.metrics().items() if "/upper" in key or "/lower" in key}
    return laid.read(found.mask), found.keep.tolist(), bounds


@pytest.mark.parametrize("name", TOGETHER)
def test_groups_that_span_ranks(name, way):
    """Two ranks have the verdicts and the bounds of one, to the bit, however the groups lie."""
    spec = TOGETHER[name]
    for seed, (cut, dtype) in enumerate(((3, torch.float32), (6, torch.float64), (5, torch.float32))):
        batch = coarse(seed)
        parts = slice(0, cut), slice(cut, None)
        laid = lay_out(batch, "packed", dtype)
        mask, keep, bounds = told(spec, laid.correct(spec, group_index=torch.tensor(INDEX), group_count=5), laid)

        def of_rank(rank, batch=batch, parts=parts, dtype=dtype):
            part = lay_out(batch[parts[rank]], ("padded_left", "list")[rank], dtype)
            given_ = {"group_index": torch.tensor(INDEX[parts[rank]]), "group_count": 5}
            return told(spec, part.correct(spec, batch_group=Rank(rank=rank, ranks=2), **given_), part)

        one, two = Ranks(2).run(of_rank)
        assert one[0] + two[0] == mask and one[1] + two[1] == keep
        assert one[2] == two[2] == bounds


@pytest.mark.parametrize("name", TOGETHER)
def test_micro_batches_decide_together(name, way):
    spec = TOGETHER[name]
    for seed, dtype in enumerate((torch.float32, torch.float64)):
        batch = coarse(seed)
        laid = lay_out(batch, "packed", dtype)
        mask, keep, bounds = told(spec, laid.correct(spec, group_index=torch.tensor(INDEX), group_count=5), laid)
        pieces = [
            (lay_out(batch[part], layout, dtype), {"group_index": torch.tensor(INDEX[part]), "group_count": 5})
            for part, layout in ((slice(0, 3), "padded_right"), (slice(3, 4), "packed"), (slice(4, None), "list"))
        ]
        known = None
        while known is None or not known.complete:
            counts = [
                rc.threshold_statistics(
                    x.train, x.rollout, **bundled(mask=x.mask, cu_seqlens=x.cu_seqlens, spec=spec, known=known, **g)
                )
                for x, g in reversed(pieces)
            ]
            known = rc.ThresholdStatistics.sum(counts).thresholds()
        found = [told(spec, x.correct(spec, thresholds=known, **g), x) for x, g in pieces]
        assert [row for part in found for row in part[0]] == mask
        assert [kept for part in found for kept in part[1]] == keep
        assert all(part[2] == bounds for part in found)


def test_no_read_and_no_sort_on_a_device(monkeypatch):
    from rollout_corr.backends import bounds_of_batch, sequence_groups, whole

    laid = lay_out(coarse(2), "padded_right", torch.float32)
    given_ = {"group_index": torch.tensor(INDEX), "group_count": 5}
    monkeypatch.setitem(CORRECTIONS, "blocks", whole.run_whole)
    monkeypatch.setattr(bounds_of_batch, "in_blocks", lambda batch: False)
    monkeypatch.setattr(sequence_groups.torch, "aminmax", lambda x: (0, 4))
    with Reads() as mode:
        laid.correct(TOGETHER["the mean of tokens"], **given_)
    assert not mode.reads


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
