"""The benchmark of a GPU without a GPU: a pretended driver and clock, its run, its tables and pictures."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import plots, report, tables
from benchmarks.cases.batches import CASES, Case
from benchmarks.cases.contender import (
    BY_HAND,
    EAGER,
    ORDER,
    OURS,
    SKYRL,
    TRACED,
    VERL,
    XTUNER,
    Contender,
    Outcome,
    absent,
)
from benchmarks.cases.operations import FORWARD, PLAN, PRODUCT, TOKEN, planned
from benchmarks.cpu.memory import Memory
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import device as devices
from benchmarks.gpu import measure, trace
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.measure import Budget
from builders.benchmark_results import results_of_gpu

SMALL = CASES["32k in 256"].tiny()


# --- the profiler's trace ---------------------------------------------------------------------------------------------


def event(category, name, ts, dur=1.0):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}


def test_trace():
    mark = event("user_annotation", trace.LABEL, 100.0, 50.0)
    given = [
        {"ph": "M", "name": "process_name"},
        mark,
        event("gpu_user_annotation", trace.LABEL, 120.0, 80.0),
        event("cuda_runtime", "cudaDeviceSynchronize", 10.0),  # before
        event("cuda_driver", "cuLaunchKernelEx", 110.0),
        event("cuda_runtime", "cudaLaunchKernel", 112.0),
        event("cuda_runtime", "cudaMemcpyAsync", 115.0),
        event("cuda_runtime", "cudaStreamSynchronize", 120.0),
        event("cuda_runtime", "cudaMemcpy", 125.0),
        event("cuda_runtime", "cudaDeviceSynchronize", 160.0),  # the profile's own
        event("kernel", "read_kernel", 130.0, 6.0),
        event("kernel", "read_kernel", 140.0, 4.0),
        event("kernel", "decide_kernel", 170.0, 2.5),  # runs after the call has returned
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 180.0, 1.5),
        event("gpu_memset", "Memset (Device)", 181.0, 1.0),
    ]
    found = trace.counts(given)
    assert (found.kernels, found.copies, found.fills, found.syncs) == (3, 1, 1, 2)
    assert found.busy_ms == pytest.approx(0.015)
    assert found.longest == {"read_kernel": (2, 0.01), "decide_kernel": (1, 0.0025)}
    assert list(trace.counts(given, most=1).longest) == ["read_kernel"]
    assert trace.counts([mark]) is None
    for marks in ([], [mark, mark]):
        with pytest.raises(ValueError, match=f"got {len(marks)}"):
            trace.counts(marks)


def test_trace_of_a_real_profile(tmp_path):
    """The mark is found where torch writes it; a CPU has no device to count."""
    mark = torch.profiler.record_function(trace.LABEL)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run, mark:
        torch.ones(3).sum()
    run.export_chrome_trace(str(tmp_path / "trace.json"))
    assert trace.counts(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) is None


# --- the methods of a GPU, with a pretended driver --------------------------------------------------------------------


class Stream:
    def __init__(self, driver, name):
        self.driver, self.name = driver, name

    def wait_stream(self, other):
        self.driver.log.append(f"{self.name} waits for {other.name}")


class Event:
    def __init__(self, driver):
        self.driver = driver

    def record(self):
        self.driver.log.append("event")
        self.at = self.driver.clock

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Driver:
    """Writes down in order what torch.cuda is asked for, and answers without a device."""

    def __init__(self, monkeypatch):
        self.log, self.clock, self.stream, self.held, self.peak = [], 0.0, "default", 100, 5000
        self.capture_fails = False
        answers = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            "Event": lambda enable_timing: Event(self),
            "Stream": lambda: Stream(self, "side"),
            "current_stream": lambda: Stream(self, self.stream),
            "graph": self.graph,
            "max_memory_allocated": lambda: self.peak,
            "memory_allocated": lambda: self.held,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.held),
            "set_stream": lambda stream: setattr(self, "stream", stream.name),
            "set_sync_debug_mode": lambda mode: self.log.append(f"debug {mode}"),
            "stream": self.graph,
            "synchronize": lambda: self.log.append("synchronize"),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        self.gpu = object.__new__(devices.Cuda)
        self.gpu._evicting = SimpleNamespace(zero_=lambda: self.log.append("evict"))

    @contextmanager
    def graph(self, first, stream=None):
        before, self.stream = self.stream, (first if stream is None else stream).name
        self.log.append("stream" if stream is None else "capture")
        yield
        if stream is not None and self.capture_fails:
            raise RuntimeError("capture failed")  # torch leaves the stream as it is
        self.stream = before

    def call(self, name, seconds=0.0, error=None):
        def call():
            self.log.append(name)
            self.clock += seconds
            if error:
                raise RuntimeError(error)
            return name

        return call


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def test_events_stand_around_the_call_and_behind_the_eviction(driver):
    seconds = driver.gpu.timed(driver.call("call", 0.25))
    assert driver.log == ["evict", "event", "call", "event"] and seconds() == pytest.approx(0.25)


def test_a_graph_is_warmed_up_captured_and_replayed(driver):
    replay = driver.gpu.graph([driver.call("a"), driver.call("b")])
    assert driver.log == [
        *("side waits for default", "stream", "a", "b", "a", "b", "default waits for side", "synchronize"),
        *("capture", "a", "b"),
    ]
    assert replay() == ["a", "b"] and driver.log[-1] == "replay" and driver.stream == "default"
    driver.capture_fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        driver.gpu.graph([lambda: None])
    assert driver.stream == "default"


def test_who_waits(driver):
    assert not driver.gpu.waits(driver.call("call"))
    assert driver.gpu.waits(driver.call("call", error="called a synchronizing CUDA operation"))
    with pytest.raises(RuntimeError, match="illegal"):
        driver.gpu.waits(driver.call("call", error="an illegal memory access was encountered"))
    assert driver.log == ["synchronize", "debug error", "call", "debug default"] * 3


def test_memory_of_a_gpu(driver):
    """100 were there; the call takes 70 at its worst and gives back 30."""
    assert driver.gpu.memory(lambda: vars(driver).update(peak=170, held=130)) == Memory(temporaries=40, outputs=30)


def test_a_driver_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/bin/{name}")

    def run(command, timeout, **more):
        raise devices.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(devices.subprocess, "run", run)
    assert devices.driver() == {}
    answer = SimpleNamespace(returncode=0, stdout="580.1, 1980 MHz, 3201 MHz, 700.00 W\n")
    monkeypatch.setattr(devices.subprocess, "run", lambda command, **more: answer)
    assert devices.driver() == {"driver": "580.1", "clocks": "1980 MHz, 3201 MHz, 700.00 W"}


# --- measuring, with a clock that calls move --------------------------------------------------------------------------


class Clockwork(devices.Host):
    """A device whose calls take what they say."""

    by, copy_bytes = "events", 4_000_000

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
        return Memory(300, 200)

    def counts(self, call):
        return trace.Counts(kernels=3, syncs=int(self.wall(call) >= 0.010))

    def free(self):
        self.log.append("free")


@pytest.fixture
def device():
    return Clockwork()


def somebody(device, name, seconds, value=1.0, **about):
    def on_device():
        device.log.append(name)
        device.now += seconds

    def whole():
        on_device()
        device.now += 0.010
        return Outcome(value=torch.tensor(value), metrics={"loss_tokens": 1.0})

    return Contender(name, on_device, whole, **about)


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


# --- the run ----------------------------------------------------------------------------------------------------------

WANTED = [(case, operation.name) for case, many in PLAN for operation in many]


def options(**changed):
    return argparse.Namespace(**{"tiny": True, "cases": None, "rounds": 0.0, "parts": ["times"], **changed})


def noted(where, case, operation, **_):
    return {"case": case.name, "operation": operation.name, "rows": []}


def run(device, results, measured=noted, profile=noted, save=lambda _: None, budget=None, **changed):
    gpu.run(device, results, options(**changed), budget or Budget(1e6), save, measured, profile)
    return results


def test_run_goes_on_where_it_ended(device):
    saved, results = [], gpu.head(device, True)

    def ends(where, case, operation, **more):
        if len(results["measured"]) == 2:
            raise KeyboardInterrupt
        return noted(where, case, operation)

    with pytest.raises(KeyboardInterrupt):
        run(device, results, ends, save=lambda found: saved.append(json.loads(json.dumps(found))))
    left = saved[-1]
    assert [gpu.key(x) for x in left["measured"]] == WANTED[:2] and left["under_way"] == ["measured", *WANTED[2]]
    run(device, left)
    assert [gpu.key(x) for x in left["measured"]] == WANTED
    assert left["measured"][2]["problem"] == "the run ended in it" and left["under_way"] is None
    assert left["machine"]["gpu"] == "clockwork" and len(set(WANTED)) == len(WANTED)


def test_an_operation_that_breaks_is_a_problem_and_the_rest_is_measured(device):
    """In the same process where the device still answers; else this one ends, and writes first what broke."""

    def breaks(where, case, operation, **more):
        if operation is PRODUCT:
            raise ValueError("it does not compile\nmore")
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), breaks, breaks, parts=list(gpu.PARTS))
    broken = [name for _, name in WANTED].count(PRODUCT.name)
    for name in ("measured", "profiled"):
        assert len(results[name]) == len(WANTED)
        problems = [found["problem"] for found in results[name] if "problem" in found]
        assert problems == ["ValueError: it does not compile"] * broken
    first = gpu_tables.problems(results)[0]
    assert first["traceback"][-2:] == ["ValueError: it does not compile", "more"]
    assert len(gpu_tables.problems(results)) == 2 * broken

    def no_answer():
        raise RuntimeError("an illegal memory access was encountered")

    device.synchronize, saved = no_answer, []
    with pytest.raises(RuntimeError, match="illegal"):
        run(device, gpu.head(device, True), breaks, save=lambda found: saved.append(json.dumps(found)))
    left = json.loads(saved[-1])
    assert left["measured"][-1]["problem"] == "ValueError: it does not compile" and left["under_way"] is None


def test_run_ends_with_its_budget(device):
    now = [0.0]

    def ten_seconds(where, case, operation, **_):
        now[0] += 10.0
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), ten_seconds, budget=Budget(35.0, lambda: now[0]))
    assert len(results["measured"]) == 3 and now[0] <= 35.0
    assert results["not_reached"] == [list(one) for one in WANTED[3:]]
    run(device, results)
    assert len(results["measured"]) == len(WANTED) and results["not_reached"] == []


def test_parts(device):
    """A scaling curve is of ours and by hand; profiles come last."""
    asked, order = [], []

    def timing(where, case, operation, everybody=None, **_):
        order.append("time")
        if everybody is gpu.EVERYBODY["scaling"]:
            asked.append({who.name for who in everybody(gpu.batches.make(case), operation)})
        return noted(where, case, operation)

    def profiling(where, case, operation):
        order.append("profile")
        return noted(where, case, operation)

    results = run(device, gpu.head(device, True), timing, profiling, parts=list(gpu.PARTS), cases=["1M"])
    assert {found["axis"] for found in results["scaling"]} == {"tokens", "sequences", "skew"}
    assert asked and all(who == {OURS, BY_HAND} for who in asked)
    assert {found["case"] for found in results["measured"]} == {"1M"}
    assert order == sorted(order, reverse=True) and order.count("profile") == len(results["profiled"]) == 2


def test_compile_part(monkeypatch, capsys):
    """The parts together run ours once for the plan and for all shapes of the kernels, and the compiled reference."""
    ran = []
    monkeypatch.setattr(gpu.batches, "make", lambda case, device: case)
    for name in ("contenders", "with_compiler"):
        made = [
            Contender(who, None, lambda name=name, who=who: ran.append((name, who))) for who in (OURS, TRACED, BY_HAND)
        ]
        monkeypatch.setattr(gpu, name, lambda case, operation, made=made: made)
    for part in range(3):
        gpu.main(["--device", "cpu", "--compile", f"{part}/3"])
    sequences = sum(axis == "sequences" for axis, _ in gpu.scaling(True))
    assert ran.count(("with_compiler", TRACED)) == 4 and BY_HAND not in {who for _, who in ran}
    assert ran.count(("contenders", OURS)) == len(list(planned(True))) + sequences


def test_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main(["--json", str(tmp_path / "x.json")])
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(SystemExit):
        gpu.parse(["--resume"])


def test_the_whole_thing_on_the_host(tmp_path, capsys, monkeypatch):
    """From the command line to the table, with the clock of the host; too little time is left for a compiler."""
    monkeypatch.setattr(measure, "FEWEST", 1)
    path = tmp_path / "results.json"
    only = ["--device", "cpu", "--tiny", "--rounds", "0", "--seconds", "30", "--json", str(path)]
    only += ["--cases", "SkyRL's row"]
    assert gpu.main([*only, "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "No GPU; " in printed and "Tiny sizes" in printed
    assert "## rollout-corr" in printed and "| SkyRL's row | SkyRL's recommended recipe |" in printed
    results = json.loads(path.read_text())
    assert results["tiny"] and results["machine"]["torch"] == torch.__version__ and len(results["commit"]) >= 7
    assert len(results["measured"]) == 2 and results["under_way"] is None
    gpu.main([*only, "--resume"])
    assert json.loads(path.read_text())["measured"] == results["measured"]
    results["measured"][0]["problem"] = "it broke"
    path.write_text(json.dumps(results))
    assert gpu.main([*only, "--resume"]) == gpu.INCOMPLETE


# --- tables -----------------------------------------------------------------------------------------------------------


def text_of(results):
    return "\n".join(tables.markdown(gpu_tables.all_tables(results)))


def test_tables():
    results = results_of_gpu()
    page, where = text_of(results), "| 16M | token weights, rejection |"
    for line in (
        f"{where} 0.0100 | - | 0.0100 | 0.100 | 4 | 0 | 1 | 1.0 | 1400 | 70% |",
        f"{where} 5.0 x | 25.0 x |",
        f"{where} 4.0 x | 8.0 x |",
        "0.0800 (0.0400-0.160) e |",
        "0.0400 (0.0200-0.0800) |",
        f"{where} torch by hand | 3 | 1 | 0 | 0 | 0.500 |",
        f"{where} read_kernel | 2 | 10.0 |",
        f"{where} 1.0 | 1.0 | 1.0 |",
        f"{where} packed | float32 | bool | 900,000 | 1,000,000 | 10 | 14 | 14.00 |",
        "| tokens | 16M | 1,000,000 | 10 | 0.0100 | - | 1400 | 70% | 8.0 x |",
        f"{where} 7.00 | 0.0400 | 0.0100 | 4.0 x | 0.0400 | 0.0100 | 4.0 x |",
        f"{where} >= 90 % of the copy bandwidth | 0.7 | no |",
        "| extra memory <= 2 % of inputs and outputs | 0.0749 | no |",
    ):
        assert line in page, line
    made = gpu_tables.all_tables(results)
    assert len(made) == 12
    for table in made:
        assert {len(row) for row in table.rows} == {len(table.head)}, table.title
    assert "of a copy" in tables.plain(gpu_tables.our_table(results))
    assert gpu_tables.notes(results) == ["16M, token weights, rejection: verl absent: it has no packed form"]
    assert gpu_tables.facts(results) == [
        "2026-01-01, commit cccccccccccc with uncommitted changes; Python 3.12.3, torch 2.11.0, Triton 3.6.0.",
        "a GPU, 132 multiprocessors, L2 50 MiB, memory 80 GiB, driver 580.1, CUDA 13.0; 16 cores of a processor.",
    ]


def test_promises():
    small = text_of(results_of_gpu("32k in 256"))
    assert "| GPU time <= 20 us | 10 | yes |" in small
    assert "| >= 20 x the fastest peer, whole calls | 25 | yes |" in small
    assert "| >= 3 x torch.compile of our reference, no metrics | 4 | yes |" in small
    another = results_of_gpu("32k in 256")
    rows = another["measured"][0]["rows"]
    rows.append({**rows[2], "name": XTUNER, "wall_ms": rows[1]["wall_ms"]})
    rows[0]["row_ms"] = {"median": 0.006, "low": 0.005, "high": 0.007}
    page = text_of(another)
    assert "| >= 20 x the fastest peer, whole calls | 5 | no |" in page
    # In a row there is no gap that a host could fill.
    assert "| GPU time <= 20 us | 6 | yes |" in page and "| 0.0100 | 0.00600 | 0.0100 | 0.100 |" in page
    assert "| <= 1.45 x the time of the required bytes | 1.43 | yes |" in text_of(results_of_gpu("16M", "BOTH"))
    both = results_of_gpu("16M in 100,000")
    assert "the time of long sequences" not in text_of(both)
    both["measured"] += results_of_gpu("16M")["measured"]
    assert "| <= 1.5 x the time of long sequences | 1 | yes |" in text_of(both)
    assert "Promised" not in text_of(results_of_gpu() | {"tiny": True})


def test_a_problem_is_a_note_and_no_row():
    problem = {"case": "64M", "operation": "x", "problem": "the run ended in it"}
    results = results_of_gpu()
    results["measured"].append(problem)
    assert text_of(results) == text_of(results_of_gpu())
    assert "64M, x: not timed: the run ended in it" in gpu_tables.notes(results)
    assert gpu_tables.one_line(problem) == "64M, x: the run ended in it"
    unprofiled = text_of(results_of_gpu() | {"profiled": [{**problem, "case": "16M"}]})
    assert "| 0.0100 | - | 0.0100 | 0.100 | - | - | - | 1.0 | 1400 | 70% |" in unprofiled


# --- pictures ---------------------------------------------------------------------------------------------------------


def with_points():
    def point(axis, case, in_a_row=None, **changed):
        found = {**results_of_gpu(case)["measured"][0], "axis": axis, **changed}
        if in_a_row is not None:
            found["rows"][0]["row_ms"] = {"median": in_a_row, "low": in_a_row, "high": in_a_row}
        return found

    points = [("1k", 0.007, 1024), ("4k", 0.014, 4096), ("16k", None, 16384)]
    return results_of_gpu("32k in 256") | {
        "scaling": [
            *(point("tokens", case, row, slots=slots) for case, row, slots in points),
            point("skew", "skew 0.5"),
            {"axis": "skew", "case": "skew 1", "problem": "wrong"},
        ]
    }


def test_curves():
    """14 MB in 10 us are 0.7 of the copy, in 7 us in a row as much as the copy, in 14 us half of it."""
    alone, row = "one call, cold caches", "calls in a row"
    curves = gpu_tables.scaling(with_points())
    assert list(curves) == ["tokens", "skew"] and curves["skew"] == {alone: [(0.5, pytest.approx(0.7))]}
    assert curves["tokens"][alone] == [(x, pytest.approx(0.7)) for x in (1024.0, 4096.0, 16384.0)]
    assert curves["tokens"][row] == [(1024.0, pytest.approx(1.0)), (4096.0, pytest.approx(0.5))]
    bars = {EAGER: [("32k in 256", pytest.approx(5.0))], BY_HAND: [("32k in 256", pytest.approx(25.0))]}
    assert gpu_tables.speedups(with_points()) == bars
    assert gpu_tables.scaling({**with_points(), "scaling": []}) == {}


def test_no_pictures_without_a_report(monkeypatch):
    monkeypatch.setattr(report, "load", lambda path: None)
    with pytest.raises(SystemExit, match=r"there is no benchmarks/results/gpu\.json to draw"):
        plots.main()


@pytest.mark.slow
def test_pictures(tmp_path, monkeypatch):
    """Small, the same each time, and with a caption that names machine and date."""
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    results = {**with_points(), "machine": {"gpu": "a GPU"}}
    step = {"name": "benchmark", "parts": [{"found": results}]}
    found = {"date": "2026-01-01", "commit": "c" * 40, "steps": [step]}
    drawn = []
    for _ in range(2):
        assert plots.write(found) == list(gpu_tables.PICTURES.values())
        drawn.append([(tmp_path / name).read_bytes() for name in gpu_tables.PICTURES.values()])
    assert drawn[0] == drawn[1] and all(len(picture) < 60_000 for picture in drawn[0])
    assert all(b"a GPU, 2026-01-01, commit cccccccccccc" in picture for picture in drawn[0])
    assert plots.write({"steps": []}) == []
