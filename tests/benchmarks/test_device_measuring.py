"""How the device benchmark measures, on a device whose clock is moved by hand. Nothing here measures a time."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
import torch

from builders.benchmark_folder import load, tiny

pytestmark = pytest.mark.usefixtures("benchmarks")


# --- measuring ---


class Clockwork:
    """A device whose calls take what they say."""

    name, by = "cpu", "events"
    copy_bytes = 4_000_000

    def __init__(self):
        self.now, self.captured, self.log = 0.0, [], []
        self.waiting, self.uncapturable = (), ()

    def facts(self):
        return {"gpu": "clockwork"}

    def copy(self):
        self.now += 0.002

    def synchronize(self):
        self.log.append("synchronize")

    def evict(self):
        self.log.append("evict")

    def timed(self, call):
        self.evict()
        taken = self.wall(call)
        return lambda: taken

    def wall(self, call):
        before = self.now
        call()
        return self.now - before

    def graph(self, calls):
        if any(call in self.uncapturable for call in calls):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.captured.append(calls)

        def replay():
            for call in calls:
                call()
            self.now -= 0.001 * len(calls)  # what the host took

        return replay

    def waits(self, call):
        call()
        return call in self.waiting

    def memory(self, call):
        return load("memory").Memory(300, 200)

    def counts(self, call):
        before = self.now
        call()
        return load("trace").Counts(kernels=3, syncs=int(self.now - before >= 0.010))

    def free(self):
        self.log.append("free")


def somebody(device, name, seconds, out=None, **about):
    contenders = load("device_contender")
    out = contenders.Outcome(value=torch.tensor(1.0), metrics={"loss_tokens": 1.0}) if out is None else out

    def on_device():
        device.log.append(name)
        device.now += seconds

    def whole():
        on_device()
        device.now += 0.010
        return out

    return contenders.Contender(name, on_device, whole, **about)


def measured(device, everybody, case=None, seconds=0.0, left=1e6):
    measure, operations = load("measure"), load("operations")
    budget = measure.Budget(left, lambda: 0.0)
    case = tiny("32k in 256") if case is None else case
    return measure.measure(
        device, case, operations.FORWARD, seconds=seconds, budget=budget, everybody=lambda *_: everybody
    )


def rows_of(found):
    return {row["name"]: row for row in found["rows"]}


def test_measure():
    names, measure = load("device_contender"), load("measure")
    device = Clockwork()
    ours = somebody(device, names.OURS, 0.004)
    by_hand = somebody(device, names.BY_HAND, 0.020, capturable=False)
    verl = names.absent(names.VERL, "not installed")
    found = measured(device, [ours, by_hand, verl])
    rows = rows_of(found)
    assert rows[names.OURS]["how"] == "graph" and rows[names.BY_HAND]["how"] == "events"
    assert rows[names.OURS]["device_ms"]["median"] == 3.0  # a millisecond less in a graph
    assert rows[names.OURS]["row_ms"]["median"] == 3.0 and "row_ms" not in rows[names.BY_HAND]
    assert rows[names.OURS]["call_ms"]["median"] == 4.0 and rows[names.OURS]["wall_ms"]["median"] == 14.0
    assert rows[names.BY_HAND]["device_ms"]["median"] == 20.0 and rows[names.BY_HAND]["wall_ms"]["median"] == 30.0
    assert rows[names.OURS]["temporaries"] == 300 and rows[names.OURS]["outputs"] == 200
    assert rows[names.VERL] == {"name": names.VERL, "note": "absent: not installed"}
    assert found["rounds"] == measure.FEWEST and found["copy_ms"]["median"] == 2.0
    assert found["required_bytes"] == 18 * found["slots"] and found["bytes_per_slot"] == 18
    assert [len(calls) for calls in device.captured] == [1, measure.IN_A_ROW]


def test_every_time_begins_with_cold_caches():
    names = load("device_contender")
    device = Clockwork()
    measured(device, [somebody(device, name, 0.001) for name in (names.OURS, names.BY_HAND)])
    begun = len(device.log) - device.log[::-1].index("free")
    timed = device.log[begun:]
    first = timed.index("evict")
    inside = [now for before, now in zip(timed[first:], timed[first + 1 :], strict=False) if before != "evict"]
    # In a row ours runs many times after one eviction; nobody else runs without one.
    assert names.BY_HAND not in inside
    assert set(inside) == {"evict", "synchronize", names.OURS}


def test_who_waits_or_cannot_be_captured_is_timed_by_events():
    names = load("device_contender")
    device = Clockwork()
    ours, by_hand = somebody(device, names.OURS, 0.004), somebody(device, names.BY_HAND, 0.020)
    device.waiting, device.uncapturable = (by_hand.on_device,), (ours.on_device,)
    rows = rows_of(measured(device, [ours, by_hand]))
    assert rows[names.OURS]["not_captured"] == "RuntimeError: operation not permitted when stream is capturing"
    assert rows[names.OURS]["how"] == "events" and rows[names.OURS]["device_ms"]["median"] == 4.0
    assert "not_captured" not in rows[names.BY_HAND] and rows[names.BY_HAND]["device_ms"]["median"] == 20.0


def test_large_batches_are_not_put_in_a_row():
    names, measure = load("device_contender"), load("measure")
    device = Clockwork()
    case = load("batches").Case("", "", 4 * measure.MOST_IN_A_ROW, 8)
    small = tiny("32k in 256")
    ready = measure._row(device, case, load("operations").FORWARD, somebody(device, names.OURS, 0.1), None)
    assert ready is None
    assert measure._row(device, small, None, somebody(device, names.BY_HAND, 0.1), None) is None


def test_calls_in_a_row_have_inputs_of_their_own():
    names, measure = load("device_contender"), load("measure")
    device, given = Clockwork(), []

    def everybody(batch, operation):
        given.append(batch.old)
        return [somebody(device, names.OURS, 0.001)]

    ours = somebody(device, names.OURS, 0.001)
    measure._row(device, tiny("32k in 256"), load("operations").FORWARD, ours, everybody)
    assert len(given) == measure.IN_A_ROW
    assert not any(torch.equal(a, b) for i, a in enumerate(given) for b in given[:i])


def test_wrong_results_are_not_timed():
    names = load("device_contender")
    device = Clockwork()
    off = names.Outcome(value=torch.tensor(2.0), metrics={"loss_tokens": 1.0})
    ours, by_hand = somebody(device, names.OURS, 0.004), somebody(device, names.BY_HAND, 0.001)
    wrong = somebody(device, names.SKYRL, 0.001, off)
    rows = rows_of(measured(device, [ours, by_hand, wrong]))
    assert rows[names.SKYRL]["note"].startswith("not timed, wrong: SkyRL") and "device_ms" not in rows[names.SKYRL]
    assert "device_ms" in rows[names.OURS] and device.log.count(names.SKYRL) == 1
    found = measured(device, [ours, wrong])
    assert "nobody agrees" in found["problem"] and not any("device_ms" in row for row in found["rows"])


def test_out_of_memory_and_out_of_time():
    names = load("device_contender")
    device = Clockwork()

    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    ours, by_hand = somebody(device, names.OURS, 0.004), somebody(device, names.BY_HAND, 0.001)
    large = names.Contender(names.EAGER, too_large, too_large)
    slow = somebody(device, names.TRACED, 0.001, slow=True)
    rows = rows_of(measured(device, [ours, by_hand, large, slow], left=10.0))
    assert rows[names.EAGER]["note"] == "not run: OutOfMemoryError: CUDA out of memory"
    assert rows[names.TRACED]["note"] == "not run: it compiles for long, and 10 s were left"
    assert names.TRACED not in device.log and "device_ms" in rows[names.OURS]
    assert "device_ms" in rows_of(measured(device, [ours, by_hand, slow]))[names.TRACED]
    # Ours has to run; and who runs once may be out of memory later.
    with pytest.raises(torch.OutOfMemoryError):
        measured(device, [replace(ours, whole=too_large), by_hand])
    device.memory = lambda call: too_large() if call is by_hand.on_device else load("memory").Memory(0, 0)
    rows = rows_of(measured(device, [ours, by_hand]))
    assert rows[names.BY_HAND]["note"] == "not timed: OutOfMemoryError: CUDA out of memory"
    assert "device_ms" in rows[names.OURS] and "device_ms" not in rows[names.BY_HAND]


def test_profiled():
    names, measure, operations = load("device_contender"), load("measure"), load("operations")
    device = Clockwork()
    everybody = [
        somebody(device, names.OURS, 0.004),
        somebody(device, names.TRACED, 0.004, slow=True),
        somebody(device, names.BY_HAND, 0.001),
        names.absent(names.VERL, "not installed"),
    ]
    found = measure.profiled(device, tiny("1M"), operations.TOKEN, everybody=lambda *_: everybody)
    assert (found["case"], found["operation"]) == ("1M", operations.TOKEN.name)
    ours, by_hand = found["rows"]
    # Each call once before it is counted.
    assert device.log.count(names.OURS) == 4 and device.log.count(names.BY_HAND) == 2
    assert ours["name"] == names.OURS and by_hand["name"] == names.BY_HAND and "whole" not in by_hand
    assert ours["on_device"]["syncs"] == 0 and ours["whole"]["syncs"] == 1 and by_hand["on_device"]["kernels"] == 3
    device.counts = lambda call: None
    found = measure.profiled(device, tiny("1M"), operations.TOKEN, everybody=lambda *_: everybody)
    assert found["rows"] == [{"name": names.OURS}, {"name": names.BY_HAND}]


def test_rounds_are_shuffled_and_limited():
    names, measure = load("device_contender"), load("measure")
    device = Clockwork()
    ready = [measure.Ready(somebody(device, name, 0.001), lambda: None, None, {}) for name in names.ORDER[:3]]
    samples, copies = measure.rounds(device, ready, 3600.0)
    assert len(copies) == measure.MOST and all(len(taken.wall) == measure.MOST for taken in samples)
    order = [entry for entry in device.log if entry in names.ORDER]
    firsts = {order[i] for i in range(0, len(order), 6)}
    assert firsts == set(names.ORDER[:3])


def test_summary():
    measure = load("measure")
    assert measure.summary([0.003, 0.001, 0.002]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    found = measure.summary([i / 1000 for i in range(101)])
    assert found == {"median": 50.0, "low": 10.0, "high": 90.0}


def test_budget():
    now = [5.0]
    budget = load("measure").Budget(10.0, lambda: now[0])
    assert budget.left() == 10.0
    now[0] = 12.0
    assert budget.left() == 3.0
    now[0] = 20.0
    assert budget.left() == 0.0


# --- the run ---


def options(**changed):
    return argparse.Namespace(**{"tiny": True, "cases": None, "rounds": 0.0, "parts": ["times"], **changed})


def noted(where, case, operation, **_):
    return {"case": case.name, "operation": operation.name, "rows": []}


def test_run_goes_on_where_it_ended():
    gpu, measure, operations = load("gpu"), load("measure"), load("operations")
    device = Clockwork()
    saved = []

    def save(results):
        saved.append(json.loads(json.dumps(results)))

    def ends(where, case, operation, **more):
        if len(results["measured"]) == 2:
            raise KeyboardInterrupt
        return noted(where, case, operation)

    results = gpu.head(device, True)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(device, results, options(), measure.Budget(1e6), save, ends)
    left = saved[-1]
    wanted = [(name, operation.name) for name, many in operations.PLAN for operation in many]
    assert [gpu.key(x) for x in left["measured"]] == wanted[:2] and left["under_way"] == ["measured", *wanted[2]]
    gpu.run(device, left, options(), measure.Budget(1e6), save, noted)
    assert [gpu.key(x) for x in left["measured"]] == wanted
    assert left["measured"][2]["problem"] == "the run ended in it" and left["under_way"] is None
    assert left["machine"]["gpu"] == "clockwork" and len(set(wanted)) == len(wanted)


def test_one_that_breaks_is_a_problem_and_the_rest_is_measured():
    """In the same process where the device still answers; else this one ends, and says first what broke."""
    gpu, measure, operations = load("gpu"), load("measure"), load("operations")
    device, saved = Clockwork(), []

    def breaks(where, case, operation, **more):
        if operation is operations.PRODUCT:
            raise ValueError("it does not compile\nmore")
        return noted(where, case, operation)

    results = gpu.head(device, True)
    parts = options(parts=list(gpu.PARTS))
    gpu.run(device, results, parts, measure.Budget(1e6), lambda _: None, breaks, breaks)
    wanted = [operation for _, many in operations.PLAN for operation in many]
    for name in ("measured", "profiled"):
        assert len(results[name]) == len(wanted)
        problems = [found["problem"] for found in results[name] if "problem" in found]
        assert problems == ["ValueError: it does not compile"] * wanted.count(operations.PRODUCT)
    first = load("gpu_tables").problems(results)[0]
    assert first["traceback"][-2:] == ["ValueError: it does not compile", "more"]
    assert len(load("gpu_tables").problems(results)) == 2 * wanted.count(operations.PRODUCT)

    def no_answer():
        raise RuntimeError("an illegal memory access was encountered")

    device.synchronize = no_answer
    results = gpu.head(device, True)
    with pytest.raises(RuntimeError, match="illegal"):
        gpu.run(device, results, options(), measure.Budget(1e6), lambda x: saved.append(json.dumps(x)), breaks, breaks)
    left = json.loads(saved[-1])
    assert left["measured"][-1]["problem"] == "ValueError: it does not compile" and left["under_way"] is None


def test_run_ends_with_its_budget():
    gpu, measure = load("gpu"), load("measure")
    results = gpu.head(Clockwork(), True)
    now = [0.0]

    def ten_seconds(where, case, operation, **_):
        now[0] += 10.0
        return noted(where, case, operation)

    gpu.run(Clockwork(), results, options(), measure.Budget(35.0, lambda: now[0]), lambda _: None, ten_seconds)
    assert len(results["measured"]) == 3 and now[0] <= 35.0
    everything = [[case.name, operation.name] for case, operation in gpu.plan(True, None)]
    assert results["not_reached"] == everything[3:]
    gpu.run(Clockwork(), results, options(), measure.Budget(1e6), lambda _: None, noted)
    assert len(results["measured"]) == len(everything) and results["not_reached"] == []


def test_scaling_is_ours_and_by_hand(capsys):
    gpu, measure, names = load("gpu"), load("measure"), load("device_contender")
    results = gpu.head(Clockwork(), True)
    asked = []

    def points(where, case, operation, everybody=None, **more):
        if case.whose.startswith("time against"):
            batch = load("batches").make(case)
            asked.append({who.name for who in everybody(batch, operation)})
        return noted(where, case, operation)

    wanted = options(parts=["times", "scaling"], cases=["1M"])
    gpu.run(Clockwork(), results, wanted, measure.Budget(1e6), lambda _: None, points)
    assert {found["axis"] for found in results["scaling"]} == {"tokens", "sequences", "skew"}
    assert asked and all(who == {names.OURS, names.BY_HAND} for who in asked)
    assert {found["case"] for found in results["measured"]} == {"1M"}


def test_what_is_profiled_comes_last():
    gpu, measure = load("gpu"), load("measure")
    results, order = gpu.head(Clockwork(), True), []

    def timing(where, case, operation, **_):
        order.append("time")
        return noted(where, case, operation)

    def profiling(where, case, operation):
        order.append("profile")
        return noted(where, case, operation)

    wanted = options(parts=list(gpu.PARTS), cases=["1M"])
    gpu.run(Clockwork(), results, wanted, measure.Budget(1e6), lambda _: None, timing, profiling)
    assert order == sorted(order, reverse=True) and order.count("profile") == len(results["profiled"]) == 2


def test_without_a_gpu(tmp_path, monkeypatch):
    gpu = load("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main(["--json", str(tmp_path / "x.json")])
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(SystemExit):
        gpu.parse(["--resume"])


def test_the_whole_thing_on_the_host(tmp_path, capsys, monkeypatch):
    """From the command line to the table, with the clock of the host; too little time is left for a compiler."""
    gpu = load("gpu")
    monkeypatch.setattr(load("measure"), "FEWEST", 1)
    path = tmp_path / "results.json"
    only = ["--device", "cpu", "--tiny", "--rounds", "0", "--seconds", "30", "--json", str(path)]
    assert gpu.main([*only, "--cases", "SkyRL's row", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "No GPU; " in printed and "Tiny sizes" in printed
    assert "## rollout-corr" in printed and "| SkyRL's row | SkyRL's recommended recipe |" in printed
    results = json.loads(path.read_text())
    assert results["tiny"] and results["machine"]["torch"] == torch.__version__ and len(results["commit"]) >= 7
    assert len(results["measured"]) == 2 and results["under_way"] is None
    gpu.main([*only, "--cases", "SkyRL's row", "--resume"])
    assert json.loads(path.read_text())["measured"] == results["measured"]
    results["measured"][0]["problem"] = "it broke"
    path.write_text(json.dumps(results))
    assert gpu.main([*only, "--cases", "SkyRL's row", "--resume"]) == gpu.INCOMPLETE
