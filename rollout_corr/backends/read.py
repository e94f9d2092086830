"""Reading the arguments of `correct`: each checked and in the shape of the first, in one `OpenBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..definition.tokens import KeptMass
from ..metrics.labels import SEQUENCES, Labeled
from ..specs.caches import cached
from ..specs.correction import Spec
from ..specs.criterion import AGE, ENTROPY
from ..specs.operands import compute_dtype
from ..specs.validate import choice
from .batch import (
    LOGP_DTYPES,
    Laid,
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

if TYPE_CHECKING:
    from ..specs.surrogate import Surrogate

# The sides whose log-probs may be over the set that truncated sampling kept.
SIDES = ("rollout", "train")

# The largest log of a mass: bf16 rounds a sum of probabilities to 1 + 2^-7, whose log is 0.0078.
LARGEST_LOG_MASS = 0.01


class Given(NamedTuple):
    """The arguments of `correct`, or of `policy_loss`: there train_logp is new_logp.

    `spec` is None where nothing is corrected.
    """

    train_logp: LogProbs
    rollout_logp: LogProbs | None
    batch: Batch
    spec: Spec | None = Spec()
    advantages: LogProbs | None = None
    backend: str = "auto"
    out: Any = None
    loss: Any = None
    old_logp: LogProbs | None = None
    ref_logp: LogProbs | None = None
    correction: Any = None


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


def turns_of(read: Reader, given: Batch) -> torch.Tensor:
    """Read the turns of a Batch, which has some, as offsets among the tokens: once for all its calls."""
    from .turns import read_turns

    turns = given.turns
    ids, at_most = (turns.ids, turns.at_most) if isinstance(turns, TurnIds) else (turns, None)

    def read_now() -> torch.Tensor:
        return read_turns(read, ids, at_most, given.validate, given.ranks.sequence is not None)

    if not read.layout.plain:
        # The log-probs themselves say where sequences begin.
        return read_now()
    return given.once("turns", read_now, read.device, read.shape, ids, given.mask, given.cu_seqlens)


def groups_of(read: Reader, given: Batch, wants: str | None) -> SequenceGroups | None:
    """Read the groups of a Batch once for all its calls, and refuse none where `wants` names what needs them."""
    from .sequence_groups import read_groups

    groups, over_ranks = given.groups, given.ranks.batch is not None

    def read_now() -> SequenceGroups | None:
        return read_groups(groups, wants, read.count, read.device, over_ranks, given.validate)

    return given.once("groups", read_now, read.device, (wants, read.count), None if groups is None else groups.index)


def wanted_by(spec: Spec | None, surrogate: Surrogate | None = None) -> str | None:
    """Say in words what of a call needs groups; None: nothing does."""
    if surrogate is not None and surrogate.traits.sees == "groups":
        return f"the surrogate {surrogate!r}"
    if spec is None or not spec.needs_groups:
        return None
    return "a weight with normalize='group'" if spec.normalizes_groups else "a bound with within='group'"


@cached(maxsize=256)
def measuring_turns(spec: Spec) -> Spec:
    """The Spec of a call that brings turns."""
    return spec if spec.measures_turns else replace(spec, turns=True)


def check_turns(spec: Spec, turns: object) -> None:
    """Refuse a Spec without the turns that it needs."""
    if turns is None and spec.measures_turns:
        raise ValueError(
            "turns: expected offsets [turns + 1], an id for each token or 'runs' for a Spec that weighs, tests or "
            "measures turns, got None"
        )


def read_batch(given: Given) -> OpenBatch:
    """Check every argument of `correct` and read it. Copies nothing, except for a list."""
    spec, of = given.spec or Spec(), given.batch
    read = reader("train_logp", given.train_logp, of)
    rollout = read.tensor("rollout_logp", given.rollout_logp)
    read.read_mask(of.mask)
    train, mass = read.detached(read.first), read_mass(read, of)
    for criterion in spec.criteria:
        if criterion.when != "any" and given.advantages is None:
            raise ValueError(f"advantages: expected a tensor for the criterion with when={criterion.when!r}, got None")
    advantages, per_sequence = read_advantages(read, given, compute_dtype(train.dtype, rollout.dtype))
    turns = None if of.turns is None else turns_of(read, of)
    return opened(read, given, spec, train, rollout, advantages, per_sequence, turns, mass)


def read_advantages(read: Reader, given: Given, dtype: torch.dtype) -> tuple[torch.Tensor | None, bool]:
    """Read advantages, and whether they are per sequence, [S], rather than per token."""
    if given.advantages is None:
        return None, False
    found, per_sequence = read.per_token_or_sequence("advantages", given.advantages)
    if per_sequence:
        packed = read.offsets is not None
        given.batch.ranks.check_per_sequence("advantages", given.advantages, given.train_logp, packed)
    return found.to(dtype) if per_sequence else found, per_sequence


def opened(
    read: Reader,
    given: Given,
    spec: Spec,
    train: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor | None,
    per_sequence: bool,
    turns: torch.Tensor | None,
    mass: KeptMass | None,
    new: torch.Tensor | None = None,
) -> OpenBatch:
    """Read every further input that a correction uses, and make its record."""
    of, packed = given.batch, read.offsets is not None
    ranks, names = of.ranks, external_names(spec)
    if of.external is not None and not isinstance(of.external, Mapping):
        raise TypeError(f"external: expected a mapping of names to tensors, got {type(of.external).__name__}")
    versions = entropy = groups = None
    labels: tuple[Labeled, ...] = ()
    if of.versions is not None or spec.reads_versions:
        from .staleness import read_versions

        versions = read_versions(read, of.versions)
        if versions.per_sequence and of.versions is not None:
            ranks.check_per_sequence("versions", of.versions.ids, given.train_logp, packed)
    if of.entropy is not None or spec.reads_entropy:
        if of.entropy is None:
            raise ValueError(
                "entropy: expected the entropy of each token for a criterion with stat='entropy', as the head that "
                "gives log-probs returns it, got None"
            )
        entropy = read.tensor("entropy", of.entropy)
    externals = [
        entropy if name == ENTROPY and entropy is not None else read.external(name, of.external)
        for name in names
        if name != AGE
    ]
    if of.labels:
        from .labels import read_labels

        split = ranks.sequence is not None
        labels = read_labels(read, of.labels, of.versions, turns, advantages, per_sequence, split)
        for one in (each.labels for each in labels):
            # Those made of versions have no ids.
            ids = of.labels[one.name].ids
            if one.units == SEQUENCES and ids is not None:
                ranks.check_per_sequence(f"labels[{one.name!r}]", ids, given.train_logp, packed)
    if of.groups is not None or spec.needs_groups:
        groups = groups_of(read, of, wanted_by(spec))
    if given.loss is not None and all(criterion.when == "any" for criterion in spec.criteria):
        advantages, per_sequence = None, False  # it has its own
    log_mass, of_rollout = (None, False) if mass is None else (mass.log_mass, mass.of == "train")
    return OpenBatch(
        train, rollout, read.mask, offsets_there(read, of), advantages, per_sequence, externals, new, log_mass,
        of_rollout, turns_there(read, turns, of), versions, restore=read.layout.give_back, given_mask=of.mask,
        entropy=entropy, labels=labels, groups=groups,
    )  # fmt: skip


def check_mask(batch: Laid) -> None:
    """Read the mask, and refuse NaN, which is not 0 and so would be valid."""
    mask = batch.mask
    if mask is None or not mask.is_floating_point() or torch.compiler.is_compiling():
        return
    wrong = mask.isnan().nonzero()
    if wrong.shape[0]:
        raise ValueError(f"mask: expected numbers, got NaN at {wrong.shape[0]} tokens, first at {wrong[0].tolist()}")


def offsets_there(read: Reader, given: Batch) -> torch.Tensor | None:
    """The offsets of a batch on the device of the tokens, copied once for all calls of a Batch."""
    offsets, device = read.offsets, read.device
    if offsets is None or offsets.device == device or given.cu_seqlens is None:
        return offsets
    return given.once("cu_seqlens there", lambda: offsets.to(device), device, None, given.cu_seqlens)


def turns_there(read: Reader, turns: torch.Tensor | None, given: Batch) -> torch.Tensor | None:
    """The offsets of turns, likewise."""
    if turns is None or turns.device == read.device or not isinstance(given.turns, torch.Tensor):
        return turns
    return given.once("turns there", lambda: turns.to(read.device), read.device, None, given.turns)


def read_mass(read: Reader, given: Batch) -> KeptMass | None:
    """Read the mass that truncated sampling kept; values are checked on the CPU, and elsewhere with `validate`."""
    if given.kept_mass is None:
        return None
    log_mass, of = given.kept_mass
    choice("kept_mass.of", of, SIDES)
    log = read.tensor("kept_mass.log_mass", log_mass)
    if (log.device.type == "cpu" or given.validate) and not torch.compiler.is_compiling():
        tensors = log_mass, given.mask, given.cu_seqlens
        given.once("kept_mass", lambda: _check_mass(read, log), read.device, read.shape, *tensors)
    return KeptMass(log, of)


def _check_mass(batch: Laid, log: torch.Tensor) -> None:
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
