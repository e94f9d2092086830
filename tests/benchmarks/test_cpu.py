"""The CPU benchmark, its page and README's table, and the drop-ins. Nothing here measures a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.cases import gate
from benchmarks.cases.batches import both_layouts
from benchmarks.cases.contender import BY_HAND, OURS, VERL, VERL_METRICS, Contender
from benchmarks.cases.contenders import on_cpu
from benchmarks.cases.operations import WORKLOADS
from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import memory, turns
from benchmarks.cpu import tables as cpu_tables
from frozen.runners import one_thread


def results_of_cpu() -> dict[str, Any]:
    """Return results of the CPU benchmark: ours 2 ms, by hand 6, verl 20, with verl's metrics absent."""

    def row(name: str, wall: list[float], temporaries: int = 0) -> dict[str, Any]:
        return {
            "name": name, "note": "", "wall_ms": wall, "cpu_ms": wall, "temporaries": temporaries, "outputs": 0,
        }  # fmt: skip

    rows = [
        row(OURS, [1.0, 2.0, 30.0], 2 << 20),
        {"name": VERL_METRICS, "note": "absent: not asked for"},
        row(BY_HAND, [5.0, 6.0, 7.0]),
        row(VERL, [19.0, 20.0, 21.0], 10 << 20),
    ]
    case = {
        "pages": "default", "shape": [2048, 8192], "layout": "padded", "workload": "metrics only",
        "slots": 10, "tokens": 5, "required_bytes": 4_000_000, "calibration_ms": [1.0, 1.1, 1.2], "rows": rows,
    }  # fmt: skip
    machine = {
        "cpu": "a processor", "cores": 2, "caches": {"L2": "1024K"}, "system": "Linux x86_64", "python": "3.11.7",
        "torch": "2.13.0", "vectors": "AVX512", "verl": "0.9.1", "allocator": {},
    }  # fmt: skip
    return {
        "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "machine": machine, "import_ms": [20.0, 60.0, 30.0],
        "cases": [case, {**case, "pages": "kept"}],
    }  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def test_account_by_hand():
    """A survives, B overlaps C, C's address is used again by D, and something older is freed."""
    events = [
        (0, 0xA, 100),  # survives
        (1, 0xB, 10),
        (2, 0xC, 20),
        (3, 0xC, -20),
        (4, 0xF, -500),  # was there before the call
        (5, 0xC, 25),  # reuses the address: 10 + 25 is the peak
        (6, 0xB, -10),
        (7, 0xC, -25),
        (8, 0xC, 5),  # survives, at an address that was a temporary's
    ]
    expected = memory.Memory(temporaries=35, outputs=105)
    assert memory.account(memory.Allocation(*event) for event in events) == expected
    assert memory.account([memory.Allocation(*events[i]) for i in (4, 8, 0, 6, 2, 1, 7, 3, 5)]) == expected
    assert memory.account([]) == memory.Memory(0, 0)


def test_memory_sees_what_an_op_allocates():
    """Two temporaries of 4 MiB at a time, one output of 1 MiB; nothing of what was there before."""
    given = torch.ones(1 << 20)

    def call():
        a = given * 2.0
        b = a + 1.0
        del a
        return (b * 3.0)[: 1 << 18].clone()

    found = memory.measure(call)
    assert found.outputs == 1 << 20 and 8 << 20 <= found.temporaries < (8 << 20) + 4096
    assert memory.measure(lambda: given) == memory.Memory(0, 0)


