"""A call of `policy_loss`, read and checked from metadata before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..backends import operators, whole
from ..backends.batch import FLOATS_OR_INTEGERS, MASK_DTYPES, OFFSETS, OpenBatch, Reader
from ..backends.choose import BACKENDS, chosen, chosen_backend
from ..backends.given import Factors, state_of_masks
from ..backends.layouts import LogProbs, dtype_of, shape_of
from ..backends.loss_task import LossTask, beyond_kernels
from ..backends.operators import of_double
from ..backends.ranks import Claims, claims_of
from ..backends.read import (
    Given,
    check_turns,
    groups_of,
    measuring_turns,
    offsets_there,
    opened,
    read_advantages,
    read_mass,
    reader,
    turns_of,
    turns_there,
    wanted_by,
)
from ..specs.caches import cached
from ..specs.checked import by_path
from ..specs.correction import Spec
from ..specs.loss import Loss
from ..specs.surrogate import Surrogate, WeightUse
from ..specs.terms import Mean, Objective
from ..specs.validate import number, shown
from .correct import Correction

# --- the mode ---

ModeName = Literal["decoupled", "bypass", "on-policy"]


class Use(NamedTuple):
    """The way in which the weights and the rejections of a correction enter the loss.

    Attributes:
        multiply: Weights multiply the surrogate's loss, 0 where the Spec zeroes rejected tokens. Where they do not,
            ready weights are refused, a Spec's are only handed back, and zeroed tokens have the factor 0, others 1.
        replace_ratio: The surrogate's own ratio is 1, because the weights take its place.
    """

    multiply: bool
    replace_ratio: bool


USES: dict[WeightUse, Use] = {
    "multiply": Use(multiply=True, replace_ratio=False),
    "replace_ratio": Use(multiply=True, replace_ratio=True),
    "report": Use(multiply=False, replace_ratio=False),
}


def mode_of(
    surrogate: Surrogate, old: Tensor | None, rollout: Tensor | None
) -> tuple[ModeName, Tensor | None, WeightUse]:
    """Find the mode from the log-probs that are there, unless `Surrogate.of` names it.

    Returns its name, the log-probs that the surrogate's ratio compares new_logp with, None for its own, and the key of
    `USES`: in bypass mode the ratio new/rollout is a correction already, so the surrogate says what weights are for.
    Everywhere else they multiply.
    """
    of = surrogate.of
    if of is None:
        of = "new/old" if old is not None or rollout is None else "new/rollout"
        if old is None and rollout is None:
            return "on-policy", None, "multiply"
    name, base = ("old_logp", old) if of == "new/old" else ("rollout_logp", rollout)
    if base is None:
        raise ValueError(f"{name}: expected log-probs for a surrogate with of={of!r}, got None")
    if of == "new/old":
        return "decoupled", base, "multiply"
    return "bypass", base, surrogate.traits.weights_in_bypass


# --- ready weights ---


class ReadyWeights(NamedTuple):
    """Weights and training mask that the caller brings, in the shape of the batch, or None."""

    weights: Tensor | None = None
    train_mask: Tensor | None = None  # non-zero at trained tokens
    joined: LogProbs | None = None  # the same in the caller's layout, where it is the mask given with zeros
    nonfinite: str = "reject"  # `Spec.nonfinite` of the correction that they come from


def read_ready(read: Reader, given: Given) -> ReadyWeights:
    """Check and open ready weights and masks, which exclude a Spec."""
    correction = given.correction
    if correction is None:
        return ReadyWeights()
    if not isinstance(correction, (Correction, Factors)):
        hint = "; a Spec is spec=..." if isinstance(correction, Spec) else "; weights are rc.Factors(weights=...)"
        raise TypeError(
            f"correction: expected what correct() gives, or rc.Factors, got {type(correction).__name__}{hint}"
        )
    if given.spec is not None:
        raise ValueError("spec: expected None with a correction, got both; a Spec corrects in the same call")
    weights, mask = correction.weights, correction.mask
    of_batch = given.batch.mask
    if mask is of_batch:
        mask = None
    name, joined, nonfinite = "Factors", None, "reject"
    if isinstance(correction, Correction):
        name, made_by = "correction", correction.statistics.spec
        nonfinite = nonfinite if made_by is None else made_by.nonfinite
        of, made, state = correction._masks
        if mask is not None and of is of_batch and made is mask:
            # None, as in a compiled function or in inference mode: nobody knows whether one was written to since.
            now = state_of_masks(of, made)
            joined = mask if now is not None and now == state else None
    return ReadyWeights(
        read.optional(f"{name}.weights", weights, FLOATS_OR_INTEGERS),
        read.optional(f"{name}.mask", mask, MASK_DTYPES),
        joined,
        nonfinite,
    )


# --- all of it ---


# Typed, because 1 and True are equal.
@cached(maxsize=256, typed=True)
def _objective(loss: Loss, replaces_ratio: bool, nonfinite: str) -> Objective:
    return Objective(loss.surrogate, loss.kl, loss.regularizer, loss.mean, replaces_ratio, nonfinite)


class LossRequest(NamedTuple):
    """A call of `policy_loss`, read and checked."""

    given: Given
    task: LossTask  # whole, but for what a correction in the same call, the batch or its ranks decide
    spec: Spec | None  # measures turns where there are some; None: nothing is corrected
    corrects: OpenBatch | None  # the batch of a correction in the same call
    runs: Spec | None  # its Spec, as it runs
    logps: dict[str, Tensor | None]  # those of the call by argument, and its kept mass
    entropy: Tensor | None  # in the shape of the batch, with its history; None where nothing reads it
    ids: Tensor | None  # [S] int64, the numbers of the sequences
    mode: ModeName  # "decoupled" (new/old), "bypass" (new/rollout), "on-policy" (new/new)
    use: WeightUse  # a key of USES
    joined: LogProbs | None  # `ReadyWeights.joined`
    runs_on: str  # "triton" or "torch"
    runner: str  # a key of `policy_loss.LOSSES`

    def claims(self) -> Claims:
        """The call as other ranks compare it; reads a count that the caller brings."""
        task, of, loss = self.task, self.given.batch, self.given.loss
        tensors = {**self.logps, "weights": task.weights, "scale": task.scales, "entropy": self.entropy}
        fixed = {
            **by_path("Objective", task.objective),
            **by_path("Spec", self.spec),
            **by_path("EntropyBonus", loss.entropy_bonus),
            **({} if of.groups is None else of.groups.claims()),
            "mode": self.mode,
            "backend": self.runs_on,
            "external": str(sorted(of.external or ())),
            "versions.current": str(None if of.versions is None else of.versions.current),
            "wants a gradient": str(task.differentiable),
        }
        if "kept_mass" in self.logps and of.kept_mass is not None:
            fixed["kept_mass.of"] = of.kept_mass.of
        found = claims_of("policy_loss", task, tensors, fixed)
        if self.corrects is not None and self.corrects.turns is not None:
            found.sequences["turns"] = str(self.corrects.turns.shape[0] - 1)
        if of.total is not None and task.divisor is not None:
            found.sequences["total"] = repr(task.divisor.item())
        return found


def read_request(given: Given) -> LossRequest:
    """Read every argument of `policy_loss`, check that they go together, and say how the call runs."""
    of, loss, spec = given.batch, given.loss, given.spec
    surrogate, split = loss.surrogate, of.ranks.sequence is not None
    read = reader("new_logp", given.train_logp, of)
    old = read.optional("old_logp", given.old_logp)
    rollout = read.optional("rollout_logp", given.rollout_logp)
    ref = read.optional("ref_logp", given.ref_logp)
    new = read.first.detach()
    read.read_mask(of.mask)
    double = any(x is not None and x.dtype == torch.float64 for x in (new, old, rollout, ref))
    if given.advantages is None:
        raise ValueError("advantages: expected one per token or per sequence, got None")
    dtype = torch.float64 if double else torch.float32
    advantages, per_sequence = read_advantages(read, given, dtype)
    assert advantages is not None
    # It corrects ratios to the rollout's log-probs alone.
    mass = None if rollout is None else read_mass(read, of)
    ready, of_turns = read_ready(read, given), surrogate.mean_unit == "turn"
    if of_turns and of.turns is None:
        raise ValueError(f"turns: expected offsets, ids or 'runs' for {surrogate!r}, got None")
    if spec is not None:
        check_turns(spec, of.turns)
    turns = None
    if of.turns is not None and (spec is not None or of_turns):
        turns, spec = turns_of(read, of), None if spec is None else measuring_turns(spec)
    total = None if of.total is None else read_total(loss.mean, of.total, read.device)
    scales = None if of.scale is None else read_scales(read, of.scale, dtype)
    entropy = None if of.entropy is None else read.with_history("entropy", of.entropy)
    ids = read_ids(read, of.sequence_ids) if surrogate.sees_batch else None
    beyond = _beyond_kernels(given, ref, entropy, scales)
    groups = groups_of(read, of, wanted_by(spec, surrogate)) if surrogate.traits.sees == "groups" else None
    mode, base, use = mode_of(surrogate, old, rollout)
    has_weights = ready.weights is not None if spec is None else spec.apply and spec.weight is not None
    replaces_ratio = USES[use].replace_ratio and has_weights
    _check_weights(surrogate, ready, USES[use], replaces_ratio)
    runs_on, on_cpu = chosen_backend(read.first, given.backend), read.first.device.type == "cpu"
    if beyond is None and (beyond := of_double(runs_on, dtype)) and given.backend == "triton":
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {beyond}")
    log_mass, of_base = (None, False) if mass is None or mode != "bypass" else (mass.log_mass, mass.of == "train")
    task = LossTask(
        new, base, ref, advantages, per_sequence, ready.weights, ready.train_mask, read.mask, offsets_there(read, of),
        total, scales, log_mass, of_base, double, turns_there(read, turns, of) if of_turns else None,
        differentiable=torch.is_grad_enabled() and read.first.requires_grad,
        leaf=read.first,
        objective=_objective(
            loss, replaces_ratio, ready.nonfinite if spec is None else spec.nonfinite
        ),
        restore=read.layout.give_back, given_mask=of.mask, group=of.ranks.sequence, groups=groups,
    )  # fmt: skip
    corrects = run = None
    if spec is not None:
        if rollout is None:
            rollout = read.tensor("rollout_logp", None)  # raises
        run = _spec_inside(spec, old, given.backend, USES[use].multiply)
        numerator = new if any(criterion.of != "train/rollout" for criterion in run.criteria) else None
        train = new if old is None else old
        corrects = opened(read, given, run, train, rollout, advantages, per_sequence, turns, mass, numerator)
    logps = {"new_logp": read.first, "old_logp": old, "rollout_logp": rollout, "ref_logp": ref}
    logps |= {} if mass is None else {"kept_mass": mass.log_mass}
    runner = chosen(runs_on, beyond, on_cpu, torch.compiler.is_compiling(), split).name
    return LossRequest(given, task, spec, corrects, run, logps, entropy, ids, mode, use, ready.joined, runs_on, runner)


def _beyond_kernels(given: Given, ref: Tensor | None, entropy: Tensor | None, scales: Tensor | None) -> str | None:
    """Check that the arguments go together; say why the kernels leave the call to plain torch, None if they do not."""
    loss, surrogate, split = given.loss, given.loss.surrogate, given.batch.ranks.sequence is not None
    if not isinstance(given.backend, str) or given.backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)} for policy_loss, got {shown(given.backend)}")
    if split and given.backend == "triton":
        raise ValueError("backend: expected 'auto' or 'torch' for a loss with ranks.sequence, got 'triton'")
    if (loss.kl is None) != (ref is None):
        missing, there = ("ref_logp", "Loss.kl") if ref is None else ("Loss.kl", "ref_logp")
        raise ValueError(f"{missing}: expected a value, because {there} is given, got None")
    if loss.entropy_bonus is not None and entropy is None:
        raise ValueError("entropy: expected a value, because Loss.entropy_bonus is given, got None")
    if surrogate.sees_batch and split:
        raise ValueError(
            f"Loss.surrogate: expected one that does not look at the whole batch with ranks.sequence, got {surrogate!r}"
        )
    beyond = "a loss with ranks.sequence" if split else beyond_kernels(surrogate, scales is not None)
    if given.backend == "triton" and beyond is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {beyond}")
    return beyond


def _spec_inside(spec: Spec, old: Tensor | None, backend: str, multiply: bool) -> Spec:
    """The Spec of the correction: of old/rollout, or of new/rollout where there is no old_logp."""
    for criterion in spec.criteria:
        if criterion.of == "new/old" and old is None:
            raise ValueError(f"old_logp: expected log-probs for criterion {criterion.label!r} of new/old, got None")
    run = _spec_to_run(spec, old is not None, multiply)
    if backend == "triton" and (reason := operators.beyond_kernels(run)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
    return run


@cached(maxsize=256)
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


def _check_weights(surrogate: Surrogate, ready: ReadyWeights, use: Use, replaces_ratio: bool) -> None:
    """Refuse weights that would correct twice, and two bounds of one ratio."""
    name = type(surrogate).__name__
    if ready.weights is not None and not use.multiply:
        raise ValueError(
            f"correction: expected no weights in bypass mode, where {name}'s own ratio new/rollout "
            "is the correction and a weight would correct twice; pass rc.Factors(mask=...), or old_logp too, or "
            "a Spec, which rejects and reports the weight"
        )
    if replaces_ratio and surrogate.has_own_bounds:
        raise ValueError(
            f"Loss.surrogate: expected {name}() without bounds of its own where weights take "
            f"the place of its ratio, got {surrogate!r}"
        )


def read_ids(read: Reader, given: object) -> Tensor | None:
    """Check `sequence_ids`: [S] int64, or None."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise TypeError(f"sequence_ids: expected a tensor, got {type(given).__name__}")
    if given.dtype not in OFFSETS:
        raise ValueError(f"sequence_ids: expected int32 or int64, got {str(given.dtype).removeprefix('torch.')}")
    if tuple(given.shape) not in ((read.count,), (read.count, 1)):
        raise ValueError(f"sequence_ids: expected shape [{read.count}] or [{read.count}, 1], got {shape_of(given)}")
    if given.device != read.device:
        raise ValueError(f"sequence_ids: expected device {read.device}, got {given.device}")
    return given.detach().reshape(-1).long()


def read_scales(read: Reader, scale: object, dtype: torch.dtype) -> Tensor:
    """Read factors per token or per sequence, and give each token its own."""
    found, per_sequence = read.per_token_or_sequence("scale", scale)
    found = found.to(dtype)
    return whole.sequences_of(read)[0].spread(found).expand(read.first.shape) if per_sequence else found


def read_total(mean: Mean, total: object, device: torch.device) -> Tensor:
    """0-d float64: the count that the caller brings, which the loss is divided by."""
    if mean.of == "sum":
        raise ValueError(
            "total: expected None with Mean('sum'), which does not divide, got a value; Mean('token') divides the "
            "sum by it"
        )
    if mean.over != "original":
        raise ValueError(f"total: expected None with Mean(over={mean.over!r}), got both")
    if isinstance(total, Tensor):
        if total.numel() != 1 or total.dtype == torch.bool or total.is_complex():
            got = f"{dtype_of(total)} of shape {shape_of(total)}"
            raise ValueError(f"total: expected a number or a tensor that holds one, got {got}")
        return total.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
    value = number("total", total)
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"total: expected a finite number >= 0, got {value!r}")
    return torch.full((), value, dtype=torch.float64, device=device)
