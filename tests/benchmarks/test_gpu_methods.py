"""The methods of the benchmark of a GPU without one: the profiler's trace, a pretended driver."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cpu.memory import Memory
from benchmarks.gpu import device as devices
from benchmarks.gpu import trace

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
