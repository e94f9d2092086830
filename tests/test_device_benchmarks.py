"""The device benchmark's own logic, on a device whose clock is moved by hand. Nothing here measures a time."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from benchmark_folder import load

pytestmark = pytest.mark.usefixtures("benchmarks")


def compiled_ones_left_out(batch, operation):
    """Everybody who needs no compiler."""
    contenders = load("device_contenders")
    return [who for who in contenders.contenders(batch, operation) if who.name != load("contenders").COMPILED]


def tiny(name):
    return load("batches").named(name).tiny()


# --- batches and bytes ---


def test_batches():
    batches = load("batches")
    for case in batches.CASES:
        for wanted in (case, case.tiny()):
            lengths = batches.lengths_of(wanted, 0)
            assert lengths.shape == (wanted.sequences,) and lengths.min() >= 1
            if wanted.packed:
                assert lengths.sum() == wanted.tokens
            else:
                assert lengths.max() <= wanted.shape[1]
                # Rounded to whole tokens, and cut at the width.
                assert 0.8 * wanted.fill <= lengths.sum() / wanted.tokens <= wanted.fill + 0.01
        batch = batches.make(case.tiny())
        assert batch.old.dtype == batch.new.dtype == case.logp and batch.new.requires_grad
        assert batch.mask.dtype == case.mask and batch.valid_tokens == int(batch.valid.sum()) > 0
        again, another = batches.make(case.tiny()), batches.make(case.tiny(), seed=1)
        assert torch.equal(again.old, batch.old) and not torch.equal(another.old, batch.old)


def test_where_the_mask_lies():
    batches = load("batches")
    row = batches.make(tiny("SkyRL's row"))
    n = int(row.lengths[0])
    assert row.mask[0].tolist() == [0.0] * (96 - n) + [1.0] * n
    rows = batches.make(tiny("1024 x 8192 at 25 %"))
    assert [int(n) for n in rows.mask.sum(1)] == rows.lengths.tolist() and bool(rows.mask[:, 0].all())
    pack = batches.make(tiny("xtuner's pack"))
    first, last = pack.mask[: pack.cu_seqlens[1]], pack.mask[pack.cu_seqlens[-2] :]
    prompt = int(0.2 * first.numel())
    assert first.tolist() == [False] * prompt + [True] * (first.numel() - prompt)
    assert last.numel() == batches.PAD and not last.any()


def test_scaling_changes_one_thing():
    batches = load("batches")
    tokens = batches.by_tokens(1 << 26)
    assert [case.tokens for case in tokens][:2] == [1 << 10, 1 << 12] and tokens[-1].tokens == 1 << 26
    assert {case.tokens // case.sequences for case in tokens} == {512}
    sequences = batches.by_sequences(1 << 22)
    assert {case.tokens for case in sequences} == {1 << 22} and sequences[-1].sequences == 100_000
    skews = batches.by_skew(1 << 20)
    assert len({(case.tokens, case.sequences) for case in skews}) == 1
    longest = [int(batches.lengths_of(case, 0).max()) for case in skews]
    assert longest == sorted(longest) and longest[-1] > 50 * longest[0]


BYTES = {
    ("16M", "METRICS"): 4 + 4 + 1,
    ("16M", "TOKEN"): 4 + 4 + 1 + 4 + 1,
    ("16M", "PRODUCT"): 4 + 4 + 1 + 4,
    ("16M, bf16", "TOKEN"): 2 + 2 + 1 + 4 + 1,
    ("2048 x 8192, int64", "TOKEN"): 4 + 4 + 8 + 4 + 8,
    ("xtuner's pack", "XTUNER"): 4 + 4 + 1 + 4 + 1,
    ("SkyRL's row", "SKYRL"): 4 + 4 + 4 + 4 + 4,
    ("16M", "FORWARD"): 4 + 4 + 4 + 1 + 4 + 1,
    ("16M", "BACKWARD"): 4 + 4,
    ("16M", "BOTH"): 4 + 4 + 4 + 1 + 4 + 1 + 4,
    ("16M, bf16", "BOTH"): 2 + 2 + 4 + 1 + 4 + 1 + 2,
    ("SkyRL's row", "SKYRL_STEP"): 4 + 4 + 4 + 4 + 4 + 4,
}


@pytest.mark.parametrize(("case", "operation"), BYTES)
def test_bytes(case, operation):
    operations = load("operations")
    batch = load("batches").make(tiny(case))
    expected = BYTES[case, operation]
    assert operations.bytes_per_slot(batch, getattr(operations, operation)) == expected
    assert operations.required_bytes(batch, getattr(operations, operation)) == expected * batch.slots


# --- who computes the same ---


def test_everybody_in_the_plan_computes_the_same():
    """By hand, and the restated operations of xtuner and SkyRL, against ours: weights, masks, losses, metrics."""
    batches, gate, names = load("batches"), load("device_gate"), load("device_contenders")
    seen = set()
    for name, wanted in load("operations").PLAN:
        batch = batches.make(tiny(name))
        for operation in wanted:
            found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
            if len(found) > 1:
                assert gate.check(batch, operation, found) == {}
                seen |= set(found)
    assert {names.BY_HAND, names.XTUNER, names.XTUNER_ONCE, names.SKYRL} <= seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_own_reference_compiles_whole():
    """What is timed as torch.compile of our reference has no graph break.

    A correction on the meta device takes the path of a GPU; on the CPU a compiler gets the operator instead.
    """
    names, operations, gate = load("device_contenders"), load("operations"), load("device_gate")
    held = load("batches").make(tiny("32k in 256"))
    how = {"fullgraph": True, "backend": "aot_eager"}
    tensors = {name: getattr(held, name).to("meta") for name in ("old", "rollout", "mask", "cu_seqlens")}
    weights, mask, *_ = names._traced_correct(replace(held, **tensors), operations.TOKEN, **how).on_device()
    assert weights.shape == held.old.shape and mask.dtype == torch.bool
    correction = rc.correct(held.old, held.rollout, held.mask, cu_seqlens=held.cu_seqlens, spec=operations.TOKEN_SPEC)
    traced = names._traced_loss(held, operations.BOTH, correction, **how)
    ours = names._loss(names.OURS, held, operations.BOTH, correction, "auto")
    assert gate.check(held, operations.BOTH, {names.OURS: ours.whole(), names.TRACED: traced.whole()}) == {}


def wrong_weights(out):
    return out._replace(weights=out.weights * 1.001)


def no_weights(out):
    return out._replace(weights=None)


def weights_at_prompts(out):
    return out._replace(weights=out.weights + 1e-3 * (out.weights == 0))


def wrong_mask(out):
    return out._replace(mask=torch.zeros_like(out.mask))


def mask_at_prompts(out):
    return out._replace(mask=torch.ones_like(out.mask))


def wrong_metric(out):
    return out._replace(metrics={**out.metrics, "d_std": out.metrics["d_std"] * 1.01})


def nan_metric(out):
    return out._replace(metrics={**out.metrics, "d_mean": math.nan})


def other_metrics(out):
    return out._replace(metrics={"mine": 1.0})


def wrong_value(out):
    return out._replace(value=out.value * 1.01)


def no_gradient(out):
    return out._replace(gradient=None)


def wrong_gradient(out):
    return out._replace(gradient=out.gradient * 1.001)


def nan_gradient(out):
    return out._replace(gradient=out.gradient / 0.0)


OF_CORRECT = (
    wrong_weights,
    no_weights,
    weights_at_prompts,
    wrong_mask,
    mask_at_prompts,
    wrong_metric,
    nan_metric,
    other_metrics,
)
OF_LOSS = (wrong_value, no_gradient, wrong_gradient, nan_gradient)


@pytest.mark.parametrize("spoil", OF_CORRECT + OF_LOSS, ids=lambda spoil: spoil.__name__)
def test_gate(spoil):
    """A peer that is wrong is named; a reference that is wrong stops everything; so does ours."""
    gate, operations, names = load("device_gate"), load("operations"), load("device_contenders")
    operation = operations.TOKEN if spoil in OF_CORRECT else operations.BOTH
    batch = load("batches").make(tiny("1M"))
    found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
    spoiled = spoil(found[names.BY_HAND])
    wrong = gate.check(batch, operation, {**found, "a third": found[names.OURS], names.BY_HAND: spoiled})
    assert list(wrong) == [names.BY_HAND] and names.BY_HAND in wrong[names.BY_HAND]
    with pytest.raises(gate.WrongResult, match="nobody agrees"):
        gate.check(batch, operation, {**found, names.BY_HAND: spoiled})
    with pytest.raises(gate.WrongResult):
        gate.check(batch, operation, {**found, names.EAGER: spoiled})
    with pytest.raises(gate.WrongResult):
        gate.check(batch, operation, {**found, names.OURS: spoil(found[names.OURS])})
    with pytest.raises(gate.WrongResult, match="nobody agrees"):
        gate.check(batch, operation, {names.OURS: found[names.OURS]})


def test_reference_agrees_to_the_bit():
    """One token of the mask is nothing to a peer, and everything to our own definition."""
    gate, operations, names = load("device_gate"), load("operations"), load("device_contenders")
    case = load("batches").named("1M")
    batch = load("batches").make(case.__class__("", "", 8192, 16))
    found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operations.TOKEN) if who.whole is not None}
    mask = found[names.OURS].mask.clone()
    mask[int(mask.int().argmax())] = False
    other = found[names.OURS]._replace(mask=mask)
    assert gate.check(batch, operations.TOKEN, {**found, names.BY_HAND: other}) == {}
    with pytest.raises(gate.WrongResult, match="differs from ours at 1 of"):
        gate.check(batch, operations.TOKEN, {**found, names.EAGER: other})


# --- the profiler's trace ---


def event(category, name, ts, dur=1.0):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur}


def test_trace():
    trace = load("trace")
    mark = event("user_annotation", trace.LABEL, 100.0, 50.0)
    shadow = event("gpu_user_annotation", trace.LABEL, 120.0, 80.0)
    given = [
        {"ph": "M", "name": "process_name"},
        mark,
        shadow,
        event("cuda_runtime", "cudaDeviceSynchronize", 10.0),  # before
        event("cuda_driver", "cuLaunchKernelEx", 110.0),
        event("cuda_runtime", "cudaLaunchKernel", 112.0),
        event("cuda_runtime", "cudaMemcpyAsync", 115.0),
        event("cuda_runtime", "cudaStreamSynchronize", 120.0),
        event("cuda_runtime", "cudaMemcpy", 125.0),
        event("cuda_runtime", "cudaDeviceSynchronize", 160.0),  # the profile's own
        event("kernel", "read_kernel", 130.0, 6.0),
        event("kernel", "read_kernel", 140.0, 4.0),
        event("kernel", "judge_kernel", 170.0, 2.5),  # runs after the call has returned
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 180.0, 1.5),
        event("gpu_memset", "Memset (Device)", 181.0, 1.0),
    ]
    found = trace.counts(given)
    assert (found.kernels, found.copies, found.fills, found.syncs) == (3, 1, 1, 2)
    assert found.busy_ms == pytest.approx(0.015)
    assert found.longest == {"read_kernel": (2, 0.01), "judge_kernel": (1, 0.0025)}
    assert list(trace.counts(given, most=1).longest) == ["read_kernel"]
    assert trace.counts([mark]) is None
    for marks in ([], [mark, mark]):
        with pytest.raises(ValueError, match=f"got {len(marks)}"):
            trace.counts(marks)


def test_trace_of_a_real_profile(tmp_path):
    """The mark is found where torch writes it; a CPU has no device to count."""
    trace = load("trace")
    mark = torch.profiler.record_function(trace.LABEL)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run, mark:
        torch.ones(3).sum()
    run.export_chrome_trace(str(tmp_path / "trace.json"))
    assert trace.counts(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) is None


# --- measuring ---


class Clockwork:
    """A device whose calls take what they say."""

    name = "cpu"
    copy_bytes = 4_000_000

    def __init__(self, waits=(), uncapturable=()):
        self.now, self.captured, self.log = 0.0, [], []
        self.waits, self.uncapturable = waits, uncapturable

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

    def memory(self, call):
        return load("memory").Memory(300, 200)

    def counts(self, call):
        return load("trace").Counts(kernels=3, syncs=2 if call in self.waits else 0)

    def free(self):
        self.log.append("free")


def somebody(device, name, seconds, out=None, **about):
    contenders = load("device_contenders")
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
    names, measure = load("device_contenders"), load("measure")
    device = Clockwork()
    ours = somebody(device, names.OURS, 0.004)
    by_hand = somebody(device, names.BY_HAND, 0.020, capturable=False)
    verl = names.absent(names.VERL, "not installed")
    found = measured(device, [ours, by_hand, verl])
    rows = rows_of(found)
    assert rows[names.OURS]["how"] == "graph" and rows[names.BY_HAND]["how"] == "clock"
    assert rows[names.OURS]["device_ms"]["median"] == 3.0  # a millisecond less in a graph
    assert rows[names.OURS]["row_ms"]["median"] == 3.0 and "row_ms" not in rows[names.BY_HAND]
    assert rows[names.OURS]["call_ms"]["median"] == 4.0 and rows[names.OURS]["wall_ms"]["median"] == 14.0
    assert rows[names.BY_HAND]["device_ms"]["median"] == 20.0 and rows[names.BY_HAND]["wall_ms"]["median"] == 30.0
    assert rows[names.OURS]["temporaries"] == 300 and rows[names.OURS]["on_device"]["kernels"] == 3
    assert rows[names.OURS]["whole"]["syncs"] == 0 and "whole" not in rows[names.BY_HAND]
    assert rows[names.VERL] == {"name": names.VERL, "note": "absent: not installed"}
    assert found["rounds"] == measure.FEWEST and found["copy_ms"]["median"] == 2.0
    assert found["required_bytes"] == 18 * found["slots"] and found["bytes_per_slot"] == 18
    assert [len(calls) for calls in device.captured] == [1, measure.IN_A_ROW]


def test_every_time_begins_with_cold_caches():
    names = load("device_contenders")
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
    names = load("device_contenders")
    device = Clockwork()
    device.name = "cpu"
    ours, by_hand = somebody(device, names.OURS, 0.004), somebody(device, names.BY_HAND, 0.020)
    device.waits, device.uncapturable = (by_hand.on_device,), (ours.on_device,)
    rows = rows_of(measured(device, [ours, by_hand]))
    assert rows[names.OURS]["not_captured"] == "operation not permitted when stream is capturing"
    assert rows[names.OURS]["how"] == "events" and rows[names.OURS]["device_ms"]["median"] == 4.0
    assert "not_captured" not in rows[names.BY_HAND] and rows[names.BY_HAND]["device_ms"]["median"] == 20.0


def test_large_batches_are_not_put_in_a_row():
    names, measure = load("device_contenders"), load("measure")
    device = Clockwork()
    case = load("batches").Case("", "", 4 * measure.MOST_IN_A_ROW, 8)
    small = tiny("32k in 256")
    ready = measure._row(device, case, load("operations").FORWARD, somebody(device, names.OURS, 0.1), None)
    assert ready is None
    assert measure._row(device, small, None, somebody(device, names.BY_HAND, 0.1), None) is None


def test_wrong_results_are_not_timed():
    names = load("device_contenders")
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
    names = load("device_contenders")
    device = Clockwork()

    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    ours, by_hand = somebody(device, names.OURS, 0.004), somebody(device, names.BY_HAND, 0.001)
    large = names.Contender(names.EAGER, too_large, too_large)
    slow = somebody(device, names.TRACED, 0.001, slow=True)
    rows = rows_of(measured(device, [ours, by_hand, large, slow], left=10.0))
    assert rows[names.EAGER]["note"] == "not run: out of memory"
    assert rows[names.TRACED]["note"] == "not run: it compiles for long, and 10 s were left"
    assert names.TRACED not in device.log and "device_ms" in rows[names.OURS]
    assert "device_ms" in rows_of(measured(device, [ours, by_hand, slow]))[names.TRACED]


def test_rounds_are_shuffled_and_limited():
    names, measure = load("device_contenders"), load("measure")
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
    return argparse.Namespace(**{"tiny": True, "cases": None, "rounds": 0.0, "scaling": False, **changed})


def noted(where, case, operation, **_):
    return {"case": case.name, "operation": operation.name, "rows": []}


def test_run_goes_on_where_it_ended():
    gpu, measure, operations = load("gpu"), load("measure"), load("operations")
    device = Clockwork()
    saved = []

    def save(results):
        saved.append(json.loads(json.dumps(results)))

    def breaks(where, case, operation, **more):
        if len(results["measured"]) == 2:
            raise RuntimeError("an illegal memory access was encountered")
        return noted(where, case, operation)

    results = gpu.head(device, True)
    with pytest.raises(RuntimeError):
        gpu.run(device, results, options(), measure.Budget(1e6), save, breaks)
    left = saved[-1]
    wanted = [(name, operation.name) for name, many in operations.PLAN for operation in many]
    assert [gpu.key(x) for x in left["measured"]] == wanted[:2] and tuple(left["under_way"]) == wanted[2]
    gpu.run(device, left, options(), measure.Budget(1e6), save, noted)
    assert [gpu.key(x) for x in left["measured"]] == wanted
    assert left["measured"][2]["problem"] == "the run ended in it" and left["under_way"] is None
    assert left["machine"]["gpu"] == "clockwork" and len(set(wanted)) == len(wanted)


def test_run_ends_with_its_budget():
    gpu, measure = load("gpu"), load("measure")
    results = gpu.head(Clockwork(), True)
    gpu.run(Clockwork(), results, options(), measure.Budget(0.0), lambda _: None, noted)
    assert results["measured"] == []


def test_scaling_is_ours_and_by_hand(capsys):
    gpu, measure, names = load("gpu"), load("measure"), load("device_contenders")
    results = gpu.head(Clockwork(), True)
    asked = []

    def points(where, case, operation, everybody=None, **more):
        if everybody is not None:
            batch = load("batches").make(case)
            asked.append({who.name for who in everybody(batch, operation)})
        return noted(where, case, operation)

    gpu.run(Clockwork(), results, options(scaling=True, cases=["1M"]), measure.Budget(1e6), lambda _: None, points)
    assert {found["axis"] for found in results["scaling"]} == {"tokens", "sequences", "skew"}
    assert asked and all(who == {names.OURS, names.BY_HAND} for who in asked)
    assert {found["case"] for found in results["measured"]} == {"1M"}


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
    gpu.main([*only, "--cases", "SkyRL's row", "--markdown"])
    printed = capsys.readouterr().out
    assert "## rollout-corr" in printed and "| SkyRL's row | SkyRL's recommended recipe |" in printed
    results = json.loads(path.read_text())
    assert results["tiny"] and results["machine"]["torch"] == torch.__version__ and len(results["commit"]) >= 7
    assert len(results["measured"]) == 2 and results["under_way"] is None
    gpu.main([*only, "--cases", "SkyRL's row", "--resume"])
    assert json.loads(path.read_text())["measured"] == results["measured"]


# --- tables ---


def results_of(case="16M", operation="TOKEN", **changed):
    """A run whose answers are easy: 14 MB in 10 us beside a copy of 2 GB in 1 ms."""
    names = load("device_contenders")

    def milliseconds(median):
        return {"median": median, "low": median / 2, "high": median * 2}

    def row(name, device, wall, **more):
        times = {"device_ms": milliseconds(device), "call_ms": milliseconds(device), "wall_ms": milliseconds(wall)}
        counted = {"kernels": 3, "fills": 1, "copies": 0, "syncs": 0, "busy_ms": 0.5, "longest": {}}
        return {"name": name, "note": "", "how": "graph", "on_device": counted, "temporaries": 1 << 20, **times, **more}

    whole = {"kernels": 3, "fills": 1, "copies": 1, "syncs": 1, "busy_ms": 0.5, "longest": {}}
    found = {
        "case": case, "whose": "", "operation": getattr(load("operations"), operation).name, "tokens": 900_000,
        "slots": 1_000_000, "sequences": 10, "layout": "packed", "logp": "float32", "mask": "bool",
        "bytes_per_slot": 14, "required_bytes": 14_000_000, "copy_bytes": 2_000_000_000, "rounds": 5,
        "copy_ms": milliseconds(1.0),
        "rows": [
            row(names.OURS, 0.010, 0.1, whole=whole),
            row(names.TRACED, 0.040, 0.5),
            row(names.BY_HAND, 0.080, 2.5, how="events"),
            {"name": names.VERL, "note": "absent: it has no packed form"},
        ],
        **changed,
    }  # fmt: skip
    return {"tiny": False, "measured": [found], "scaling": [{"axis": "tokens", **found}]}


def text_of(results):
    return "\n".join(load("tables").markdown(load("gpu_tables").all_tables(results)))


def test_tables():
    page = text_of(results_of())
    ours = "| 16M | token weights, rejection | 0.0100 | - | 0.0100 | 0.100 | 4 | 0 | 1 | 1.0 | 1400 | 70% |"
    assert ours in page
    assert "| 16M | token weights, rejection | 5.0 x | 25.0 x |" in page
    assert "| 16M | token weights, rejection | 4.0 x | 8.0 x |" in page
    assert "0.0800 (0.0400-0.160) e |" in page and "0.0400 (0.0200-0.0800) |" in page
    assert "| 16M | token weights, rejection | torch by hand | 3 | 1 | 0 | 0 | 0.500 | 1.0 |" in page
    assert (
        "| 16M | token weights, rejection | packed | float32 | bool | 900,000 | 1,000,000 | 10 | 14 | 14.00 |" in page
    )
    assert "| tokens | 16M | 1,000,000 | 10 | 0.0100 | - | 1400 | 70% | 8.0 x |" in page
    assert load("gpu_tables").notes(results_of()) == [
        "16M, token weights, rejection: verl absent: it has no packed form"
    ]


def test_promises():
    page = text_of(results_of())
    assert "| 16M | token weights, rejection | >= 90 % of the copy bandwidth | 0.7 | no |" in page
    assert "| extra memory <= 2 % of inputs and outputs | 0.0749 | no |" in page
    small = text_of(results_of("32k in 256"))
    assert "| GPU time <= 20 us | 10 | yes |" in small
    assert "| >= 20 x the fastest peer, whole calls | 25 | yes |" in small
    assert "| >= 3 x torch.compile of our reference, no metrics | 4 | yes |" in small
    loss = text_of(results_of("16M", "BOTH"))
    assert "| <= 1.45 x the time of the required bytes | 1.43 | yes |" in loss
    both = results_of("16M in 100,000")
    assert "the time of long sequences" not in text_of(both)
    both["measured"] += results_of("16M")["measured"]
    assert "| <= 1.5 x the time of long sequences | 1 | yes |" in text_of(both)
    tiny_run = {**results_of(), "tiny": True}
    assert "Promised" not in text_of(tiny_run)


def test_time_in_a_row_is_the_time_on_the_gpu():
    results = results_of("32k in 256")
    row = results["measured"][0]["rows"][0]
    row["row_ms"] = {"median": 0.006, "low": 0.005, "high": 0.007}
    page = text_of(results)
    assert "| GPU time <= 20 us | 6 | yes |" in page and "| 0.0100 | 0.00600 | 0.0100 | 0.100 |" in page


def test_a_problem_is_a_note_and_no_row():
    results = results_of()
    results["measured"].append({"case": "64M", "operation": "x", "problem": "the run ended in it"})
    assert text_of(results) == text_of(results_of())
    assert "64M, x: not timed: the run ended in it" in load("gpu_tables").notes(results)
    assert load("gpu_tables").one_line(results["measured"][1]) == "64M, x: the run ended in it"


# --- pictures ---


def scaled(axis, case, in_a_row=None, **changed):
    """A point of a curve."""
    found = {**results_of(case)["measured"][0], "axis": axis, **changed}
    if in_a_row is not None:
        found["rows"][0]["row_ms"] = {"median": in_a_row, "low": in_a_row, "high": in_a_row}
    return found


def with_points():
    results = results_of("32k in 256")
    points = [("tokens", "1k", 0.007, 1024), ("tokens", "4k", 0.014, 4096), ("tokens", "16k", None, 16384)]
    results["scaling"] = [scaled(axis, case, row, slots=slots) for axis, case, row, slots in points]
    results["scaling"] += [scaled("skew", "skew 0.5"), {"axis": "skew", "case": "skew 1", "problem": "wrong"}]
    return results


def test_curves():
    """14 MB in 10 us are 0.7 of the copy, in 7 us in a row as much as the copy, in 14 us half of it."""
    curves, names = load("curves"), load("device_contenders")
    tokens, skew = curves.scaling(with_points())
    assert tokens.logarithmic and not skew.logarithmic
    assert [x for x, _ in tokens.lines["one call, cold caches"]] == [1024.0, 4096.0, 16384.0]
    assert [y for _, y in tokens.lines["one call, cold caches"]] == pytest.approx([0.7] * 3)
    assert tokens.lines["calls in a row"] == [(1024.0, pytest.approx(1.0)), (4096.0, pytest.approx(0.5))]
    assert skew.lines == {"one call, cold caches": [(0.5, pytest.approx(0.7))]}
    assert curves.speedups(with_points()) == {
        names.TRACED: [("32k in 256", pytest.approx(5.0))],
        names.BY_HAND: [("32k in 256", pytest.approx(25.0))],
    }
    assert curves.scaling({**with_points(), "scaling": []}) == []


def test_no_pictures_without_a_report(monkeypatch, tmp_path):
    plots = load("plots")
    monkeypatch.setattr(load("report"), "load", lambda path: None)
    with pytest.raises(SystemExit, match=r"there is no benchmarks/results/gpu\.json to draw"):
        plots.main()


@pytest.mark.slow
def test_pictures(tmp_path, monkeypatch):
    """Small, the same each time, and with a caption that says of which machine and when."""
    plots, report = load("plots"), load("report")
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    results = {**with_points(), "machine": {"gpu": "a GPU"}}
    parts = [{"found": results}]
    found = {"date": "2026-01-01", "commit": "c" * 40, "steps": [{"name": "benchmark", "parts": parts}]}
    drawn = []
    for _ in range(2):
        assert plots.write(found) == ["gpu-scaling.svg", "gpu-speedup.svg"]
        drawn.append([(tmp_path / name).read_bytes() for name in ("gpu-scaling.svg", "gpu-speedup.svg")])
    assert drawn[0] == drawn[1] and all(len(picture) < 60_000 for picture in drawn[0])
    assert all(b"a GPU, 2026-01-01, commit cccccccccccc" in picture for picture in drawn[0])
    assert plots.write({"steps": []}) == []


@pytest.mark.peers
def test_verl_computes_the_same():
    """verl's own correction and its own loss, through the gate that lets them be timed."""
    batches, gate, names, operations = (
        load(name) for name in ("batches", "device_gate", "device_contenders", "operations")
    )
    for case, wanted in (
        ("1024 x 8192 at 25 %", (operations.METRICS, operations.TOKEN)),
        ("2048 x 8192, int64", (operations.FORWARD, operations.BACKWARD, operations.BOTH)),
    ):
        batch = batches.make(tiny(case))
        for operation in wanted:
            found = {who.name: who.whole() for who in compiled_ones_left_out(batch, operation) if who.whole is not None}
            assert names.VERL in found and gate.check(batch, operation, found) == {}
