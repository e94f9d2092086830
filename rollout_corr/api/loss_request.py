"""A call of `policy_loss`, read and checked from metadata before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..backends import whole
from ..backends.batch import FLOATS_OR_INTEGERS, MASK_DTYPES, OFFSETS, OpenBatch, Reader
from ..backends.choose import BACKENDS, chosen, chosen_backend
from ..backends.given import Factors, state_of_masks
from ..backends.layouts import LogProbs, dtype_of, shape_of
from ..backends.loss_task import beyond_kernels
from ..backends.operators import of_double
from ..backends.ranks import Claims, claims_of
from ..backends.read import Given, groups_of, read_mass, reader, turns_of
from ..backends.sequence_groups import wanted_by
from ..backends.turns import check_turns, measuring_turns
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


class Mode(NamedTuple):
    """The log-probs that the surrogate's ratio compares new_logp with, and the use of weights that follows."""

    name: ModeName  # "decoupled" (new/old), "bypass" (new/rollout), "on-policy" (new/new)
    base: Tensor | None  # that new_logp is compared with; None: its own, detached
    weights: WeightUse  # a key of USES


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


def mode_of(surrogate: Surrogate, old: Tensor | None, rollout: Tensor | None) -> Mode:
    """Find the mode from the log-probs that are there, unless `Surrogate.of` names it.

    In bypass mode the ratio new/rollout is a correction already, so the surrogate says what weights are for. Everywhere
    else they multiply.
    """
    of = surrogate.of
    if of is None:
        of = "new/old" if old is not None or rollout is None else "new/rollout"
        if old is None and rollout is None:
            return Mode("on-policy", None, "multiply")
    name, base = ("old_logp", old) if of == "new/old" else ("rollout_logp", rollout)
    if base is None:
        raise ValueError(f"{name}: expected log-probs for a surrogate with of={of!r}, got None")
    if of == "new/old":
        return Mode("decoupled", base, "multiply")
    return Mode("bypass", base, surrogate.traits.weights_in_bypass)


# --- the tensors ---


class LossTensors(NamedTuple):
    """The tensors of a call, in the shape of the batch; those of `ready` weights apart."""

    read: Reader  # reads further arguments; `read.first` is new_logp, which may require grad
    batch: OpenBatch  # mask, offsets and advantages; `batch.train` is new_logp, detached
    old: Tensor | None
    rollout: Tensor | None
    ref: Tensor | None
    advantages: Tensor  # per token, or [S] where `batch.per_sequence`


def read_tensors(given: Given, old_logp: LogProbs | None, ref_logp: LogProbs | None) -> LossTensors:
    """Check and open the tensors that every call may have."""
    of = given.batch
    read = reader("new_logp", given.train_logp, of)
    old = read.optional("old_logp", old_logp)
    rollout = read.optional("rollout_logp", given.rollout_logp)
    ref = read.optional("ref_logp", ref_logp)
    new, flat_mask = read.first.detach(), read.optional("mask", of.mask, MASK_DTYPES)
    # The batch computes in the wider of its two dtypes: pair new_logp with the widest of the other log-probs.
    other = new
    for x in (old, rollout, ref):
        if x is not None and x.element_size() > other.element_size():
            other = x
    batch = OpenBatch(new, other, flat_mask, read.offsets, read.count, read.layout.give_back, of.mask)
    if given.advantages is None:
        raise ValueError("advantages: expected one per token or per sequence, got None")
    batch.advantages, batch.per_sequence = read.advantages(given.advantages, batch.dtype)
    if batch.per_sequence:
        of.ranks.check_per_sequence("advantages", given.advantages, given.train_logp, batch.offsets is not None)
    if rollout is not None:
        # It corrects ratios to the rollout's log-probs alone.
        batch.mass = read_mass(read, batch, of)
    return LossTensors(read, batch, old, rollout, ref, batch.advantages)


