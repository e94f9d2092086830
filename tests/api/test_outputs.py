"""Tensors of the caller that `correct` writes to: the bits of a call without them, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled

REJECTS = (rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01),)
SPEC = rc.Spec(rc.Weight.token(upper=1.1), REJECTS)
NORMALIZED = rc.Spec(rc.Weight.product(normalize="batch"), REJECTS, "both", nonfinite="propagate")
LAYOUTS = {"padded": (4, 40), "packed": (160,), "row": (1, 160)}


def batch(layout, device="cpu", dtype=torch.float32):
    """Log-probs, and mask and offsets by keyword; the first and the last token of a packed batch are in no sequence."""
    generator = torch.Generator().manual_seed(3)
    shape = LAYOUTS[layout]
    rollout = torch.rand(shape, generator=generator).clamp(min=1e-3).log()
    train = rollout + 0.05 * torch.randn(shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.8).to(torch.int32)
    offsets = None if layout == "padded" else torch.tensor([1, 60, 60, 159], device=device)
    return (train.to(device, dtype), rollout.to(device, dtype)), {"mask": mask.to(device), "cu_seqlens": offsets}


def outputs_for(train, mask=torch.int32):
    """Tensors that hold what no result holds."""
    return rc.Outputs(torch.full_like(train, 77.0), torch.full_like(train, 77.0).to(mask))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("layout", "spec"), [("padded", SPEC), ("packed", NORMALIZED), ("row", SPEC)])
def test_the_results_are_the_tensors_given(layout, spec, backend, device):
    given, named = batch(layout, device)
    plain = rc.correct(*given, **named, spec=spec, backend=backend)
    out = outputs_for(given[0])
    found = rc.correct(*given, **named, spec=spec, backend=backend, out=out)
    assert found.weights is out.weights
    assert found.mask is out.mask
    assert torch.equal(found.weights, plain.weights)
    assert torch.equal(found.mask, plain.mask)
    assert found.metrics() == plain.metrics()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_of_them_and_no_mask_given(backend, device):
    given, _ = batch("padded", device)
    plain = rc.correct(*given, spec=SPEC, backend=backend)
    out = rc.Outputs(mask=torch.empty(given[0].shape, dtype=torch.bool, device=device))
    found = rc.correct_async(*given, spec=SPEC, backend=backend, out=out).result()
    assert found.mask is out.mask
    assert torch.equal(found.mask, plain.mask)
    assert torch.equal(found.weights, plain.weights)


def test_a_loop_allocates_neither(monkeypatch):
    given, named = batch("packed")
    out = outputs_for(given[0])
    empty, sizes = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *size, **how: sizes.append(size) or empty(*size, **how))
    rc.correct(*given, **named, spec=SPEC, out=out)
    assert not sizes
    rc.correct(*given, **named, spec=SPEC)
    assert len(sizes) == 2


def as_mask(x):
    """The memory of 80 int64 as a mask."""
    return x.view(torch.int32).view(4, 40)


def apart(distance):
    """Weights and mask in one tensor, whose beginnings are so many entries apart."""
    held = torch.zeros(distance + 160)
    return rc.Outputs(held[:160].view(4, 40), held[distance:].view(torch.int32).view(4, 40))


def test_memory_that_is_read_or_written_twice_is_refused():
    """Statistics of labels and means of groups are taken behind the kernels."""
    given, named = batch("padded")
    ids, index, offsets = named["mask"].clone(), torch.arange(80), 40 * torch.arange(80)
    for name, more, out in (
        ("train_logp", {}, rc.Outputs(given[0])),
        ("mask", {}, rc.Outputs(mask=named["mask"])),
        ("labels['env']", {"labels": {"env": ids}, "label_names": {"env": 2}}, rc.Outputs(mask=ids)),
        ("groups.index", {"group_index": index[:4]}, rc.Outputs(mask=as_mask(index))),
        ("turns", {"turns": offsets[:5]}, rc.Outputs(mask=as_mask(offsets))),
        ("out.weights", {}, apart(159)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"expected memory of its own, got memory of {name}")):
            rc.correct(*given, **bundled(**named, **more, spec=SPEC, out=out))
    held = torch.zeros(320)
    behind = rc.Outputs(held[160:].view(4, 40), held[:160].view(torch.int32).view(4, 40))
    for out in (apart(160), behind):
        assert rc.correct(*given, **named, spec=SPEC, out=out).weights is out.weights


def test_a_compiler_is_refused_in_words(monkeypatch):
    given, named = batch("padded")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"out: expected None inside torch\.compile"):
        rc.correct(*given, **named, spec=SPEC, out=outputs_for(given[0]))


def test_gradients_flow_to_nothing():
    given, named = batch("packed")
    out = rc.correct(given[0].requires_grad_(), given[1], **named, spec=SPEC, out=outputs_for(given[0].detach()))
    assert not out.weights.requires_grad
