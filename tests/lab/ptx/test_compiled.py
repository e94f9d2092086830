"""The kernels as compiled code, on the CPU: right numbers, nothing out of bounds, no race, whatever the order."""

from __future__ import annotations

import pytest

import rollout_corr as rc
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.ptx import cases, far, near_bounds
from lab.ptx.cases import CASES
from lab.ptx.worker import outcome_of, start

# Which cases `make test` runs; `make ptx` and `make test-all` run every one.
# One of each kind, in seconds of a compiler that has not met these kernels: weights of tokens in 16 bits, criteria with
# advantages and weights of sequences, sums between ranks, turns, losses of one pass and of two, a step, a file to copy.
RUN = (
    "token_bf16", "when_sequences", "split_packed", "turns_mixed", "loss_ppo_packed", "loss_gspo_padded",
    "step_tis_packed", "file_packed",
)  # fmt: skip
# Losses of single tokens that differ from others in their formula: of these Triton's front end reads the source too,
# whose types and constants its interpreter lets pass.
READ = (
    "loss_reinforce", "loss_cispo", "loss_icepop", "loss_score_by_weights", "loss_dppo_tv", "loss_dppo_kl", "loss_sapo",
    "loss_gpg", "loss_dro", "loss_rec_ring", "loss_sapo_stopped", "loss_topr", "loss_rec", "loss_reinforce_scaled",
)  # fmt: skip


@pytest.fixture(scope="module")
def process():
    """One process, so that what it has compiled and read serves every test."""
    with start() as pool:
        yield pool


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in RUN)) for name in CASES])
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


def test_programs_beyond_32_bits(process):
    assert process.submit(outcome_of, far.run_beyond_32_bits).result() == ""


@pytest.mark.parametrize(
    "weight",
    [rc.Weight.token(upper=1.2), pytest.param(rc.Weight.product(upper=2.0), marks=pytest.mark.slow)],
    ids=lambda x: x.kind,
)
def test_sequences_beyond_32_bits(weight, process):
    assert process.submit(outcome_of, far.run_sequences_beyond_32_bits, weight).result() == ""


def test_the_file_beyond_32_bits(process):
    assert process.submit(outcome_of, far.run_file_beyond_32_bits).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(3, 1_000_000, 0), (7, 0, 12, 5, 31) * 20_000], ids=["a million tokens", "100,000"]
)
def test_the_file_on_large_batches(lengths, process):
    assert process.submit(outcome_of, cases.run_file_of, lengths).result() == ""


@pytest.mark.parametrize(
    ("rows", "width", "step"),
    [(3, 600, 2**20 + 3), pytest.param(1, 300, 2**24 + 1, marks=pytest.mark.slow)],
    ids=["rows", "tokens"],
)
def test_what_lies_far_apart(rows, width, step, process):
    assert process.submit(outcome_of, far.run_far_apart, rows, width, step).result() == ""


# Units in the last place that the ISA allows ex2.approx and lg2.approx.
APPROXIMATE = 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_decisions_next_to_a_bound_do_not_hang_on_approximations(seed, process):
    """None that compares D, whatever the last bits of an exponential; of the others none beyond the tolerance."""
    assert process.submit(outcome_of, near_bounds.run_near_bounds, seed, off_by=APPROXIMATE).result() == ""


@pytest.mark.slow
def test_a_decision_that_hangs_on_an_approximation_is_noticed(process):
    assert "AssertionError" in process.submit(outcome_of, near_bounds.run_near_bounds, off_by=16).result()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_bf16", "tokens_of_exp", "sequences_of_exp"])
def test_what_the_compiler_may_contract_decides_nothing(name, process):
    """Bits of weights and decisions, as docs/kernels.md has it; metrics may differ."""
    assert process.submit(outcome_of, cases.run_uncontracted, name).result() == ""


@pytest.mark.slow
def test_unsorted_offsets_stay_within_bounds(process):
    """And `apply` writes every token once, however many sequences claim it."""
    assert process.submit(outcome_of, cases.run_wrong_offsets, "geometric_clamped", allowed=()).result() == ""


# --- what would be noticed ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "before", "after", "how"),
    [
        # The advantage of a sequence, for tokens that no sequence has too.
        (
            "loss_cispo",
            "tiles:entry_of",
            ", mask=(sequence >= 0) & (sequence < extents.sequences), other=0",
            "",
            "bounds",
        ),
        # The sums of a thread that has more turns than its sequence has slots.
        ("metrics_packed", "gather:with_slots", "mask=known, other=0", "mask=known, other=77", "numbers"),
        ("many_sequences", "partials:count_in", "acq_rel", "relaxed", "race of programs"),
    ],
)
def test_a_fault_in_the_source_is_noticed(name, place, before, after, how, process):
    assert process.submit(cases.run_with_fault, name, place, before, after).result() == how


def test_chosen_variants_are_declared():
    assert {*RUN, *READ} < {*CASES}
