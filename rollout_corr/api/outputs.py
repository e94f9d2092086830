"""Checks the tensors of the caller that `correct` writes its results to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends.batch import OpenBatch
from ..backends.given import Batch, Outputs
from ..backends.layouts import dtype_of, name_of, shape_of
from ..specs.correction import Spec

# Bytes to which the kernels' stores are aligned.
ALIGNED = 16


def take_outputs(out: object, batch: OpenBatch, given: Batch, train_logp: object, spec: Spec) -> OpenBatch:
    """Check the outputs that a caller gives, and give the batch that is written there.

    What was read of a batch can be a copy of what was given. Memory that an input or the other output has is refused.
    """
    if not isinstance(out, Outputs):
        raise TypeError(f"out: expected rollout_corr.Outputs or None, got {type(out).__name__}")
    if torch.compiler.is_compiling():
        raise ValueError(
            "out: expected None inside torch.compile, which plans the memory of results itself, got Outputs"
        )
    if not isinstance(train_logp, Tensor) or train_logp.is_nested:
        kind = "a list of samples" if not isinstance(train_logp, Tensor) else "a nested tensor"
        raise ValueError(f"out: expected None with {kind}, whose results are pieces of one tensor, got Outputs")
    mask_kind = torch.bool if batch.mask is None else batch.mask.dtype
    inputs: dict[str, Tensor | None] = {
        "train_logp": batch.train,
        "rollout_logp": batch.rollout,
        "mask": batch.mask,
        "cu_seqlens": given.cu_seqlens,
        "advantages": batch.advantages,
        "kept_mass": batch.log_mass,
        "turns": given.turns if isinstance(given.turns, Tensor) else None,
        "entropy": batch.entropy,
        "versions": None if batch.versions is None else batch.versions.ids,
        "groups.index": None if given.groups is None else given.groups.index,
    }
    inputs |= {f"external[{name!r}]": x for name, x in batch.external_of(spec).items()}
    inputs |= {f"labels[{one.labels.name!r}]": one.ids for one in batch.labels}
    shape, weights, mask = batch.train.shape, out.weights, out.mask
    if weights is not None:
        _check("weights", weights, train_logp, batch.dtype, spec.returns_weights, "no weights", inputs)
    if mask is not None:
        inputs["out.weights"] = weights
        _check("mask", mask, train_logp, mask_kind, spec.edits_mask, "the mask as it is given", inputs)
    return replace(
        batch,
        weights_out=None if weights is None else weights.view(shape),
        mask_out=None if mask is None else mask.view(shape),
    )


def _check(
    name: str, x: Any, like: Tensor, dtype: torch.dtype, wanted: bool, instead: str, inputs: dict[str, Tensor | None]
) -> None:
    """Refuse an output that cannot be written to as it is."""
    name = f"out.{name}"
    if type(x) is not Tensor:
        raise TypeError(f"{name}: expected a plain tensor or None, got {type(x).__name__}")
    if not wanted:
        raise ValueError(f"{name}: expected None, because this Spec hands back {instead}, got a tensor")
    expected = f"{shape_of(like)} {name_of(dtype)} on {like.device}"
    if (x.shape, x.dtype, x.device) != (like.shape, dtype, like.device):
        raise ValueError(f"{name}: expected {expected} (of train_logp), got {shape_of(x)} {dtype_of(x)} on {x.device}")
    if x.layout is not torch.strided or not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
    if x.requires_grad:
        raise ValueError(f"{name}: expected a tensor that requires no grad, got one that does")
    if x.device.type != "cpu" and x.data_ptr() % ALIGNED:
        raise ValueError(
            f"{name}: expected memory aligned to {ALIGNED} bytes, got an address of {x.data_ptr() % ALIGNED} more"
        )
    for other, given in inputs.items():
        if given is not None and _share(x, given):
            raise ValueError(
                f"{name}: expected memory of its own, got memory of {other}, which is read while it is written"
            )


def _share(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors may have a byte in common: between the first and the last of each."""
    (first, end), (other_first, other_end) = _bytes(x), _bytes(y)
    return x.device == y.device and first < other_end and other_first < end


def _bytes(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last."""
    first = x.data_ptr()
    if not x.numel():
        return first, first
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (span + 1) * x.element_size()
