"""Tables of partial results with more than 2^31 entries: where the last programs of millions store and load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from builders.kernel_cases import INTERPRETED
from rollout_corr.kernels import partials, sums

pytestmark = INTERPRETED

PROGRAMS = 2**28
COLUMNS = tuple("abcdefghij")
# One group of sums, and one of maxima.
RECORDED = tuple(("token_maxima", column) for column in COLUMNS)
PLAN = SimpleNamespace(table=COLUMNS, token_sums=COLUMNS, recorded=RECORDED, derived=0, label_sums=())
BYTES = 8


@pytest.fixture
def accesses(quick_interpreter, monkeypatch):
    """The last addresses that each access of the last program has; nothing is read or written there."""
    from triton.runtime import interpreter

    found = SimpleNamespace(loaded=[], stored=[])

    def load(pointers, mask, other, dtype):
        found.loaded.append(int(pointers[mask].max()))
        return other

    def store(pointers, values, mask):
        found.stored.append(int(pointers[mask].max()))

    builder = interpreter.InterpreterBuilder
    of_grid, of_program = builder.set_grid_dim, builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_dim", lambda self, *dims: of_grid(self, PROGRAMS, 1, 1))
    monkeypatch.setattr(builder, "set_grid_idx", lambda self, *place: of_program(self, PROGRAMS - 1, 0, 0))
    # What else Triton takes from there, from 3.9 on fused multiply-adds, stays.
    theirs = {name: getattr(interpreter._interpreter, name) for name in dir(interpreter._interpreter)}
    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(**(theirs | {"load": load, "store": store})))
    return found


def run(body, *given, **constants):
    """Run a kernel in one program, which takes itself for the last of many."""
    for name, module in {"partials": partials, "sums": sums}.items():
        body.fn.__globals__[name] = module
    body[(1,)](*given, **constants)


def end_of(table, row, column):
    """The address of an entry of a table [rows, columns], or of one [columns, programs] with both exchanged."""
    return table.data_ptr() + BYTES * (row * len(COLUMNS) + column)


@pytest.fixture
def table():
    return torch.zeros(1, dtype=torch.float64)


def test_a_program_stores_its_row(accesses, table):
    @triton.jit
    def store(table, PLAN: tl.constexpr):
        partials.put(table, PLAN, "table", "j", tl.full((), 1.0, tl.float64))

    run(store, table, PLAN=PLAN)
    assert accesses.stored == [end_of(table, PROGRAMS - 1, 9)]


@pytest.mark.parametrize("of_maxima", [False, True])
def test_a_part_of_the_last_programs(of_maxima, accesses, table):
    """Parts of one program each: the last is of the last program, and has the last row."""

    @triton.jit
    def add_up(table, out, k, programs, PLAN: tl.constexpr):
        partials.add_up_part(k, table, table, out, out, programs, 1, PLAN)

    out = torch.zeros(1, dtype=torch.float64)
    run(add_up, table, out, 2 * (PROGRAMS - 1) + of_maxima, PROGRAMS, PLAN=PLAN)
    assert accesses.loaded == [table.data_ptr() + BYTES * (9 * PROGRAMS + PROGRAMS - 1)]
    assert accesses.stored == [end_of(out, PROGRAMS - 1, 9)]
