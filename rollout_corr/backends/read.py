"""Reading the arguments of `correct`: each checked and in the shape of the first, in one `Batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends.batch import MASK_DTYPES, Batch, Reader, external_names, reader
from rollout_corr.backends.groups import Groups
from rollout_corr.backends.labels import read_labels
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.backends.sequence_groups import GroupsGiven, read_groups, wanted_by
from rollout_corr.backends.staleness import Versions, read_ages
from rollout_corr.backends.turns import read_turns
from rollout_corr.definition.tokens import KeptMass
from rollout_corr.metrics.labels import SEQUENCES
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.criterion import AGE, ENTROPY
from rollout_corr.specs.validate import shown

if TYPE_CHECKING:
    from rollout_corr.backends.bounds_of_batch import Thresholds

# The sides whose log-probs may be over the set that truncated sampling kept.
RENORMALIZED = ("rollout", "train")

# The largest log of a mass: bf16 rounds a sum of probabilities to 1 + 2^-7, of which the log is 0.0078.
LARGEST_LOG_MASS = 0.01


class Given(NamedTuple):
    """The arguments of `correct`, and those that `policy_loss` shares with it: there train_logp is new_logp.

    Attributes:
        train_logp, rollout_logp, mask, cu_seqlens, spec, advantages, external, log_mass, renormalized, turns,
            max_turns, entropy, labels, label_names, backend, validate, out, thresholds: As `correct` takes them.
        versions: Both of its arguments about versions; None: neither was given.
        grouping: Its arguments about groups of sequences; None: none was given.
        ranks: The process groups.
    """

    train_logp: LogProbs
    rollout_logp: LogProbs
    mask: LogProbs | None = None
    cu_seqlens: Tensor | None = None
    spec: Spec | None = Spec()
    advantages: LogProbs | None = None
    external: Mapping[str, LogProbs] | None = None
    log_mass: LogProbs | None = None
    renormalized: object = "rollout"
    turns: object = None
    max_turns: int | None = None
    entropy: LogProbs | None = None
    versions: Versions | None = None
    labels: object = None
    label_names: object = None
    grouping: GroupsGiven | None = None
    backend: str = "auto"
    validate: bool = False
    ranks: Groups = Groups()
    out: Any = None
    thresholds: Thresholds | None = None

    # No property, as everywhere in named tuples that a call reads: the compilers of torch 2.8 and 2.10 follow none.
    def has_labels(self) -> bool:
        """True if there are labels."""
        return self.labels is not None or self.label_names is not None


def read_batch(given: Given) -> Batch:
    """Check every argument of `correct` and read it. Copies nothing, except for a list."""
    spec, advantages, validate = given.spec or Spec(), given.advantages, given.validate
    read = reader("train_logp", given.train_logp, given.cu_seqlens, validate)
    rollout = read.tensor("rollout_logp", given.rollout_logp)
    mask = read.optional("mask", given.mask, MASK_DTYPES)
    batch = Batch(read.detached(read.first), rollout, mask, read.offsets, read.count, read.layout.give_back, given.mask)
    if given.log_mass is not None or given.renormalized != "rollout":
        batch.mass = read_mass(read, batch, given.log_mass, given.renormalized, validate)
    for criterion in spec.criteria:
        if criterion.when != "any" and advantages is None:
            raise ValueError(f"advantages: expected a tensor for the criterion with when={criterion.when!r}, got None")
    if advantages is not None:
        batch.advantages, batch.per_sequence = read.advantages(advantages, batch.dtype)
        if batch.per_sequence:
            given.ranks.check_per_sequence("advantages", advantages, given.train_logp, batch.offsets is not None)
    if given.turns is not None:
        split = given.ranks.sequence is not None
        batch.turns = read_turns(read, batch, given.turns, given.max_turns, validate, split)
    read_beside(read, batch, given, spec)
    return batch


def read_beside(read: Reader, batch: Batch, given: Given, spec: Spec) -> None:
    """Read what a correction tests, measures or divides by beside log-probs into a batch, and bounds that are known."""
    ranks, leader, packed = given.ranks, given.train_logp, batch.offsets is not None
    if spec.criteria or given.external is not None:
        batch.external = read.external(external_names(spec), given.external)
    if given.versions is not None or spec.reads_versions:
        versions = given.versions or Versions()
        batch.ages, per_sequence = read_ages(read, versions, spec, batch.dtype)
        if batch.ages is not None and AGE in external_names(spec):
            batch.external[AGE] = batch.ages
        if per_sequence:
            ranks.check_per_sequence("versions", versions.given, leader, packed)
    if given.entropy is not None or spec.reads_entropy:
        if given.entropy is None:
            raise ValueError(
                "entropy: expected the entropy of each token for a criterion with stat='entropy', as the head that "
                "gives log-probs returns it, got None"
            )
        batch.entropy = read.tensor("entropy", given.entropy)
        if ENTROPY in external_names(spec):
            batch.external[ENTROPY] = batch.entropy
    if given.has_labels():
        split = ranks.sequence is not None
        batch.labels = read_labels(read, batch, given.labels, given.label_names, given.versions, split)
        ids = given.labels if isinstance(given.labels, Mapping) else {}
        for labels in (one.labels for one in batch.labels):
            # Those made of versions are not among the ids.
            if labels.units == SEQUENCES and labels.name in ids:
                ranks.check_per_sequence(f"labels[{labels.name!r}]", ids[labels.name], leader, packed)
    if given.grouping is not None or spec.needs_groups:
        of_batch, over_ranks = (batch.count, batch.train.device), ranks.batch is not None
        batch.groups = read_groups(given.grouping, wanted_by(spec), *of_batch, over_ranks, given.validate)
    if given.thresholds is not None:
        from rollout_corr.backends.bounds_of_batch import completed

        thresholds = completed(given.thresholds, given.spec)
        thresholds.check_groups(batch.groups)
        thresholds.check_dtype(batch.dtype)
        batch.bounds = thresholds


def read_mass(read: Reader, batch: Batch, log_mass: object, renormalized: object, validate: bool) -> KeptMass | None:
    """Read the mass that truncated sampling kept; values are looked at on the CPU, and elsewhere with `validate`."""
    if not isinstance(renormalized, str) or renormalized not in RENORMALIZED:
        raise ValueError(f"renormalized: expected one of {list(RENORMALIZED)}, got {shown(renormalized)}")
    if log_mass is None:
        if renormalized != "rollout":
            raise ValueError(f"log_mass: expected log-masses beside renormalized={renormalized!r}, got None")
        return None
    log = read.tensor("log_mass", log_mass)
    if (log.device.type == "cpu" or validate) and not torch.compiler.is_compiling():
        above = log > LARGEST_LOG_MASS
        if batch.mask is not None:
            above &= batch.mask != 0
        if batch.offsets is not None:
            first, last = batch.offsets[0], batch.offsets[-1]
            above[:first] = False
            above[last:] = False
        if bool(above.any()):
            raise ValueError(
                "log_mass: expected the log of a probability, at most 0, at every valid token, got "
                f"{log[above].max().item():.6g}; of a mass pass its log"
            )
    return KeptMass(log, from_rollout=renormalized == "train")
