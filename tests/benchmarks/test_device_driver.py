"""What the device benchmark asks of the driver and of the profiler, and what it reads from their answers."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from builders.benchmark_folder import load

pytestmark = pytest.mark.usefixtures("benchmarks")


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


# --- the GPU's own methods, with a driver of paper ---


class Paper:
    """What is asked of torch.cuda, in order, answered without a device."""

    def __init__(self, monkeypatch):
        self.log, self.clock, self.stream = [], 0.0, "default"
        for name in ("CUDAGraph", "Event", "Stream", "current_stream", "graph", "memory_allocated", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("max_memory_allocated", "reset_peak_memory_stats", "set_sync_debug_mode", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "stream", self.graph)
        self.held, self.peak = 100, 100
        self.gpu = object.__new__(load("device").Cuda)
        self.gpu._evicting = self
        self.capture_fails = False

    def zero_(self):
        self.log.append("evict")

    def Event(self, enable_timing):
        return PaperEvent(self)

    def Stream(self):
        return PaperStream(self, "side")

    def current_stream(self):
        return PaperStream(self, self.stream)

    def set_stream(self, stream):
        self.stream = stream.name

    @contextmanager
    def graph(self, first, stream=None):
        before, self.stream = self.stream, (first if stream is None else stream).name
        self.log.append("stream" if stream is None else "capture")
        yield
        if stream is not None and self.capture_fails:
            raise RuntimeError("capture failed")  # torch leaves the stream as it is
        self.stream = before

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def synchronize(self):
        self.log.append("synchronize")

    def memory_allocated(self):
        return self.held

    def max_memory_allocated(self):
        return self.peak

    def reset_peak_memory_stats(self):
        self.peak = self.held

    def set_sync_debug_mode(self, mode):
        self.log.append(f"debug {mode}")


class PaperStream:
    def __init__(self, paper, name):
        self.paper, self.name = paper, name

    def wait_stream(self, other):
        self.paper.log.append(f"{self.name} waits for {other.name}")


class PaperEvent:
    def __init__(self, paper):
        self.paper = paper

    def record(self):
        self.paper.log.append("event")
        self.at = self.paper.clock

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_events_stand_around_the_call_and_behind_the_eviction(monkeypatch):
    paper = Paper(monkeypatch)

    def call():
        paper.log.append("call")
        paper.clock += 0.25

    seconds = paper.gpu.timed(call)
    assert paper.log == ["evict", "event", "call", "event"] and seconds() == pytest.approx(0.25)


def test_a_graph_is_warmed_up_captured_and_replayed(monkeypatch):
    paper = Paper(monkeypatch)
    replay = paper.gpu.graph([lambda: paper.log.append("a") or "a", lambda: paper.log.append("b") or "b"])
    assert paper.log == [
        *("side waits for default", "stream", "a", "b", "a", "b", "default waits for side", "synchronize"),
        *("capture", "a", "b"),
    ]
    assert replay() == ["a", "b"] and paper.log[-1] == "replay" and paper.stream == "default"
    paper.capture_fails = True
    with pytest.raises(RuntimeError, match="capture failed"):
        paper.gpu.graph([lambda: None])
    assert paper.stream == "default"


def test_who_waits(monkeypatch):
    paper = Paper(monkeypatch)

    def raises(words):
        def call():
            paper.log.append("call")
            raise RuntimeError(words)

        return call

    assert not paper.gpu.waits(lambda: paper.log.append("call"))
    assert paper.gpu.waits(raises("called a synchronizing CUDA operation"))
    with pytest.raises(RuntimeError, match="illegal"):
        paper.gpu.waits(raises("an illegal memory access was encountered"))
    assert paper.log == ["synchronize", "debug error", "call", "debug default"] * 3


def test_a_driver_that_does_not_answer(monkeypatch):
    device = load("device")
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/bin/{name}")

    def run(command, timeout, **more):
        raise device.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(device.subprocess, "run", run)
    assert device.driver() == {}
    answer = SimpleNamespace(returncode=0, stdout="580.1, 1980 MHz, 3201 MHz, 700.00 W\n")
    monkeypatch.setattr(device.subprocess, "run", lambda command, **more: answer)
    assert device.driver() == {"driver": "580.1", "clocks": "1980 MHz, 3201 MHz, 700.00 W"}


def test_memory_of_a_gpu(monkeypatch):
    """100 were there; the call takes 70 at its worst and gives back 30."""
    paper = Paper(monkeypatch)
    paper.peak = 5000

    def call():
        paper.peak = 170
        paper.held = 130

    assert paper.gpu.memory(call) == load("memory").Memory(temporaries=40, outputs=30)
