"""Replays of a captured step: the launches alone, on the same memory, give what a call on the new batch gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED, WIDE, shaped
from rollout_corr.backends import batch as reading
from rollout_corr.kernels import launches

pytestmark = INTERPRETED


@pytest.fixture(scope="module")
def example():
    """The example, as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / "cuda_graph.py"
    described = importlib.util.spec_from_file_location("cuda_graph", path)
    module = importlib.util.module_from_spec(described)
    with mock.patch.dict("sys.modules", {"cuda_graph": module}):
        described.loader.exec_module(module)
        yield module


def flat(outputs):
    return [outputs.loss, outputs.gradient, outputs.statistics.sums, outputs.statistics.maxima]


def test_launches_alone_are_a_replay(quick_interpreter, monkeypatch):
    """As a graph has them: arguments of launches are addresses and sizes, and nothing on the host is done between."""
    monkeypatch.setattr(reading, "checked_offsets", lambda offsets, tokens: offsets)
    spec = rc.Spec(rc.Weight.token(upper=1.2), (rc.Criterion("abs", upper=0.3),), "both")
    tokens, recorded, run = 60, [], launches.Launch.run

    def batch(seed, cuts):
        generator = torch.Generator().manual_seed(seed)
        rollout = -torch.rand(tokens, generator=generator)
        others = [rollout + 0.2 * torch.randn(tokens, generator=generator) for _ in range(2)]
        return [rollout, *others, torch.randn(tokens, generator=generator), torch.tensor([0, *cuts, tokens])]

    def step(rollout, old, new, advantages, offsets):
        found = rc.correct(old, rollout, cu_seqlens=offsets, spec=spec, backend="triton")
        new = new.detach().requires_grad_()
        out = rc.policy_loss(new, advantages, old_logp=old, correction=found, cu_seqlens=offsets, backend="triton")
        upstream = torch.ones(())
        return found.weights, found.mask, found.keep, torch.autograd.grad(out.value, new, upstream)[0], found, out

    held = batch(0, [7, 31])
    with shaped(WIDE), mock.patch.object(launches.Launch, "run", lambda launch: (recorded.append(launch), run(launch))):
        outputs = step(*held)
    assert len(recorded) == 2 + 2 + 1
    for place, x in zip(held, batch(1, [0, 59]), strict=True):
        place.copy_(x)
    for launch in recorded:
        launch.run()
    with shaped(WIDE):
        wanted = step(*batch(1, [0, 59]))
    for got, expected in zip(outputs[:4], wanted[:4], strict=True):
        assert torch.equal(got, expected)
    assert outputs[4].metrics() == wanted[4].metrics() and outputs[5].metrics() == wanted[5].metrics()


@pytest.mark.gpu
def test_a_captured_step_replays(example):
    """The step of the example: correction, loss and gradient, on batches whose sequences have other lengths."""
    held = example.random_batch(0, "cuda")
    replay = example.captured(held)
    for seed in (1, 2):
        batch = example.random_batch(seed, "cuda")
        for place, x in zip(held, batch, strict=True):
            place.copy_(x)
        with mock.patch.object(launches.Launch, "run", side_effect=AssertionError("a replay launches nothing itself")):
            outputs = replay()
        torch.cuda.synchronize()
        for got, wanted in zip(flat(outputs), flat(example.step(batch)), strict=True):
            assert torch.equal(got, wanted)
