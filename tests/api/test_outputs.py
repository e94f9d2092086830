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
@pytest.mark.parametrize("spec", [SPEC, NORMALIZED], ids=["token", "normalized"])
@pytest.mark.parametrize("layout", LAYOUTS)
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


def refused(message, given, named, out, spec=SPEC, kind=ValueError):
    with pytest.raises(kind, match=re.escape(message)):
        rc.correct(*given, **bundled(**named, spec=spec, out=out))


def test_what_does_not_fit_is_refused():
    given, named = batch("padded")
    train, mask = given[0], named["mask"]
    refused("out: expected rollout_corr.Outputs or None, got tuple", given, named, (train,), kind=TypeError)
    refused("out.weights: expected a plain tensor or None, got list", given, named, rc.Outputs([1.0]), kind=TypeError)
    fits = "out.weights: expected [4, 40] float32 on cpu (of train_logp), got "
    refused(f"{fits}[160] float32", given, named, rc.Outputs(torch.zeros(160)))
    refused(f"{fits}[4, 40] float64", given, named, rc.Outputs(train.double()))
    refused(f"{fits}[4, 40] float32 on meta", given, named, rc.Outputs(train.to("meta")))
    strided, learned = torch.zeros(40, 4).T, train.clone().requires_grad_()
    refused("out.weights: expected a contiguous tensor, got strides (1, 4)", given, named, rc.Outputs(strided))
    refused("out.weights: expected a tensor that requires no grad", given, named, rc.Outputs(learned))
    refused("out.mask: expected [4, 40] int32 on cpu", given, named, rc.Outputs(mask=mask.bool()))
    none, measures = ", because this Spec hands back", rc.Spec()
    refused(f"out.weights: expected None{none} no weights", given, named, outputs_for(train), measures)
    refused(f"out.mask: expected None{none} the mask", given, named, rc.Outputs(mask=mask.clone()), measures)
    samples = [list(x) for x in given]
    refused("out: expected None beside a list of samples", samples, {}, outputs_for(train))


def test_memory_that_is_read_or_written_twice_is_refused():
    given, named = batch("padded")
    train, mask = given[0], named["mask"]
    own = "expected memory of its own, got memory of"
    refused(f"out.weights: {own} train_logp", given, named, rc.Outputs(train))
    refused(f"out.mask: {own} mask", given, named, rc.Outputs(mask=mask))
    # Statistics of labels and means of groups are taken behind the kernels.
    labeled = named | {"labels": {"env": mask.clone()}, "label_names": {"env": 2}}
    refused(f"out.mask: {own} labels['env']", given, labeled, rc.Outputs(mask=labeled["labels"]["env"]))
    index = torch.arange(80)
    grouped = named | {"group_index": index[:4]}
    refused(f"out.mask: {own} groups.index", given, grouped, rc.Outputs(mask=index.view(torch.int32).view(4, 40)))
    offsets = torch.arange(80) * 40
    turned = named | {"turns": offsets[:5]}
    refused(f"out.mask: {own} turns", given, turned, rc.Outputs(mask=offsets.view(torch.int32).view(4, 40)))
    room = torch.zeros(2 * train.numel() - 1)
    out = rc.Outputs(room[: train.numel()].view(4, 40), room[train.numel() - 1 :].view(torch.int32).view(4, 40))
    refused(f"out.mask: {own} out.weights", given, named, out)
    # Behind each other is not upon each other.
    room = torch.zeros(2 * train.numel())
    out = rc.Outputs(room[: train.numel()].view(4, 40), room[train.numel() :].view(torch.int32).view(4, 40))
    assert rc.correct(*given, **named, spec=SPEC, out=out).weights is out.weights


def test_a_compiler_is_refused_in_words(monkeypatch):
    given, named = batch("padded")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    refused("out: expected None inside torch.compile", given, named, outputs_for(given[0]))


def test_gradients_flow_to_nothing():
    given, named = batch("packed")
    out = rc.correct(given[0].requires_grad_(), given[1], **named, spec=SPEC, out=outputs_for(given[0].detach()))
    assert not out.weights.requires_grad
