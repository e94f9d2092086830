"""The kernels as compiled code, on the CPU: right numbers, nothing out of bounds, no race, whatever the order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import triton

from builders.batches import LAYOUTS
from ptx.cases import CASES
from ptx.counts import COUNTED, LENGTHS, RECORDED, counted, table, variant_of
from ptx.edits import hunt_edits
from ptx.mutants import FAULTS
from ptx.worker import attempt, hunt, outcome_of, start

# The others are slow: Triton's compiler takes 1.6 s for each of the kernels, some 190 in all variants. In the compiled
# code of these are 95 % of the source lines that any variant has compiled, and of each new surrogate's family one.
QUICK = (
    "metrics_packed", "full_padded", "token_propagate", "tokens_of_exp", "tokens_of_probabilities", "extrema_by_value",
    "geometric_clamped", "when_sequences", "late_after_tokens", "split_fp64", "open_instruct.vaco", "skyrl.tldr",
    "verl.decoupled_seq_is_rs", "loss_ppo_packed", "loss_gspo", "loss_gspo_padded", "loss_gmpo_padded", "loss_gpg",
    "loss_dppo_kl", "loss_dppo_replayed", "loss_dro", "loss_sapo", "loss_cispo", "loss_rec", "loss_vespo",
)  # fmt: skip


@pytest.fixture(scope="module")
def process():
    """One process, so that what it has compiled and read serves every test."""
    with start() as pool:
        yield pool


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_every_variant(name, process):
    assert process.submit(attempt, name, 0).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_variant_in_other_orders(name, process):
    for seed in (1000, 2000):
        assert process.submit(attempt, name, seed).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype, process):
    assert process.submit(outcome_of, "run_layout", layout, dtype).result() == ""


def test_programs_beyond_32_bits(process):
    assert process.submit(outcome_of, "run_beyond_32_bits").result() == ""


@pytest.mark.slow
def test_400_000_tokens(process):
    assert process.submit(outcome_of, "run_large").result() == ""


# --- how much they execute ---

RECORD = json.loads(RECORDED.read_text())
DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
# Others need kernels for other shapes, which no other test compiles.
OFTEN = [(name, 4096) for name in COUNTED if variant_of(name).length == 4096]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=[pytest.mark.slow] * ((name, length) not in OFTEN))
        for name in COUNTED
        for length in LENGTHS
    ],
)
def test_a_kernel_does_not_execute_more(name, length, process):
    """No more than 10 % more instructions and 5 % more bytes than are recorded, with the compiler they are of.

    `PYTHONPATH=tests python -m ptx.counts` records anew what is meant. Another Triton may execute half as much again.
    """
    now, then = process.submit(counted, name, length).result(), RECORD["counts"][name][str(length)]
    of_instructions, of_bytes = (1.1, 1.05) if triton.__version__ == RECORD["triton"] else (1.5, 1.5)
    assert now["instructions"] <= of_instructions * then["instructions"], (now, then)
    assert now["read"] + now["written"] <= of_bytes * (then["read"] + then["written"]), (now, then)


def test_the_table_is_the_record():
    assert table(RECORD["counts"]) in DOCS.read_text(encoding="utf-8")


# --- what would be noticed ---

# Why a planted fault may survive: it changes nothing on these batches.
EQUIVALENT = {
    "a barrier removed": "nobody has used the shared memory before it, or nobody uses it again",
    "a shuffle's lane changed": "the threads hold one value, or zeros, as of the partial results of few programs",
    "a load's mask dropped": "what is loaded lies within the tensor and is not selected",
    "a store's mask dropped": "it picks one of several threads that have the same value",
    "an address moved": "the load is never reached, as of more partial results than there are programs",
}
# Of a dozen each. The faults that are not named must all be noticed.
SURVIVE = {
    "a barrier removed": 2, "a shuffle's lane changed": 8, "a load's mask dropped": 6, "a store's mask dropped": 12,
    "an address moved": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("full_packed", "a barrier removed"),
        ("full_packed", "an atomic made plain"),
        ("full_packed", "an atomic that orders nothing"),
    ],
)
def test_some_planted_faults_are_noticed(name, kind, process):
    """A barrier of three, since the first and the last guard nothing; every atomic, of histogram and counter."""
    outcomes = process.submit(hunt, name, kind, 3, 0).result()
    noticed = [how for how, _ in outcomes if how]
    assert outcomes and len(noticed) >= (1 if kind in EQUIVALENT else len(outcomes)), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss_ppo_packed", "full_packed"])
@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults_are_noticed(name, kind, process):
    outcomes = process.submit(hunt, name, kind, 12, 1).result()
    survivors = [where for how, where in outcomes if not how]
    assert len(survivors) <= SURVIVE.get(kind, 0), (survivors, EQUIVALENT.get(kind))


# Together they have every mask of the source in their compiled code.
REACHING = (
    "full_packed", "when_tokens", "metrics_short", "token_strided", "split_packed", "loss_ppo_packed", "loss_gspo",
    "loss_gmpo_padded", "loss_reinforce", "product_geometric_padded", "when_sequences",
    "late_zeroed",
)  # fmt: skip


def test_a_mask_taken_out_of_the_source_is_noticed(process):
    """The state of a sequence, loaded by programs over the batch, whose slots are more than there are sequences."""
    outcomes = process.submit(hunt_edits, ["product_geometric_padded"], "tl.load(states").result()
    assert [how for how, where in outcomes if where.startswith("a mask")] == ["bounds"], outcomes


@pytest.mark.slow
def test_every_mask_taken_out_of_the_source_is_noticed(process):
    outcomes = process.submit(hunt_edits, REACHING, "a mask").result()
    assert outcomes and all(how not in ("", "not compiled") for how, _ in outcomes), outcomes


def test_every_kind_that_may_survive_says_why():
    assert SURVIVE.keys() == EQUIVALENT.keys() and SURVIVE.keys() <= FAULTS.keys()
