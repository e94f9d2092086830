"""Arguments of calls by loose names, for tests that draw, share or override them one by one."""

from __future__ import annotations

from typing import Any

import torch

import rollout_corr as rc

OF_RANKS = {"batch_group": "batch", "sequence_group": "sequence"}
OF_GROUPS = {"group_index": "index", "group_size": "size", "group_count": "count"}
OF_VERSIONS = {"versions": "ids", "current_version": "current"}
AS_THEY_ARE = ("mask", "cu_seqlens", "entropy", "external", "sequence_ids", "scale", "total", "validate")
LOOSE = {*OF_RANKS, *OF_GROUPS, *OF_VERSIONS, "turns", "max_turns", "labels", "label_names", "log_mass", "renormalized"}
OF_LOSS = {"surrogate", "mean", "kl", "regularizer", "entropy_bonus"}
SHORT = {"mask", "cu_seqlens"}


def bundled(**given: Any) -> dict[str, Any]:
    """Arguments of `rc.correct` and its like: loose names become a Batch, unless they are `mask` and `cu_seqlens`."""
    of_batch = {name: given.pop(name) for name in tuple(given) if name in LOOSE or name in AS_THEY_ARE}
    return given | (of_batch if of_batch.keys() <= SHORT else {"batch": batch_of(**of_batch)})


def bundled_loss(**given: Any) -> dict[str, Any]:
    """Arguments of `rc.policy_loss`: as `bundled`; fields of a Loss become one, `weights` and `train_mask` Factors."""
    factors = {name: given.pop(name) for name in ("weights", "train_mask") if name in given}
    if any(x is not None for x in factors.values()):
        assert given.get("correction") is None, "weights or a training mask together with a correction"
        given["correction"] = rc.Factors(weights=factors.get("weights"), mask=factors.get("train_mask"))
    of_loss = {name: given.pop(name) for name in tuple(given) if name in OF_LOSS}
    return bundled(**given) | ({"loss": rc.Loss(**of_loss)} if of_loss else {})


def batch_of(**given: Any) -> rc.Batch:
    """A Batch by loose names."""
    made = {name: given.pop(name) for name in AS_THEY_ARE if name in given}
    made["turns"] = given.pop("turns", None)
    most = given.pop("max_turns", None)
    if most is not None:
        made["turns"] = rc.TurnIds(made["turns"], at_most=most)
    mass, side = given.pop("log_mass", None), given.pop("renormalized", "rollout")
    if mass is not None:
        made["kept_mass"] = rc.KeptMass(mass, of=side)
    labels, names = given.pop("labels", None) or {}, given.pop("label_names", None) or {}
    if labels or names:
        made["labels"] = {name: rc.Labels(labels.get(name), names.get(name, ())) for name in {**labels, **names}}
    for name, fields, build in (
        ("ranks", OF_RANKS, rc.Ranks),
        ("groups", OF_GROUPS, rc.Groups),
        ("versions", OF_VERSIONS, rc.Versions),
    ):
        parts = {fields[loose]: given.pop(loose) for loose in fields if loose in given}
        if any(x is not None for x in parts.values()):
            made[name] = build(**parts)
    return rc.Batch(**made, **given)


def example(
    layout: str = "packed",
    device: str = "cpu",
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    **of_batch: Any,
) -> tuple[torch.Tensor, torch.Tensor, rc.Batch]:
    """An example of a loop's tensors for `rc.warmup`: two sequences of 4 tokens; fields of the Batch by loose names."""
    shape = (8,) if layout == "packed" else (2, 4)
    train, rollout = (torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes)
    if layout == "packed":
        of_batch = {"cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32, device=device), **of_batch}
    return train, rollout, batch_of(mask=torch.ones(shape, dtype=torch.bool, device=device), **of_batch)
