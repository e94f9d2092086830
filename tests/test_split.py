"""Sequences split over ranks give what whole ones give, to the bit. Here one process plays the ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from batches import LAYOUTS, assert_same_results, assert_same_statistics, lay_out, one_thread, outcome, random_sequences
from split_cases import SPECS, WAYS, cases, lockstep, outcomes
from strategies import sequences, specs

DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


@settings(max_examples=100)
@given(sequences(), specs(), DTYPES, st.sampled_from(sorted(WAYS)), st.integers(1, 5), st.sampled_from(LAYOUTS))
def test_any_split_equals_the_whole(batch, spec, dtype, way, ranks, layout):
    laid = lay_out(batch, "packed", dtype)
    whole = outcome(laid, laid.correct(spec))
    layout = "packed" if layout in ("packed_gaps", "list", "jagged") and not batch else layout
    found = lockstep(batch, spec, way, ranks, dtype, layout)
    assert_same_results(found, whole)
    if layout != "packed_gaps":
        assert_same_statistics(found[3], whole[3], rounds_means=True, most=1e15)


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_spec_in_every_split(name):
    for case, batch, spec, way, layout, dtype in cases():
        if case.startswith(f"{name}, "):
            laid = lay_out(batch, "packed", dtype)
            whole = outcome(laid, laid.correct(spec))
            for ranks in (1, 3):
                found = lockstep(batch, spec, way, ranks, dtype, layout)
                assert_same_results(found, whole)
                if spec.nonfinite != "propagate":
                    assert_same_statistics(found[3], whole[3], rounds_means=True)


def test_tokens_outside_are_counted_where_they_lie():
    batch = random_sequences(3, (5, 4, 0))
    found = lockstep(batch, rc.Spec(), "zigzag", 3, torch.float32, "packed_gaps")
    gap = lay_out([], "packed_gaps", torch.float32).mask.numel()
    assert found[3].metrics()["tokens_outside"] == 3 * gap


def test_what_a_rank_adds_is_of_its_tokens_or_of_whole_sequences():
    batch = random_sequences(3, (5, 4, 6))
    spec = rc.Spec(rc.Weight("product"), detail="full")
    first, other = (one[3].metrics_async().values() for one in outcomes(batch, spec, "contiguous", 2, torch.float32))
    valid = sum(sum(q.mask) for q in batch)
    assert (first["tokens"], other["tokens"], other["sequences"]) == (valid, 0.0, 0.0)
    assert 0.0 < other["abs_d"] < first["abs_d"] + other["abs_d"]
    assert other["max_raw"] == -math.inf
    assert math.isfinite(other["max_d"])
