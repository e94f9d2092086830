"""The kernels as compiled code, on the CPU: right numbers, nothing out of bounds, no race, whatever the order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton

from ptx.cases import CASES
from ptx.counts import COUNTED, RECORDED, counted, table
from ptx.worker import attempt, hunt, start

# The rest are slow: a variant costs three seconds of Triton's compiler where its cache is cold, and two here.
FEW = ("metrics_short", "product_geometric_padded", "loss_ppo_packed")


@pytest.fixture(scope="module")
def process():
    """One process, so that what it has compiled and read serves every test."""
    with start() as pool:
        yield pool


@pytest.mark.parametrize("name", FEW)
def test_some_variants(name, process):
    assert process.submit(attempt, name, 0).result() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_variant(name, process):
    """Under two orders."""
    for seed in (1000, 2000):
        assert process.submit(attempt, name, seed).result() == ""


# --- how much they execute ---

RECORD = json.loads(RECORDED.read_text())
DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in COUNTED])
def test_a_kernel_does_not_execute_more(name, process):
    """No more than 10 % more instructions and 5 % more bytes than are recorded, with the compiler they are of.

    `PYTHONPATH=tests python -m ptx.counts` records anew what is meant. Another Triton may execute half as much again.
    """
    now, then = process.submit(counted, name).result(), RECORD["counts"][name]
    of_instructions, of_bytes = (1.1, 1.05) if triton.__version__ == RECORD["triton"] else (1.5, 1.5)
    assert now["instructions"] <= of_instructions * then["instructions"], (now, then)
    assert now["read"] + now["written"] <= of_bytes * (then["read"] + then["written"]), (now, then)


def test_the_table_is_the_record():
    assert table(RECORD["counts"]) in DOCS.read_text(encoding="utf-8")


# --- what would be noticed ---


def test_a_barrier_is_missed(process):
    """A planted fault of two is noticed: the first barrier of a program guards nothing."""
    outcomes = process.submit(hunt, "full_packed", "a barrier removed", 2, 0).result()
    assert any(outcomes[i][0] in ("race in a program", "unwritten") for i in range(2)), outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("a barrier removed", 3),
        ("a shuffle's lane changed", 3),
        ("a load's mask dropped", 4),
        ("a store's mask dropped", 2),
        ("an address moved", 4),
    ],
)
def test_planted_faults_are_noticed(kind, least, process):
    """Of four of a kind.

    Survivors that were looked into change nothing: the first barrier of a program, before which nobody has used the
    shared memory; an exchange among threads that hold one value; a mask of a store by which one of several threads with
    the same value writes it.
    """
    name = "full_packed" if kind == "a barrier removed" else "loss_ppo_packed"
    outcomes = process.submit(hunt, name, kind, 4, 1).result()
    survivors = [where for how, where in outcomes if not how]
    assert len(outcomes) - len(survivors) >= least, survivors
