"""The kernels as compiled code, on the CPU: right numbers, nothing out of bounds, no race, whatever the order."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from aot.loss_variants import LOSS_VARIANTS
from builders.batches import LAYOUTS
from ptx import cases, far, near_bounds
from ptx.cases import CASES
from ptx.chosen import READ, SLOW, is_run
from ptx.edits import SPARE, hunt_edits
from ptx.worker import outcome_of, start


@pytest.fixture(scope="module")
def process():
    """One process, so that what it has compiled and read serves every test."""
    with start() as pool:
        yield pool


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (not is_run(name))) for name in CASES])
def test_every_variant(name, process):
    """Cases take turns at the kinds of wrong offsets; other orders have all kinds."""
    kind = list(CASES).index(name)
    assert process.submit(outcome_of, cases.run_case, name, 0, kind).result() == ""


@pytest.mark.parametrize("name", READ)
def test_the_front_end_takes_a_variant(name, process):
    assert process.submit(outcome_of, cases.read_by_triton, LOSS_VARIANTS[name.removeprefix("loss_")]).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_variant_in_other_orders(name, process):
    """And with approximations as far off as a GPU's may be."""
    for seed in (1000, 2000):
        assert process.submit(outcome_of, cases.run_case, name, seed, off_by=APPROXIMATE).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype, process):
    assert process.submit(outcome_of, cases.run_layout, layout, dtype).result() == ""


def test_programs_beyond_32_bits(process):
    assert process.submit(outcome_of, far.run_beyond_32_bits).result() == ""


@pytest.mark.parametrize("weight", [rc.Weight.token(upper=1.2), rc.Weight.product(upper=2.0)], ids=lambda x: x.kind)
def test_sequences_beyond_32_bits(weight, process):
    assert process.submit(outcome_of, far.run_sequences_beyond_32_bits, weight).result() == ""


@pytest.mark.parametrize(("rows", "width", "step"), [(3, 600, 2**20 + 3), (1, 300, 2**24 + 1)], ids=["rows", "tokens"])
def test_what_lies_far_apart(rows, width, step, process):
    assert process.submit(outcome_of, far.run_far_apart, rows, width, step).result() == ""


@pytest.mark.slow
def test_400_000_tokens(process):
    assert process.submit(outcome_of, cases.run_large).result() == ""


# Units in the last place that the ISA allows ex2.approx and lg2.approx.
APPROXIMATE = 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_decisions_next_to_a_bound_do_not_hang_on_approximations(seed, process):
    """None that compares D, whatever the last bits of an exponential; of the others none beyond the tolerance."""
    assert process.submit(outcome_of, near_bounds.run_near_bounds, seed, off_by=APPROXIMATE).result() == ""


@pytest.mark.parametrize(
    ("function", "off_by"),
    [
        (near_bounds.run_near_bounds, 16),
        pytest.param(near_bounds.run_compared_as_ratios, APPROXIMATE, marks=pytest.mark.slow),
    ],
    ids=["farther off", "ratios compared"],
)
def test_a_decision_that_hangs_on_an_approximation_is_noticed(function, off_by, process):
    assert "AssertionError" in process.submit(outcome_of, function, off_by=off_by).result()


@pytest.mark.parametrize(
    "name", ["token_bf16", *(pytest.param(x, marks=pytest.mark.slow) for x in ("tokens_of_exp", "sequences_of_exp"))]
)
def test_what_the_compiler_may_contract_decides_nothing(name, process):
    """Bits of weights and decisions, as docs/kernels.md has it; metrics may differ."""
    assert process.submit(outcome_of, cases.run_uncontracted, name).result() == ""


def test_unsorted_offsets_stay_within_bounds(process):
    """And `apply` writes every token once, however many sequences claim it."""
    assert process.submit(outcome_of, cases.run_wrong_offsets, "geometric_clamped", allowed=()).result() == ""


# --- what would be noticed ---


@pytest.mark.parametrize(
    ("name", "kind", "only", "how"),
    [
        # The advantage of a sequence, for tokens that no sequence has too.
        ("loss_cispo", "a mask", "tl.load(table + sequence,", "bounds"),
        # The sums of a thread that has more turns than its sequence has slots.
        ("metrics_packed", "an other", "slots * i + slot, mask=known, other=0)", "numbers"),
        ("many_sequences", "an order", "tl.atomic_add(counter,", "race of programs"),
    ],
)
def test_what_is_taken_out_of_the_source_is_noticed(name, kind, only, how, process):
    outcomes = process.submit(hunt_edits, [name], kind, only).result()
    assert [found for found, _ in outcomes] == [how], outcomes


@pytest.mark.slow
def test_every_mask_taken_out_of_the_source_is_noticed(process):
    outcomes = process.submit(hunt_edits, [*CASES], "a mask").result()
    assert outcomes and not [x for x in outcomes if x[0] in ("", "not compiled")]


@pytest.mark.slow
def test_every_other_made_garbage_is_noticed(process):
    """NaN, a negative and a positive number in turn where a mask leaves a thread out."""
    outcomes = process.submit(hunt_edits, [*CASES], "an other").result()
    assert outcomes and all(how != "not compiled" for how, _ in outcomes), outcomes
    survivors = {where.partition(": ")[2] for how, where in outcomes if not how}
    assert survivors <= SPARE.keys(), outcomes


@pytest.mark.slow
def test_every_barrier_taken_out_of_the_source_is_noticed(process):
    outcomes = process.submit(
        hunt_edits, ["metrics_packed", "full_packed", "loss_gspo", "many_sequences"], "a barrier"
    ).result()
    assert outcomes and all(how or where.partition(": ")[2] in SPARE for how, where in outcomes), outcomes


def test_slow_variants_are_declared():
    assert set(SLOW) < set(CASES)
