"""The interpreter's own checks: without any one of them the tests of planted errors fail."""

from __future__ import annotations

import re
import subprocess
from functools import partial

import pytest

from ptx import native, test_findings

# What stands in machine.cpp, and what stands there instead.
TAKEN_OUT = {
    "nothing": ("", ""),
    "bounds": ("report(address % size ? ALIGNMENT : BOUNDS,", "if (address % size) report(ALIGNMENT,"),
    "the end of an access": ("address - r.base + size <= Word(r.size)", "address - r.base < Word(r.size)"),
    "alignment": ("if (address % size == 0 && found != last)", "if (found != last)"),
    "gaps between elements": ("if (is_gap(r, i)) report(BOUNDS, x, thread, region, at);", ""),
    "gaps between rows": ("r.shape[i] - 1)", "r.shape[i])"),
    "all elements of a word": ("i <= (at + x.width - 1) / r.item", "i <= at / r.item"),
    "what nobody wrote, by atomics": ("x.action != STORE && r.fresh", "x.action == LOAD && r.fresh"),
    "what nobody wrote": ("if (x.action != STORE && r.fresh && !cell.wrote)", "if (false)"),
    "an access behind a write": ("races(cell.wrote, now) ? cell.wrote : 0", "0"),
    "a write behind a read": ("if (!other && x.action != LOAD) other = racing(cell.reads, now);", ""),
    "an access behind an atomic": ("if (!other && x.action != ATOMIC) other = racing(cell.atomics, now);", ""),
    "that one place has one value": ("!memcmp(r.data + at, &given, x.width)", "true"),
    "threads of a program": ("(!(apart >> PROGRAM) && apart >> EPOCH)", "!(apart >> PROGRAM)"),
    "programs of a launch": ("apart >> LAUNCH ||", "apart >> PROGRAM ||"),
    "that launches are in order": ("apart >> LAUNCH ||", ""),
    "that barriers are in order": ("(!(apart >> PROGRAM) && apart >> EPOCH)", "false"),
    "a thread that read before the last one": ("touched[1] = touched[0], touched[0] = now;", "touched[0] = now;"),
    "a program that read before the last one": ("if ((touched[0] ^ now) >> PROGRAM) touched[2] = touched[0];", ""),
    "what a counter releases": ("counter[now >> PROGRAM] = {now, 0};", ""),
    "when it was released": ("!is_before(before, found->second.released) ||", ""),
    "what a counter hands on": ("acquired[program] = {known.released, now};", "{}"),
    "what is handed on twice": ("for (auto& [program, known] : acquired) counter[program] = known;", ""),
    "that a program has acquired nothing yet": ("acquired.clear();", ""),
    "the order of one thread": (" || x == y;", ";"),
    "that not every atomic orders": ("if (x.orders) order", "if (x.action == ATOMIC) order"),
    "when it was acquired": ("|| !is_before(found->second.acquired, now)", ""),
    "a barrier that a warp misses": ("report(DIVERGENCE, task.code[here], first->first, -1, warp.at[0]);", ";"),
    "an exchange that threads do not reach": (
        "if (warp.at[i] != waiting) report(DIVERGENCE, task.code[waiting], warp.first + i, -1, warp.at[i]);", "",
    ),
    "an exchange that does not name all": (" || (members && uint32_t(members[i]) != EVERY_LANE)", ""),
    "a loop without an end": ("if (endless) report(ENDLESS, x, warp.first, -1, 0);", ""),
    "an exchange that its guard leaves": ("report(DIVERGENCE, x, warp.first + i, -1, here);", ";"),
}  # fmt: skip


def planted_errors():
    """List the tests of planted errors, with what each is given."""
    for name, test in vars(test_findings).items():
        if name.startswith("test_"):
            rows = [mark.args[1] for mark in getattr(test, "pytestmark", ())]
            yield from [partial(test, row) for row in rows[0]] if rows else [test]


@pytest.mark.slow
@pytest.mark.parametrize("check", TAKEN_OUT)
def test_a_check_taken_out_is_missed(check, tmp_path, monkeypatch):
    """`nothing` shows that the tests pass as they are."""
    before, after = TAKEN_OUT[check]
    text = native.SOURCES[0].read_text()
    assert before == "" or text.count(before) == 1, before
    changed = tmp_path / "machine.cpp"
    changed.write_text(text.replace(before, after) if before else text)
    include, made = f"-I{native.SOURCES[0].parent}", tmp_path / "machine.so"
    subprocess.run([*native.COMPILE, "-O0", include, str(changed), "-o", str(made)], check=True)
    library = native.functions_of(made)
    monkeypatch.setattr(native, "library", lambda: library)
    missed = 0
    for test in planted_errors():
        try:
            test()
        except AssertionError:
            missed += 1
    assert (missed > 0) == (check != "nothing")


def test_the_interpreter_stays_below_1000_lines():
    """The files of README.md's first table: with whatever else they need it would be no tool to read."""
    folder = native.SOURCES[0].parent
    table = (folder / "README.md").read_text(encoding="utf-8").partition("| what uses it |")[0]
    files = re.findall(r"^\| \[([\w.]+)\]", table, re.MULTILINE)
    assert len(files) == 6 and sum(len((folder / name).read_text().splitlines()) for name in files) < 1000
