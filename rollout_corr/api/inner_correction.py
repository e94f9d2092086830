"""The correction that `policy_loss` makes in the same call, where it is given a Spec."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from rollout_corr.api.loss_request import LossRequest
from rollout_corr.backends import operators
from rollout_corr.backends.batch import external_names
from rollout_corr.backends.completed import check_dtype, check_groups
from rollout_corr.backends.entropy import add_entropy
from rollout_corr.backends.labels import read_labels
from rollout_corr.backends.read import add_ages
from rollout_corr.backends.result import Result
from rollout_corr.backends.run import CorrectionRequest, RunningCorrection
from rollout_corr.backends.sequence_groups import read_groups, wanted_by
from rollout_corr.metrics.statistics import under
from rollout_corr.spec.correction import Spec


class InnerCorrection(NamedTuple):
    """A correction made in the same call.

    Attributes:
        factors: Factors of the surrogate's loss, in the shape of the batch, or None.
        trains: Non-zero at tokens that train, or None for all valid ones.
        result: Weights, mask, keep and statistics that the caller gets.
    """

    factors: Tensor | None
    trains: Tensor | None
    result: Result


def correct_inside(request: LossRequest, spec: Spec) -> InnerCorrection:
    """Correct from old/rollout, or from new/rollout where there is no old_logp."""
    read, batch, old = request.tensors.read, request.tensors.batch, request.tensors.old
    new, rollout = batch.train, request.tensors.rollout
    if rollout is None:
        rollout = read.tensor("rollout_logp", None)  # raises
    for criterion in spec.criteria:
        if criterion.of == "new/old" and old is None:
            raise ValueError(f"old_logp: expected log-probs for criterion {criterion.label!r} of new/old, got None")
    run = _spec_to_run(spec, old is not None, request.use.multiply)
    denominators = {"new/rollout": rollout, "new/old": old}
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        c.of: (new, other) for c in run.criteria if (other := denominators.get(c.of)) is not None
    }
    if request.backend == "triton" and (reason := operators.beyond_kernels(run)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
    batch = batch.of(new if old is None else old, rollout, pairs)
    batch.bounds = request.bounds
    if all(criterion.when == "any" for criterion in run.criteria):
        batch.advantages = None
    batch.external = read.external(external_names(spec), request.external)
    if request.versions is not None or spec.reads_versions:
        add_ages(read, batch, request.versions, spec)
        request.groups.check_versions(batch, read.first, request.versions)
    if request.labels is not None:
        split = request.groups.sequence is not None
        batch.labels = read_labels(read, batch, *request.labels, request.versions, split)
        request.groups.check_labels(batch, read.first, request.labels[0])
    if request.entropy is not None or spec.reads_entropy:
        add_entropy(batch, request.entropy, spec)
    if request.grouping is not None or run.needs_groups:
        over_ranks = request.groups.batch is not None
        of_batch = batch.count, batch.train.device
        batch.groups = read_groups(request.grouping, wanted_by(run), *of_batch, over_ranks, request.validate)
    if request.bounds is not None:
        check_groups(request.bounds, batch.groups)
        check_dtype(request.bounds, batch.dtype)
    found = RunningCorrection(CorrectionRequest(batch, run, request.runs_on, request.groups)).result()
    # Under the caller's Spec, whose criteria have the same labels.
    statistics = under(found.statistics, spec)
    factors, trains = found.weights, found.mask
    if not request.use.multiply:
        factors = None if spec.rejected == "mask" or trains is None else (trains != 0).to(batch.dtype)
        trains = None if spec.rejected == "zero" else trains
    return InnerCorrection(factors, trains, Result(found.weights, trains, found.keep, statistics, found.keep_turns))


def _spec_to_run(spec: Spec, has_old: bool, multiply: bool) -> Spec:
    """Derive the Spec of the correction inside the loss.

    Without old_logp, new/rollout is train/rollout. Where weights do not multiply, zero weights cannot reject, so
    rejections are written into a mask even if the Spec only zeroes weights.
    """
    criteria = [
        replace(criterion, of="train/rollout") if criterion.of == "new/rollout" and not has_old else criterion
        for criterion in spec.criteria
    ]
    rejected = "both" if spec.rejected == "zero" and not multiply else spec.rejected
    return replace(spec, criteria=tuple(criteria), rejected=rejected)
