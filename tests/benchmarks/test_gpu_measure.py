"""The measuring of the benchmark of a GPU without one, with a clock that calls move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cases.batches import CASES, Case
from benchmarks.cases.contender import (
    BY_HAND,
    EAGER,
    ORDER,
    OURS,
    SKYRL,
    TRACED,
    VERL,
    Contender,
    absent,
)
from benchmarks.cases.operations import FORWARD, TOKEN
from benchmarks.cpu.memory import Memory
from benchmarks.gpu import measure
from benchmarks.gpu.measure import Budget
from builders.clockwork import Clockwork, somebody


@pytest.fixture
def device():
    return Clockwork()


SMALL = CASES["32k in 256"].tiny()


def measured(device, *everybody, left=1e6):
    """Measure some contenders, and return the entry and its rows by name."""
    found = measure.measure(
        device, SMALL, FORWARD, seconds=0.0, budget=Budget(left, lambda: 0.0), everybody=lambda *_: list(everybody)
    )
    return found, {row["name"]: row for row in found["rows"]}


def test_measure(device):
    ours, by_hand = somebody(device, OURS, 0.004), somebody(device, BY_HAND, 0.020, capturable=False)
    found, rows = measured(device, ours, by_hand, absent(VERL, "not installed"))
    times = {"device_ms": 3.0, "row_ms": 3.0, "call_ms": 4.0, "wall_ms": 14.0}  # a millisecond less in a graph
    assert {name: rows[OURS][name]["median"] for name in times} == times and rows[OURS]["how"] == "graph"
    assert rows[BY_HAND]["device_ms"]["median"] == 20.0 and rows[BY_HAND]["wall_ms"]["median"] == 30.0
    assert rows[BY_HAND]["how"] == "events" and "row_ms" not in rows[BY_HAND]
    assert rows[OURS]["temporaries"] == 300 and rows[OURS]["outputs"] == 200
    assert rows[VERL] == {"name": VERL, "note": "absent: not installed"}
    assert found["rounds"] == measure.FEWEST and found["copy_ms"]["median"] == 2.0
    assert found["required_bytes"] == 18 * found["slots"] and found["bytes_per_slot"] == 18
    assert [len(calls) for calls in device.captured] == [1, measure.IN_A_ROW]


def test_every_time_begins_with_cold_caches(device):
    measured(device, *(somebody(device, name, 0.001) for name in (OURS, BY_HAND)))
    begun = len(device.log) - device.log[::-1].index("free")
    timed = device.log[begun:]
    first = timed.index("evict")
    inside = [now for before, now in zip(timed[first:], timed[first + 1 :], strict=False) if before != "evict"]
    # In a row ours runs many times after one eviction; no other call runs without one.
    assert set(inside) == {"evict", "synchronize", OURS}


def test_who_waits_or_cannot_be_captured_is_timed_by_events(device):
    ours, by_hand = somebody(device, OURS, 0.004), somebody(device, BY_HAND, 0.020)
    device.waiting, device.uncapturable = (by_hand.on_device,), (ours.on_device,)
    _, rows = measured(device, ours, by_hand)
    assert rows[OURS]["not_captured"] == "RuntimeError: operation not permitted when stream is capturing"
    assert rows[OURS]["how"] == "events" and rows[OURS]["device_ms"]["median"] == 4.0
    assert "not_captured" not in rows[BY_HAND] and rows[BY_HAND]["device_ms"]["median"] == 20.0


def test_calls_in_a_row(device):
    """Only ours has calls in a row, only small batches do, and each call has its own inputs."""
    given = []

    def everybody(batch, operation):
        given.append(batch.old)
        return [somebody(device, OURS, 0.001)]

    large = Case("", 4 * measure.MOST_IN_A_ROW, 8)
    for case, name in ((large, OURS), (SMALL, BY_HAND)):
        assert measure.calls_in_a_row(device, case, FORWARD, somebody(device, name, 0.1), everybody) is None
    measure.calls_in_a_row(device, SMALL, FORWARD, somebody(device, OURS, 0.001), everybody)
    assert len(given) == measure.IN_A_ROW
    assert not any(torch.equal(a, b) for i, a in enumerate(given) for b in given[:i])


def test_wrong_results_are_not_timed(device):
    ours, by_hand = somebody(device, OURS, 0.004), somebody(device, BY_HAND, 0.001)
    wrong = somebody(device, SKYRL, 0.001, 2.0)
    _, rows = measured(device, ours, by_hand, wrong)
    assert rows[SKYRL]["note"].startswith("not timed, wrong: SkyRL") and "device_ms" not in rows[SKYRL]
    assert "device_ms" in rows[OURS] and device.log.count(SKYRL) == 1
    found, rows = measured(device, ours, wrong)
    assert "nobody agrees" in found["problem"] and not any("device_ms" in row for row in rows.values())


def test_out_of_memory_and_out_of_time(device):
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    ours, by_hand = somebody(device, OURS, 0.004), somebody(device, BY_HAND, 0.001)
    slow = somebody(device, TRACED, 0.001, slow=True)
    _, rows = measured(device, ours, by_hand, Contender(EAGER, too_large, too_large), slow, left=10.0)
    assert rows[EAGER]["note"] == "not run: OutOfMemoryError: CUDA out of memory"
    assert rows[TRACED]["note"] == "not run: it compiles for long, and 10 s were left"
    assert TRACED not in device.log and "device_ms" in rows[OURS]
    assert "device_ms" in measured(device, ours, by_hand, slow)[1][TRACED]
    # Ours has to run; and a call that ran once may be out of memory later.
    with pytest.raises(torch.OutOfMemoryError):
        measured(device, replace(ours, whole=too_large), by_hand)
    device.memory = lambda call: too_large() if call is by_hand.on_device else Memory(0, 0)
    _, rows = measured(device, ours, by_hand)
    assert rows[BY_HAND]["note"] == "not timed: OutOfMemoryError: CUDA out of memory"
    assert "device_ms" in rows[OURS] and "device_ms" not in rows[BY_HAND]


def test_profiled(device):
    everybody = [
        somebody(device, OURS, 0.004),
        somebody(device, TRACED, 0.004, slow=True),
        somebody(device, BY_HAND, 0.001),
        absent(VERL, "not installed"),
    ]
    found = measure.profiled(device, SMALL, TOKEN, everybody=lambda *_: everybody)
    ours, by_hand = found["rows"]
    # Each call once before it is counted.
    assert device.log.count(OURS) == 4 and device.log.count(BY_HAND) == 2
    assert ours["name"] == OURS and by_hand["name"] == BY_HAND and "whole" not in by_hand
    assert ours["on_device"]["syncs"] == 0 and ours["whole"]["syncs"] == 1 and by_hand["on_device"]["kernels"] == 3
    device.counts = lambda call: None
    found = measure.profiled(device, SMALL, TOKEN, everybody=lambda *_: everybody)
    assert found["rows"] == [{"name": OURS}, {"name": BY_HAND}]


def test_rounds_are_shuffled_and_limited(device):
    ready = [measure.Timed(somebody(device, name, 0.001), lambda: None) for name in ORDER[:3]]
    copies = measure.rounds(device, ready, 3600.0)
    assert len(copies) == measure.MOST and all(len(one.wall) == measure.MOST for one in ready)
    order = [entry for entry in device.log if entry in ORDER]
    assert {order[i] for i in range(0, len(order), 6)} == set(ORDER[:3])


def test_summary_and_budget():
    assert measure.summary([0.003, 0.001, 0.002]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert measure.summary([i / 1000 for i in range(101)]) == {"median": 50.0, "low": 10.0, "high": 90.0}
    now = [5.0]
    budget = Budget(10.0, lambda: now[0])
    for now[0], left in ((5.0, 10.0), (12.0, 3.0), (20.0, 0.0)):
        assert budget.left() == left