def read_turns_of(tensors: LossTensors, given: Given, surrogate: Surrogate) -> Spec | None:
    """Read the turns of a call into its batch where something is over them, and give the Spec that measures them."""
    spec, turns = given.spec, given.batch.turns
    of_turns = surrogate.mean_unit == "turn"
    if of_turns and turns is None:
        raise ValueError(f"turns: expected offsets, ids or 'runs' for {surrogate!r}, got None")
    if spec is not None:
        check_turns(spec, turns)
    if turns is None or (spec is None and not of_turns):
        return spec
    tensors.batch.turns = turns_of(tensors.read, tensors.batch, given.batch)
    return None if spec is None else measuring_turns(spec)


class ReadyWeights(NamedTuple):
    """Weights and training mask that the caller brings, in the shape of the batch, or None."""

    weights: Tensor | None = None
    train_mask: Tensor | None = None  # non-zero at trained tokens
    joined: LogProbs | None = None  # the same in the caller's layout, where it is the mask given with zeros
    nonfinite: str = "reject"  # `Spec.nonfinite` of the correction that they come from


def read_ready(tensors: LossTensors, spec: Spec | None, correction: object) -> ReadyWeights:
    """Check and open ready weights and masks, which exclude a Spec."""
    if correction is None:
        return ReadyWeights()
    if not isinstance(correction, (Correction, Factors)):
        hint = "; a Spec is spec=..." if isinstance(correction, Spec) else "; weights are rc.Factors(weights=...)"
        raise TypeError(
            f"correction: expected what correct() gives, or rc.Factors, got {type(correction).__name__}{hint}"
        )
    if spec is not None:
        raise ValueError("spec: expected None with a correction, got both; a Spec corrects in the same call")
    weights, mask = correction.weights, correction.mask
    given = tensors.batch.given_mask
    if mask is given:
        mask = None
    name, joined, nonfinite = "Factors", None, "reject"
    if isinstance(correction, Correction):
        name, made_by = "correction", correction.statistics.spec
        nonfinite = nonfinite if made_by is None else made_by.nonfinite
        of, made, state = correction._masks
        if mask is not None and of is given and made is mask:
            # None, as in a compiled function or in inference mode: nobody knows whether one was written to since.
            now = state_of_masks(of, made)
            joined = mask if now is not None and now == state else None
    read = tensors.read
    return ReadyWeights(
        read.optional(f"{name}.weights", weights, FLOATS_OR_INTEGERS),
        read.optional(f"{name}.mask", mask, MASK_DTYPES),
        joined,
        nonfinite,
    )


# --- all of it ---


def objective_of(loss: Loss, replaces_ratio: bool, nonfinite: str) -> Objective:
    """Make an objective, or find the one of an earlier call."""
    make = _objective if torch.compiler.is_compiling() else _known_objective
    return make(loss, replaces_ratio, nonfinite)


def _objective(loss: Loss, replaces_ratio: bool, nonfinite: str) -> Objective:
    return Objective(loss.surrogate, loss.kl, loss.regularizer, loss.mean, replaces_ratio, nonfinite)


# Typed, because 1 and True are equal.
_known_objective = cached(maxsize=256, typed=True)(_objective)


@dataclass(eq=False, repr=False)
class LossRequest:
    """A call of `policy_loss`, checked."""

    given: Given  # that it shares with `correct`
    loss: Loss
    spec: Spec | None  # measures turns where there are some; None: nothing is corrected
    tensors: LossTensors
    total: Tensor | None  # 0-d float64, or None
    ready: ReadyWeights
    scales: Tensor | None  # in the shape of the batch
    entropy: Tensor | None  # in the shape of the batch, with its history; None where nothing reads it
    ids: Tensor | None  # [S] int64, the numbers of the sequences
    mode: Mode
    use: Use
    objective: Objective
    runs_on: str  # "triton" or "torch"
    runner: str  # a key of `policy_loss.LOSSES`

    def claims(self) -> Claims:
        """The call as other ranks compare it; reads a count that the caller brings."""
        tensors, of = self.tensors, self.given.batch
        given = {"new_logp": tensors.read.first, "old_logp": tensors.old, "rollout_logp": tensors.rollout}
        given |= {"ref_logp": tensors.ref, "weights": self.ready.weights, "scale": self.scales, "entropy": self.entropy}
        fixed = {
            **by_path("Objective", self.objective),
            **by_path("Spec", self.spec),
            **by_path("EntropyBonus", self.loss.entropy_bonus),
            **({} if of.groups is None else of.groups.claims()),
            "mode": self.mode.name,
            "backend": self.runs_on,
            "external": str(sorted(of.external or ())),
            "versions.current": str(None if of.versions is None else of.versions.current),
            "wants a gradient": str(torch.is_grad_enabled() and tensors.read.first.requires_grad),
        }
        if tensors.batch.mass is not None:
            given["kept_mass"] = tensors.batch.mass.log_mass
            fixed["kept_mass.of"] = tensors.batch.mass.of
        found = claims_of("policy_loss", tensors.batch, given, fixed)
        if self.total is not None:
            found.sequences["total"] = repr(self.total.item())
        return found


