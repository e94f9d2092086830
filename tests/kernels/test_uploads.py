"""Thresholds on a device: there before anybody reads them, and for as long as anybody may."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from rollout_corr.kernels import uploads
from rollout_corr.kernels.launches import Launch

NUMBERS = (0.5, float("inf"), 1e300)


class FakeGPU:
    """Streams and captures as `torch.cuda` has them, with a log of what happened."""

    def __init__(self, monkeypatch):
        self.log, self.stream, self.capturing = [], 1, False
        made = SimpleNamespace(cuda_stream="own", synchronize=lambda: self.log.append("waited for own"))
        for name, fake in {
            "Stream": lambda device: made,
            "stream": self.within,
            "current_stream": lambda device: SimpleNamespace(cuda_stream=self.stream),
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: self.log.append(f"copied on {self.stream}") or x)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: self.log.append(stream.cuda_stream))
        monkeypatch.setattr(uploads, "_STREAMS", {})
        monkeypatch.setattr(uploads, "_CAPTURED", {})

    @contextlib.contextmanager
    def within(self, stream):
        before, self.stream = self.stream, stream.cuda_stream
        yield
        self.stream = before


LANDED = ["copied on own", "waited for own"]


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


def upload():
    """Numbers for a GPU, which lie on the CPU."""
    made = uploads.Upload(NUMBERS, torch.device("cpu"))
    made.numbers, made._on_gpu = uploads._landed(made.numbers, torch.device("cpu")), True
    return made


def test_numbers_are_exact():
    found = uploads.Upload(NUMBERS, torch.device("cpu")).read()
    assert found.dtype == torch.float64 and found.tolist() == list(NUMBERS)


def test_the_copy_is_waited_for(gpu):
    """Another stream would else read what is still on its way. The caller's stream may have much to do before."""
    upload()
    assert gpu.log == LANDED


def test_every_stream_is_recorded_once(gpu):
    """The allocator would else hand the memory on while another stream reads it."""
    held = upload()
    for gpu.stream in (1, 2, 1, 2):
        held.read()
    assert gpu.log == [*LANDED, 1, 2]


def test_a_captured_graph_keeps_its_numbers(gpu):
    held = upload()
    held.read()
    assert not uploads._CAPTURED
    gpu.capturing = True
    for _ in range(2):
        held.read()
    assert list(uploads._CAPTURED.values()) == [held]


def test_a_capture_of_what_was_never_called_is_refused(gpu):
    gpu.capturing = True
    with pytest.raises(
        RuntimeError, match="a CUDA graph is captured, and this Spec or loss was not yet run"
    ) as refused:
        upload()
    assert "call it once with the same arguments before the capture" in str(refused.value) and gpu.log == []


def test_every_call_asks_for_its_numbers(quick_interpreter, monkeypatch):
    """A result that a call has by another way is neither recorded for its stream nor kept for a graph."""
    given, read, launched, run = [], uploads.Upload.read, [], Launch.run
    monkeypatch.setattr(uploads.Upload, "read", lambda held: given.append(read(held).clone()) or given[-1])
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch) or run(launch))
    train, rollout = (x[:300] for x in batch())
    for _ in range(2):
        found = rc.correct(train[None], rollout[None], spec=rc.Spec(rc.Weight.token(upper=3.0)), backend="triton")
        rc.policy_loss(train[None], found.weights, old_logp=rollout[None], backend="triton")
    assert len(given) == 4
    taken = {launch.arguments["p_numbers"].data_ptr() for launch in launched if "p_numbers" in launch.arguments}
    assert taken == {x.data_ptr() for x in given}


def batch():
    rollout = -torch.rand(60_000, generator=torch.Generator().manual_seed(0))
    return rollout + 0.3, rollout


@pytest.mark.gpu
def test_another_stream_reads_the_thresholds_of_the_first():
    """The first call waits behind a long kernel; the second one, on a stream of its own, must not overtake its copy."""
    train, rollout = (x.cuda() for x in batch())
    offsets = torch.tensor([0, 60_000], device="cuda")
    rc.correct(train, rollout, cu_seqlens=offsets, spec=rc.Spec(rc.Weight.token(upper=3.0)))
    spec, other = rc.Spec(rc.Weight.token(upper=1.0625)), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    rc.correct(train, rollout, cu_seqlens=offsets, spec=spec)
    with torch.cuda.stream(other):
        weights = rc.correct(train, rollout, cu_seqlens=offsets, spec=spec).weights
    other.synchronize()
    assert set(weights.unique().tolist()) == {1.0625}


@pytest.mark.gpu
def test_a_graph_outlives_what_is_kept_of_other_specs():
    """So many Specs come after the capture that its thresholds are forgotten, and their memory is asked for again."""
    train, rollout = (x.cuda() for x in batch())
    offsets = torch.tensor([0, 60_000], device="cuda")
    spec = rc.Spec(rc.Weight.token(upper=1.125))
    rc.correct(train, rollout, cu_seqlens=offsets, spec=spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights = rc.correct(train, rollout, cu_seqlens=offsets, spec=spec).weights
    for i in range(600):
        rc.correct(train[None, :64], rollout[None, :64], spec=rc.Spec(rc.Weight.token(upper=2.0 + i / 1024)))
    graph.replay()
    torch.cuda.synchronize()
    assert set(weights.unique().tolist()) == {1.125}


@pytest.mark.gpu
def test_a_capture_before_the_first_call_is_refused():
    train, rollout = (x.cuda() for x in batch())
    offsets = torch.tensor([0, 60_000], device="cuda")
    rc.correct(train, rollout, cu_seqlens=offsets, spec=rc.Spec(rc.Weight.token(upper=3.0)))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="was not yet run on this device"), torch.cuda.graph(graph):
        rc.correct(train, rollout, cu_seqlens=offsets, spec=rc.Spec(rc.Weight.token(upper=1.1875)))
