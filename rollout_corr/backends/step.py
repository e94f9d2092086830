"""A whole step, correction and policy loss together: when the kernels can, and what it gives.

One pass over the tokens corrects and computes the loss. Where sequences are decided about first (`InStep.settles`), a
pass that reads the two log-probs of the correction comes before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..metrics import loss as loss_metrics
from ..specs.caches import cached, cached_untraced
from ..specs.correction import Spec
from ..specs.operands import CorrectResult, InStep, LossOperands, LossResult
from ..specs.surrogate import WeightUse
from ..specs.terms import Objective
from . import first_call, loss_operators, operators
from .batch import OpenBatch
from .loss_task import LossTask
from .registration import offsets_near_tokens, seen_by_others


@cached(maxsize=256)
def two_calls(spec: Spec, objective: Objective) -> str | None:
    """Say what keeps a correction out of the pass of the loss; None for nothing."""
    weight, surrogate, kl = spec.weight, objective.surrogate, objective.kl
    if spec.detail != "basic" or spec.report != ("native",):
        return "detail='full' and the metrics of frameworks"
    if spec.measures_turns or any(criterion.thins for criterion in spec.criteria):
        return "turns and drop='token'"
    if weight is not None and (weight.normalize is not None or weight.decay is not None):
        return "weights that are normalized or decay"
    if surrogate.sees_batch or surrogate.mean_unit == "turn":
        return "a surrogate that looks at turns or the batch"
    if kl is not None and kl.mean is not None:
        return "a KL with a mean of its own"
    return None


@cached(maxsize=256)
def settles(spec: Spec, objective: Objective, rejected: str) -> bool:
    """Return whether sequences have to be decided about before the pass of the loss.

    That is so where they have weights, where the surrogate adds up their tokens, and where a rejected sequence keeps a
    part of its gradient: otherwise the pass writes as if all were kept, and the launch behind it zeroes.
    """
    weight, kl, regularizer = spec.weight, objective.kl, objective.regularizer
    if (weight is not None and weight.over != "token") or objective.surrogate.reads_sequences:
        return True
    terms = [term.scope for term in (kl, regularizer) if term is not None]
    # A weight of 0 leaves the KL and the regularizer, and NaN of an infinite advantage that may propagate.
    of_weight = rejected == "zero" and (bool(terms) or spec.nonfinite == "propagate")
    return spec.apply and spec.rejects and ("all" in terms or of_weight)


def fits(task: LossTask, correction: OpenBatch) -> bool:
    """Return whether a call is one that the kernels run in one pass, apart from its Spec and its objective."""
    extras = correction.turns, correction.entropy, correction.bounds, correction.versions, task.decided
    if correction.labels or any(x is not None for x in extras):
        return False
    tensors = task.leaf, task.base, task.ref, task.advantages, correction.train, correction.rollout, correction.mask
    given = *tensors, correction.offsets, correction.log_mass, task.scales, task.divisor, *correction.externals
    double = task.double or correction.dtype == torch.float64
    # Nobody counts the writes to tensors of inference mode.
    counted = not torch.is_inference_mode_enabled() and not any(x is not None and x.is_inference() for x in given)
    return counted and not double and not seen_by_others(given)


def for_kernels(task: LossTask, correction: OpenBatch, spec: Spec, use: WeightUse, rejected: str) -> LossTask:
    """A step as the kernels take it."""
    given = task
    if correction.advantages is None:
        # Criteria take the mean of the finite advantages of tokens, and an advantage of a sequence as it is.
        given = loss_operators.for_kernels(task)
    train, rollout = correction.train, correction.rollout
    trainer = "new" if train is task.new else "base" if train is task.base else "own"
    engine = "base" if rollout is task.base else "own"
    step = use_of(spec, use, rejected, trainer, engine, task.log_mass is not None)._replace(
        settles=settles(spec, task.objective, rejected),
        train=train if trainer == "own" else None,
        rollout=rollout if engine == "own" else None,
        externals=tuple(correction.externals),
    )
    return replace(given, log_mass=correction.log_mass, mass_of_base=correction.mass_of_rollout, step=step)


def use_of(spec: Spec, use: WeightUse, rejected: str, trainer: str, engine: str, loss_takes_mass: bool) -> InStep:
    """Say how a correction enters the loss. `rejected` is what the caller's Spec edits."""
    if use == "report":
        # Weights do not multiply: a rejected token has the factor 0, or does not train.
        gated, trained = spec.edits_mask and rejected != "mask", spec.edits_mask and rejected != "zero"
        return InStep(gated, gated, trained, trainer, engine, loss_takes_mass)
    return InStep(spec.returns_weights, False, spec.edits_mask, trainer, engine, loss_takes_mass)