def requested(
    given: Given,
    loss: Loss,
    spec: Spec | None,
    tensors: LossTensors,
    total: Tensor | None,
    ready: ReadyWeights,
    scales: Tensor | None,
    entropy: Tensor | None,
    ids: Tensor | None,
) -> LossRequest:
    """Check that the arguments of a call go together, read its groups, and say how it runs; fields of `LossRequest`."""
    surrogate = loss.surrogate
    split = given.batch.ranks.sequence is not None
    if not isinstance(given.backend, str) or given.backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)} for policy_loss, got {shown(given.backend)}")
    if split and given.backend == "triton":
        raise ValueError("backend: expected 'auto' or 'torch' for a loss with ranks.sequence, got 'triton'")
    if (loss.kl is None) != (tensors.ref is None):
        missing, there = ("ref_logp", "Loss.kl") if tensors.ref is None else ("Loss.kl", "ref_logp")
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
    if surrogate.traits.sees == "groups":
        tensors.batch.groups = groups_of(given.batch, wanted_by(spec, surrogate), tensors.batch)
    mode = mode_of(surrogate, tensors.old, tensors.rollout)
    use = USES[mode.weights]
    has_weights = ready.weights is not None if spec is None else spec.apply and spec.weight is not None
    replaces_ratio = use.replace_ratio and has_weights
    _check_weights(surrogate, ready, use, replaces_ratio)
    objective = objective_of(loss, replaces_ratio, ready.nonfinite if spec is None else spec.nonfinite)
    first = tensors.read.first
    runs_on, on_cpu = chosen_backend(first, given.backend), first.device.type == "cpu"
    if beyond is None and (beyond := of_double(runs_on, tensors.batch.dtype)) and given.backend == "triton":
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {beyond}")
    runner = chosen(runs_on, beyond, on_cpu, torch.compiler.is_compiling(), split).name
    of_call = given, loss, spec, tensors, total, ready, scales, entropy, ids
    return LossRequest(*of_call, mode, use, objective, runs_on, runner)


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


def read_ids(batch: OpenBatch, given: object) -> Tensor | None:
    """Check `sequence_ids`: [S] int64, or None."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise TypeError(f"sequence_ids: expected a tensor, got {type(given).__name__}")
    if given.dtype not in OFFSETS:
        raise ValueError(f"sequence_ids: expected int32 or int64, got {str(given.dtype).removeprefix('torch.')}")
    if tuple(given.shape) not in ((batch.count,), (batch.count, 1)):
        raise ValueError(f"sequence_ids: expected shape [{batch.count}] or [{batch.count}, 1], got {shape_of(given)}")
    if given.device != batch.train.device:
        raise ValueError(f"sequence_ids: expected device {batch.train.device}, got {given.device}")
    return given.detach().reshape(-1).long()


def read_scales(read: Reader, batch: OpenBatch, scale: object) -> Tensor:
    """Read factors per token or per sequence, and give each token its own."""
    found, per_sequence = read.per_token_or_sequence("scale", scale)
    found = found.to(batch.dtype)
    return whole.sequences_of(batch)[0].spread(found).expand(batch.train.shape) if per_sequence else found


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