@pytest.mark.parametrize("wrong", ["a peer", "ours", "nothing is rejected", "all is rejected"])
def test_nothing_is_timed_after_a_wrong_result(wrong, monkeypatch):
    workload = WORKLOADS[1]

    def three(batch, operation):
        spoiled = {"a peer": BY_HAND, "ours": OURS}.get(wrong)
        found = {who.name: who for who in on_cpu(batch, operation)}

        def off():
            out = found[spoiled].whole()
            return out._replace(weights=out.weights * 1.001)

        return [Contender(x, off, off) if x == spoiled else found[x] for x in (OURS, VERL_METRICS, BY_HAND)]

    def timed(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(cpu, "on_cpu", three)
    monkeypatch.setattr(cpu, "take_turns", timed)
    batch = both_layouts(24, 300)["padded"]
    if "rejected" in wrong:
        batch.rollout.copy_(batch.old - 0.01 * (wrong == "all is rejected"))
    with pytest.raises(gate.WrongResult):
        cpu.one_case(batch, workload, None, 0.0)


def test_one_case():
    """Every present contender has rounds and memory; the calibration is not one of them."""
    packed = both_layouts(24, 300)["packed"]
    with one_thread():
        case = cpu.one_case(packed, WORKLOADS[0], turns.Calibration(), 0.0)
    assert (case["shape"], case["layout"], case["slots"]) == ([24, 300], "packed", 7200)
    assert case["tokens"] == packed.slots and case["required_bytes"] == 8 * packed.slots
    ours = case["rows"][0]
    assert ours["name"] == OURS and ours["temporaries"] > 0 and {"wall_ms", "outputs"} <= set(ours)
    counts = {len(row["wall_ms"]) for row in case["rows"] if "wall_ms" in row}
    assert counts == {turns.FEWEST - case["dropped"]}


def test_disturbed_rounds_are_dropped():
    """By a slow calibration, and by a call that waited; with too few left, nothing is."""
    calls = turns.Samples([2.0, 2.0, 2.0, 3.0, 2.0], [2.0, 2.0, 2.0, 2.0, 1.9])
    calibration = turns.Samples([1.0, 1.5, 1.0, 1.0, 1.1], [1.0] * 5)
    assert turns.quiet([calls, calibration]) == [0, 2, 4]
    assert calls.only([0, 2, 4]) == turns.Samples([2.0, 2.0, 2.0], [2.0, 2.0, 1.9])
    calls.cpu[4] = 1.0
    assert turns.quiet([calls, calibration]) == [0, 1, 2, 3, 4]
    case = results_of_cpu()["cases"][0]
    assert [cpu_tables.rounds_of(one) for one in (case, {**case, "dropped": 2})] == ["3", "3 of 5"]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_tables_say_medians_and_ratios():
    page = report.every_table(report.TABLES.read_text(encoding="utf-8"), results_of_cpu(), report.counted())
    for line in (
        "| 2048 x 8192 | padded | metrics only | 2.00 | 6.00 | 20.0 | 10.0 x | 3.0 x | 2.00 | 3 | 33% |",
        "| 2048 x 8192 | padded | metrics only | 10.0 x | 10.0 x | 3.0 x |",
        "| rollout-corr, metrics only, 2048 x 8192 | >= 9 x verl | 10.0 x | yes |",
        "| peak temporaries, metrics only, 2048 x 8192 | <= 0.1 of verl's | 0.200 | no |",
        "| import rollout_corr, after torch, no garbage collected | <= 50 ms | 30 ms | yes |",
        "rollout-corr, verl's metrics: absent: not asked for.",
        f"commit {'c' * 12} with uncommitted changes",
    ):
        assert line in page


def test_page_is_made_from_the_results():
    page = report.PAGE.read_text(encoding="utf-8")
    steps = report.counted_steps()
    made = report.page(page, report.load(), report.load(report.GPU_RESULTS), report.counted(), steps)
    assert page == made, "run python -m benchmarks.report"
    tables = report.TABLES.read_text(encoding="utf-8")
    assert tables == report.every_table(tables, report.load(), report.counted()), "run python -m benchmarks.report"
    kernels = report.KERNELS.read_text(encoding="utf-8")
    assert kernels == report.of_kernels(kernels, steps), "run python -m benchmarks.report"


def test_readme_has_the_committed_speeds():
    page = report.README.read_text(encoding="utf-8")
    made = report.of_readme(page, report.load(), report.counted_steps())
    assert made == page, "run python -m benchmarks.report"
    begin = report.BEGIN.format("times")
    made = report.filled(f"before\n{begin}old\n{report.END}\nafter", "times", cpu_tables.in_short(results_of_cpu()))
    assert "| 2048 x 8192, padded, metrics only | 20.0 | 6.00 | 2.00 |" in made
    assert f"commit {'c' * 12} with uncommitted changes." in " ".join(made.split())
    assert "| milliseconds a call, 1 thread | verl |" in made and "old" not in made
    assert made.startswith("before\n") and made.endswith("\nafter")
    with pytest.raises(ValueError, match="page: expected <!-- times: made by"):
        report.filled("no comments", "times", [])