def run_step(task: LossTask, correction: OpenBatch, spec: Spec, use: WeightUse, rejected: str) -> LossResult:
    """Run both, in one pass over the tokens or in two where sequences are decided about first."""
    given = offsets_near_tokens(for_kernels(task, correction, spec, use, rejected))
    found: LossResult = launcher().run(given, (spec, task.objective))
    return found


class Unsettled:
    """The weights and the mask of a step, which are made when somebody asks, as `correct` gives them.

    Args:
        correction: What the step corrected.
        spec: The Spec that ran.
        trainer: The name of the trainer's log-probs in an error.
    """

    def __init__(self, correction: OpenBatch, spec: Spec, trainer: str) -> None:
        self.correction, self.spec = correction, spec
        named = {trainer: correction.train, "rollout_logp": correction.rollout, "mask": correction.mask}
        named |= {"cu_seqlens": correction.offsets, "advantages": correction.advantages}
        named |= correction.external_of(spec)
        if correction.new is not None:
            named["new_logp"] = correction.new
        named["kept_mass"] = correction.log_mass
        self.read = [(name, x, x._version) for name, x in named.items() if x is not None]

    def make(self) -> tuple[Tensor | None, Tensor | None]:
        """Correct again, from the same inputs."""
        for name, x, version in self.read:
            if x._version != version:
                raise RuntimeError(
                    f"weights and mask: {name} was changed in place since policy_loss, and they are computed from it "
                    "when first read. Read .weights and .mask before the change, or call correct(...) and pass its "
                    "result as correction="
                )
        result = operators.run_fused(self.correction, self.spec)
        return result.weights, result.mask


@cached_untraced(maxsize=1)
def kernels() -> Any:
    """Import the launcher of the kernels, and with it Triton."""
    from ..kernels.policy_loss import step

    return step


@cached_untraced(maxsize=1)
def launcher() -> Any:
    """The launcher of steps, behind the comparison of the first of them."""
    return first_call.launcher_of(
        "policy_loss with a Spec", kernels(), _results_of_kernels, _results_of_torch, launcher.cache_clear
    )


# --- the first call ---


def _results_of_kernels(operands: LossOperands, wanted: tuple[Spec, Objective]) -> first_call.Outputs:
    found: LossResult = kernels().run(replace(operands, differentiable=True), wanted)
    spec, objective = wanted
    sums, maxima = operators.counts(spec)
    of_loss = len(loss_metrics.sum_names(objective)), len(loss_metrics.max_names())
    parts = found.statistics.split([sums, of_loss[0], maxima, of_loss[1]])
    slope = loss_operators.slope_of(found, operands.offsets)
    loss = loss_operators.results_of(operands, objective, found.value, slope, torch.cat(parts[1::2]))
    assert found.keep is not None
    return {**loss, **_of_correction(found.keep, torch.cat(parts[::2]), spec)}


def _results_of_torch(operands: LossOperands, wanted: tuple[Spec, Objective]) -> first_call.Outputs:
    """Correct on plain torch, then compute the loss with what comes of it."""
    spec, objective = wanted
    use = operands.step
    made = operators.reference(kernels().correction_of(operands, spec), spec)
    trains = made.mask if spec.edits_mask else None
    weights = made.weights if trains is None or not use.gated else trains != 0
    loss = replace(
        operands,
        weights=weights if use.weighted else None,
        trains=trains if use.trained else None,
        log_mass=operands.log_mass if use.loss_takes_mass else None,
    )
    found = loss_operators.results_of_torch(loss, objective)
    return {**found, **_of_correction(made.keep, made.statistics, spec)}


def _of_correction(keep: Tensor, statistics: Tensor, spec: Spec) -> first_call.Outputs:
    """The results of the correction, under names of their own."""
    found = operators.results_of(CorrectResult(None, None, keep, statistics), spec)
    return {f"correction {name}": one for name, one in found.items()}
