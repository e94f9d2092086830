"""Reading the arguments of `correct`: each checked and in the shape of the first, in one `Batch`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollout_corr.backends.batch import MASK_DTYPES, Batch, Reader, external_names, reader
from rollout_corr.backends.labels import read_labels
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.backends.staleness import Versions, read_ages
from rollout_corr.backends.turns import read_turns
from rollout_corr.definition.tokens import KeptMass
from rollout_corr.spec.correction import AGE, Spec
from rollout_corr.spec.validate import shown

# The sides whose log-probs may be over the set that truncated sampling kept.
RENORMALIZED = ("rollout", "train")

# The largest log of a mass: bf16 rounds a sum of probabilities to 1 + 2^-7, of which the log is 0.0078.
LARGEST_LOG_MASS = 0.01


def read_batch(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None,
    cu_seqlens: Tensor | None,
    spec: Spec,
    advantages: LogProbs | None,
    external: Mapping[str, LogProbs] | None,
    validate: bool,
    log_mass: LogProbs | None = None,
    renormalized: object = "rollout",
    turns: object = None,
    max_turns: int | None = None,
    split: bool = False,
    versions: Versions | None = None,
    labels: tuple[object, object] = (None, None),
) -> Batch:
    """Check every argument of `correct` and read it. Copies nothing, except for a list."""
    read = reader("train_logp", train_logp, cu_seqlens, validate)
    rollout = read.tensor("rollout_logp", rollout_logp)
    flat_mask = read.optional("mask", mask, MASK_DTYPES)
    batch = Batch(read.detached(read.first), rollout, flat_mask, read.offsets, read.count, read.layout.give_back, mask)
    if log_mass is not None or renormalized != "rollout":
        batch.mass = read_mass(read, batch, log_mass, renormalized, validate)
    if spec.criteria or external is not None:
        batch.external = read.external(external_names(spec), external)
    if versions is not None or spec.reads_versions:
        add_ages(read, batch, versions, spec)
    if labels != (None, None):
        batch.labels = read_labels(batch, *labels)
    for criterion in spec.criteria:
        if criterion.when != "any" and advantages is None:
            raise ValueError(f"advantages: expected a tensor for the criterion with when={criterion.when!r}, got None")
    if advantages is not None:
        batch.advantages, batch.per_sequence = read.advantages(advantages, batch.dtype)
    if turns is not None:
        batch.turns = read_turns(read, batch, turns, max_turns, validate, split)
    return batch


def add_ages(read: Reader, batch: Batch, versions: Versions | None, spec: Spec) -> None:
    """Read the ages of tokens, which metrics report, weights decay by and criteria test; refuse none where needed."""
    batch.ages, batch.ages_per_sequence = read_ages(read, versions or Versions(), spec, batch.dtype)
    if batch.ages is not None and AGE in external_names(spec):
        batch.external[AGE] = batch.ages


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
