"""Reading the arguments of `correct`: each checked and in the shape of the first, in one `OpenBatch`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..definition.tokens import KeptMass
from ..metrics.labels import SEQUENCES
from ..specs.correction import Spec
from ..specs.criterion import ENTROPY
from ..specs.validate import choice
from .batch import (
    LOGP_DTYPES,
    MASK_DTYPES,
    OpenBatch,
    Reader,
    SequenceGroups,
    checked_tensor,
    external_names,
    is_followed,
    read_offsets,
)
from .given import Batch, TurnIds
from .layouts import LogProbs, layout_of
from .sequence_groups import read_groups, wanted_by
from .staleness import read_versions
from .turns import read_turns

# The sides whose log-probs may be over the set that truncated sampling kept.
SIDES = ("rollout", "train")

# The largest log of a mass: bf16 rounds a sum of probabilities to 1 + 2^-7, whose log is 0.0078.
LARGEST_LOG_MASS = 0.01


class Given(NamedTuple):
    """The arguments of `correct`, and those that `policy_loss` shares with it: there train_logp is new_logp.

    `spec` is None where nothing is corrected.
    """

    train_logp: LogProbs
    rollout_logp: LogProbs | None
    batch: Batch
    spec: Spec | None = Spec()
    advantages: LogProbs | None = None
    backend: str = "auto"
    out: Any = None


def reader(leader: str, logp: LogProbs, given: Batch) -> Reader:
    """Recognize the layout of the log-probs called `leader`, and check them and the offsets of the batch."""
    layout = layout_of(leader, logp, given.cu_seqlens)
    first = checked_tensor(leader, layout.open(leader, logp), LOGP_DTYPES)
    shape, offsets = first.shape, layout.offsets
    if offsets is not None:
        if offsets is given.cu_seqlens:
            offsets = given.once(
                "cu_seqlens",
                lambda: read_offsets(given.cu_seqlens, first, given.validate, leader),
                first.device,
                first.numel(),
                given.cu_seqlens,
            )
        else:
            offsets = read_offsets(offsets, first, given.validate, leader)
        first = first.reshape(-1) if first.dim() == 2 else first
    count = first.shape[0] if offsets is None else offsets.shape[0] - 1
    quick = layout.plain and first.dim() == len(shape) and not is_followed()
    return Reader(leader, first, shape, first.device, offsets, count, layout, quick)


def turns_of(read: Reader, batch: OpenBatch, given: Batch) -> torch.Tensor:
    """Read the turns of a Batch, which has some, as offsets among the tokens: once for all its calls."""

    def read_now() -> torch.Tensor:
        return read_turns(read, batch, given.turns, given.validate, given.ranks.sequence is not None)

    if not read.layout.plain:
        # The log-probs themselves say where sequences begin.
        return read_now()
    ids = given.turns.ids if isinstance(given.turns, TurnIds) else given.turns
    return given.once("turns", read_now, read.device, read.shape, ids, given.mask, given.cu_seqlens)


def groups_of(given: Batch, wants: str | None, batch: OpenBatch) -> SequenceGroups | None:
    """Read the groups of a Batch once for all its calls, and refuse none where `wants` names what needs them."""
    groups, device = given.groups, batch.train.device
    read = partial(read_groups, groups, wants, batch.count, device, given.ranks.batch is not None, given.validate)
    return given.once("groups", read, device, (wants, batch.count), None if groups is None else groups.index)


def read_batch(given: Given) -> OpenBatch:
    """Check every argument of `correct` and read it. Copies nothing, except for a list."""
    spec, advantages, of = given.spec or Spec(), given.advantages, given.batch
    read = reader("train_logp", given.train_logp, of)
    rollout = read.tensor("rollout_logp", given.rollout_logp)
    mask = read.optional("mask", of.mask, MASK_DTYPES)
    batch = OpenBatch(
        read.detached(read.first), rollout, mask, read.offsets, read.count, read.layout.give_back, of.mask
    )
    if of.kept_mass is not None:
        batch.mass = read_mass(read, batch, of)
    for criterion in spec.criteria:
        if criterion.when != "any" and advantages is None:
            raise ValueError(f"advantages: expected a tensor for the criterion with when={criterion.when!r}, got None")
    if advantages is not None:
        batch.advantages, batch.per_sequence = read.advantages(advantages, batch.dtype)
        if batch.per_sequence:
            of.ranks.check_per_sequence("advantages", advantages, given.train_logp, batch.offsets is not None)
    if of.turns is not None:
        batch.turns = turns_of(read, batch, of)
    read_beside(read, batch, given, spec)
    return batch


def read_beside(read: Reader, batch: OpenBatch, given: Given, spec: Spec) -> None:
    """Read into a batch every input, apart from log-probs, that a correction uses."""
    of, leader, packed = given.batch, given.train_logp, batch.offsets is not None
    ranks = of.ranks
    if spec.criteria or of.external is not None:
        batch.external = read.external(external_names(spec), of.external)
    if of.versions is not None or spec.reads_versions:
        batch.versions = read_versions(read, of.versions)
        if batch.versions.per_sequence and of.versions is not None:
            ranks.check_per_sequence("versions", of.versions.ids, leader, packed)
    if of.entropy is not None or spec.reads_entropy:
        if of.entropy is None:
            raise ValueError(
                "entropy: expected the entropy of each token for a criterion with stat='entropy', as the head that "
                "gives log-probs returns it, got None"
            )
        batch.entropy = read.tensor("entropy", of.entropy)
        if ENTROPY in external_names(spec):
            batch.external[ENTROPY] = batch.entropy
    if of.labels:
        from .labels import read_labels

        batch.labels = read_labels(read, batch, of.labels, of.versions, ranks.sequence is not None)
        for labels in (one.labels for one in batch.labels):
            # Those made of versions have no ids.
            ids = of.labels[labels.name].ids
            if labels.units == SEQUENCES and ids is not None:
                ranks.check_per_sequence(f"labels[{labels.name!r}]", ids, leader, packed)
    if of.groups is not None or spec.needs_groups:
        batch.groups = groups_of(of, wanted_by(spec), batch)


def check_mask(batch: OpenBatch) -> None:
    """Read the mask, and refuse NaN, which is not 0 and so would be valid."""
    mask = batch.mask
    if mask is None or not mask.is_floating_point() or torch.compiler.is_compiling():
        return
    wrong = mask.isnan().nonzero()
    if wrong.shape[0]:
        raise ValueError(f"mask: expected numbers, got NaN at {wrong.shape[0]} tokens, first at {wrong[0].tolist()}")


def upload(batch: OpenBatch, given: Batch) -> None:
    """Copy offsets that came on the CPU to the device of the tokens, once for all calls of a Batch."""
    device = batch.train.device
    offsets, turns = batch.offsets, batch.turns
    if offsets is not None and offsets.device != device and given.cu_seqlens is not None:
        batch.offsets = given.once("cu_seqlens there", lambda: offsets.to(device), device, None, given.cu_seqlens)
    if turns is not None and turns.device != device and isinstance(given.turns, torch.Tensor):
        batch.turns = given.once("turns there", lambda: turns.to(device), device, None, given.turns)


def read_mass(read: Reader, batch: OpenBatch, given: Batch) -> KeptMass | None:
    """Read the mass that truncated sampling kept; values are checked on the CPU, and elsewhere with `validate`."""
    if given.kept_mass is None:
        return None
    log_mass, of = given.kept_mass
    choice("kept_mass.of", of, SIDES)
    log = read.tensor("kept_mass.log_mass", log_mass)
    if (log.device.type == "cpu" or given.validate) and not torch.compiler.is_compiling():
        tensors = log_mass, given.mask, given.cu_seqlens
        given.once("kept_mass", lambda: _check_mass(batch, log), read.device, read.shape, *tensors)
    return KeptMass(log, of)


def _check_mass(batch: OpenBatch, log: torch.Tensor) -> None:
    above = log > LARGEST_LOG_MASS
    if batch.mask is not None:
        above &= batch.mask != 0
    if batch.offsets is not None:
        first, last = batch.offsets[0], batch.offsets[-1]
        above[:first] = False
        above[last:] = False
    if bool(above.any()):
        raise ValueError(
            "kept_mass.log_mass: expected the log of a probability, at most 0, at every valid token, got "
            f"{log[above].max().item():.6g}; pass the log of the mass"
        )
