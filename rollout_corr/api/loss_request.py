"""A call of `policy_loss`, read and checked from metadata before anything runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollout_corr.api.correct import Correction
from rollout_corr.backends import loss_operators, whole
from rollout_corr.backends.batch import FLOATS_OR_INTEGERS, MASK_DTYPES, OFFSETS, Batch, Reader, reader
from rollout_corr.backends.choose import BACKENDS, chosen, chosen_backend
from rollout_corr.backends.groups import Claims, claims_of
from rollout_corr.backends.layouts import LogProbs, dtype_of, shape_of
from rollout_corr.backends.read import Given, read_mass
from rollout_corr.backends.sequence_groups import read_groups, wanted_by
from rollout_corr.backends.turns import check_turns, measuring_turns, read_turns
from rollout_corr.specs.caches import cached
from rollout_corr.specs.checked import by_path
from rollout_corr.specs.correction import Spec, no_spec
from rollout_corr.specs.loss import (
    DENOMINATORS,
    KL,
    Counted,
    EntropyBonus,
    LossReduction,
    Objective,
    SquaredLogRatio,
    reduction_of,
)
from rollout_corr.specs.surrogate import Surrogate, WeightUse, checked_surrogate
from rollout_corr.specs.validate import number, shown

if TYPE_CHECKING:
    pass


# --- the mode ---

ModeName = Literal["decoupled", "bypass", "on-policy"]


class Mode(NamedTuple):
    """The log-probs that the surrogate's ratio compares new_logp with, and the use of weights that follows.

    Attributes:
        name: "decoupled" (new/old), "bypass" (new/rollout), "on-policy" (new/new).
        base: The log-probs that new_logp is compared with; None: its own, detached.
        weights: A key of USES.
    """

    name: ModeName
    base: Tensor | None
    weights: WeightUse


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
    """The tensors of a call, in the shape of the batch; those of `ready` weights apart.

    Attributes:
        read: Reads further arguments. `read.first` is new_logp, which may require grad.
        batch: Mask, offsets and advantages; `batch.train` is new_logp, detached.
        old, rollout, ref: Log-probs, or None.
        advantages: Per token, or [S] where `batch.per_sequence`.
    """

    read: Reader
    batch: Batch
    old: Tensor | None
    rollout: Tensor | None
    ref: Tensor | None
    advantages: Tensor


def read_tensors(given: Given, old_logp: LogProbs | None, ref_logp: LogProbs | None) -> LossTensors:
    """Check and open the tensors that every call may have."""
    read = reader("new_logp", given.train_logp, given.cu_seqlens, given.validate)
    old = read.optional("old_logp", old_logp)
    rollout = read.optional("rollout_logp", given.rollout_logp)
    ref = read.optional("ref_logp", ref_logp)
    new, flat_mask = read.first.detach(), read.optional("mask", given.mask, MASK_DTYPES)
    # The batch computes in the widest of its two dtypes, so the widest of the other log-probs stands beside new_logp.
    beside = new
    for x in (old, rollout, ref):
        if x is not None and x.element_size() > beside.element_size():
            beside = x
    batch = Batch(new, beside, flat_mask, read.offsets, read.count, read.layout.give_back, given.mask)
    if given.advantages is None:
        raise ValueError("advantages: expected one per token or per sequence, got None")
    batch.advantages, batch.per_sequence = read.advantages(given.advantages, batch.dtype)
    if batch.per_sequence:
        given.ranks.check_per_sequence("advantages", given.advantages, given.train_logp, batch.offsets is not None)
    batch.mass = read_mass(read, batch, given.log_mass, given.renormalized, given.validate)
    if batch.mass is not None and rollout is None:
        raise ValueError("rollout_logp: expected log-probs, because log_mass corrects only ratios to them, got None")
    return LossTensors(read, batch, old, rollout, ref, batch.advantages)


def read_turns_of(tensors: LossTensors, given: Given, surrogate: object) -> Spec | None:
    """Read the turns of a call into its batch, and give the Spec that measures them."""
    spec, turns, max_turns = given.spec, given.turns, given.max_turns
    of_turns = isinstance(surrogate, Surrogate) and surrogate.mean_unit == "turn"
    if of_turns and turns is None:
        raise ValueError(f"turns: expected offsets, ids or 'runs' for {surrogate!r}, got None")
    if isinstance(spec, Spec) or max_turns is not None:
        check_turns(spec if isinstance(spec, Spec) else Spec(), turns, max_turns)
    if turns is None:
        return spec
    if spec is None and not of_turns:
        raise ValueError(
            "turns: expected None without a spec, which weighs, tests or measures them, or a surrogate whose ratio is "
            "a turn's, such as GSPO(over='turn'); got turns"
        )
    tensors.batch.turns = read_turns(
        tensors.read, tensors.batch, turns, max_turns, given.validate, given.ranks.sequence is not None
    )
    return measuring_turns(spec) if isinstance(spec, Spec) else spec


class ReadyWeights(NamedTuple):
    """Weights and training mask that the caller brings, in the shape of the batch, or None."""

    weights: Tensor | None = None
    train_mask: Tensor | None = None


def read_ready(
    tensors: LossTensors,
    spec: object,
    correction: object,
    weights: LogProbs | None,
    train_mask: LogProbs | None,
) -> ReadyWeights:
    """Check and open ready weights and masks, which exclude a Spec and each other's sources."""
    if spec is not None:
        for name, ready in (("correction", correction), ("weights", weights), ("train_mask", train_mask)):
            if ready is not None:
                raise ValueError(f"spec: expected None beside given {name}, or no {name}; got both")
        return ReadyWeights()
    if correction is not None:
        if not isinstance(correction, Correction):
            raise TypeError(f"correction: expected what correct() gives, got {type(correction).__name__}")
        if weights is not None or train_mask is not None:
            raise ValueError("correction: expected None beside weights or train_mask, got both")
        weights, train_mask = correction.weights, correction.mask
    if train_mask is tensors.batch.given_mask:
        train_mask = None
    read = tensors.read
    return ReadyWeights(
        read.optional("weights", weights, FLOATS_OR_INTEGERS), read.optional("train_mask", train_mask, MASK_DTYPES)
    )


# --- all of it ---


def _objective(*fields: Any) -> Objective:
    """Make an objective, or find the one of an earlier call, which is checked already."""
    if not torch.compiler.is_compiling():
        # What cannot be hashed is refused when an objective is made of it.
        with suppress(TypeError):
            return _known_objective(*fields)
    return Objective(*fields)


# Typed, because 1 and True are equal.
_known_objective = cached(maxsize=256, typed=True)(Objective)


@dataclass(eq=False, repr=False)
class LossRequest:
    """A call of `policy_loss`, checked; `mode`, `use`, `objective`, `runs_on` and `runner` follow from the rest.

    Attributes:
        given: The arguments that it shares with `correct`.
        spec: The Spec to correct by in the same call, which measures turns where there are some; or None.
        tensors: Log-probs, mask and advantages.
        surrogate, kl, regulariser, reduction, max_length: As for `policy_loss`.
        divisor: The denominator.
        ready: Ready weights and training mask.
        scales: Factors of all that a token adds, in the shape of the batch, or None.
        entropy: Of each token, in the shape of the batch, with its history.
        bonus: The entropy bonus, or None.
        ids: [S] int64, the numbers of the sequences, or None.
        mode: The mode.
        use: How weights and rejections enter the loss.
        objective: Everything that is fixed about the loss.
        runs_on: The backend that runs: "triton" or "torch".
        runner: A key of `policy_loss.LOSSES`.
    """

    given: Given
    spec: Spec | None
    tensors: LossTensors
    surrogate: Surrogate
    kl: KL | None
    regulariser: SquaredLogRatio | None
    reduction: LossReduction
    divisor: Divisor
    max_length: float | None
    ready: ReadyWeights
    scales: Tensor | None
    entropy: Tensor | None
    bonus: EntropyBonus | None
    ids: Tensor | None
    mode: Mode = field(init=False)
    use: Use = field(init=False)
    objective: Objective = field(init=False)
    runs_on: str = field(init=False)
    runner: str = field(init=False)

    def __post_init__(self) -> None:
        given, tensors, spec = self.given, self.tensors, self.spec
        split = given.ranks.sequence is not None
        if not isinstance(given.backend, str) or given.backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {list(BACKENDS)} for policy_loss, got {shown(given.backend)}")
        if split and given.backend == "triton":
            raise ValueError("backend: expected 'auto' or 'torch' for a loss with a sequence_group, got 'triton'")
        if spec is not None and not isinstance(spec, Spec):
            raise no_spec(spec, "a Spec or None")
        if (self.kl is None) != (tensors.ref is None):
            missing, there = ("ref_logp", "kl") if tensors.ref is None else ("kl", "ref_logp")
            raise ValueError(f"{missing}: expected a value, because {there} is given, got None")
        if self.bonus is not None:
            if not isinstance(self.bonus, EntropyBonus):
                raise TypeError(f"entropy_bonus: expected an EntropyBonus or None, got {type(self.bonus).__name__}")
            if self.entropy is None:
                raise ValueError("entropy: expected a value, because entropy_bonus is given, got None")
        if spec is None and given.thresholds is not None:
            from rollout_corr.backends.bounds_of_batch import completed

            completed(given.thresholds, None)  # raises
        if spec is None and given.versions is not None:
            raise ValueError("versions: expected None without a spec, whose metrics and criteria are of ages, got both")
        surrogate = checked_surrogate(self.surrogate)
        traits, sees_batch = surrogate.traits, surrogate.sees_batch
        if sees_batch and split:
            raise ValueError(
                "surrogate: expected one that does not look at the whole batch with a sequence_group, got "
                f"{surrogate!r}"
            )
        if self.ids is not None and not sees_batch:
            raise ValueError(
                f"sequence_ids: expected None for a surrogate that draws nothing, such as {surrogate!r}, got both"
            )
        scaled = self.scales is not None
        beyond = "a sequence_group" if split else loss_operators.beyond_kernels(surrogate, scaled)
        if given.backend == "triton" and beyond is not None:
            raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {beyond}")
        if spec is None and given.has_labels():
            raise ValueError("labels: expected None without a spec, whose metrics they tell apart, got both")
        if traits.reads_entropy and self.entropy is None:
            raise ValueError(f"entropy: expected a value for the surrogate {surrogate!r}, got None")
        if traits.sees == "groups":
            of_batch = tensors.batch.count, tensors.batch.train.device
            over_ranks = given.ranks.batch is not None
            wants = wanted_by(spec, surrogate)
            tensors.batch.groups = read_groups(given.grouping, wants, *of_batch, over_ranks, given.validate)
        elif spec is None and given.grouping is not None:
            raise ValueError(
                "group_index: expected None without a Spec or a surrogate that is of groups, such as REAL, got groups "
                f"beside {surrogate!r}"
            )
        mode = mode_of(surrogate, tensors.old, tensors.rollout)
        use = USES[mode.weights]
        self._check_weights(use)
        objective = _objective(
            surrogate,
            self.kl,
            self.regulariser,
            self.reduction,
            self.divisor.counted,
            self.max_length,
            self._replaces_ratio(use),
            "reject" if spec is None else spec.nonfinite,
        )
        self.mode, self.use, self.objective = mode, use, objective
        first = tensors.read.first
        self.runs_on, on_cpu = chosen_backend(first, given.backend), first.device.type == "cpu"
        self.runner = chosen(self.runs_on, beyond, on_cpu, torch.compiler.is_compiling(), split).name

    def claims(self) -> Claims:
        """The call as other ranks compare it; reads a count that the caller brings."""
        tensors = self.tensors
        given = {"new_logp": tensors.read.first, "old_logp": tensors.old, "rollout_logp": tensors.rollout}
        given |= {"ref_logp": tensors.ref, "weights": self.ready.weights, "scale": self.scales, "entropy": self.entropy}
        fixed = {
            **by_path("Objective", self.objective),
            **by_path("Spec", self.spec),
            **by_path("EntropyBonus", self.bonus),
            **({} if self.given.grouping is None else self.given.grouping.claims()),
            "mode": self.mode.name,
            "backend": self.runs_on,
            "external": str(sorted(self.given.external or ())),
            "current_version": str(None if self.given.versions is None else self.given.versions.current),
            "wants a gradient": str(torch.is_grad_enabled() and tensors.read.first.requires_grad),
        }
        if tensors.batch.mass is not None:
            given["log_mass"] = tensors.batch.mass.log
            fixed["renormalized"] = "train" if tensors.batch.mass.from_rollout else "rollout"
        if self.divisor.of_this_rank:
            fixed["denominator"] = "rows"
        found = claims_of("policy_loss", tensors.batch, given, fixed)
        if self.divisor.known is not None and not self.divisor.of_this_rank:
            found.sequences["denominator"] = repr(self.divisor.known.item())
        return found

    def _replaces_ratio(self, use: Use) -> bool:
        """Tell whether there are weights that take the place of the surrogate's ratio."""
        spec = self.spec
        has_weights = self.ready.weights is not None if spec is None else spec.apply and spec.weight is not None
        return use.replace_ratio and has_weights

    def _check_weights(self, use: Use) -> None:
        """Refuse weights that would correct twice, and two bounds of one ratio."""
        if self.ready.weights is not None and not use.multiply:
            raise ValueError(
                f"weights: expected None in bypass mode, where {type(self.surrogate).__name__}'s own ratio new/rollout "
                "is the correction and a weight would correct twice; pass train_mask alone, or old_logp too, or a "
                "Spec, which rejects and reports the weight"
            )
        if self._replaces_ratio(use) and self.surrogate.has_own_bounds:
            raise ValueError(
                f"surrogate: expected {type(self.surrogate).__name__}() without bounds of its own where weights take "
                f"the place of its ratio, got {self.surrogate!r}"
            )


def read_ids(batch: Batch, given: object) -> Tensor:
    """Check `sequence_ids`: [S] int64."""
    if not isinstance(given, Tensor):
        raise TypeError(f"sequence_ids: expected a tensor, got {type(given).__name__}")
    if given.dtype not in OFFSETS:
        raise ValueError(f"sequence_ids: expected int32 or int64, got {str(given.dtype).removeprefix('torch.')}")
    if tuple(given.shape) not in ((batch.count,), (batch.count, 1)):
        raise ValueError(f"sequence_ids: expected shape [{batch.count}] or [{batch.count}, 1], got {shape_of(given)}")
    if given.device != batch.train.device:
        raise ValueError(f"sequence_ids: expected device {batch.train.device}, got {given.device}")
    return given.detach().reshape(-1).long()


def read_scales(read: Reader, batch: Batch, scale: object) -> Tensor:
    """Read factors per token or per sequence, and give each token its own."""
    found, per_sequence = read.per_token_or_sequence("scale", scale)
    found = found.to(batch.dtype)
    return whole.sequences_of(batch)[0].spread(found).expand(batch.train.shape) if per_sequence else found


class Divisor(NamedTuple):
    """A denominator as it was read.

    Attributes:
        counted: The tokens or sequences that the loss counts where nobody else has.
        known: The count that is known beforehand, 0-d float64, or None.
        of_this_rank: It is this rank's share, to be added up over the batch group.
    """

    counted: Counted
    known: Tensor | None = None
    of_this_rank: bool = False


def read_denominator(given: object, reduction: str, read: Reader, batch: Batch) -> Divisor:
    """Read the denominator of a call."""
    device = read.first.device
    if reduction == "sum" and given != "original":
        raise ValueError(
            f"denominator: expected the default with reduction='sum', which does not divide, got {shown(given)}; "
            "reduction='token_mean' divides the sum by this denominator"
        )
    if isinstance(given, str) and given == "rows":
        if reduction_of(reduction).unit != "sequences":
            raise ValueError(
                f"denominator: expected 'rows' with a reduction over sequences, got it with reduction={reduction!r}"
            )
        rows = torch.full((), batch.count, dtype=torch.float64, device=device)
        return Divisor("original", rows, of_this_rank=True)
    if isinstance(given, str) and given in DENOMINATORS:
        return Divisor("kept" if given == "kept" else "original")
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.dtype == torch.bool or given.is_complex():
            got = f"{dtype_of(given)} of shape {shape_of(given)}"
            raise ValueError(f"denominator: expected a tensor that holds one number, got {got}")
        count = given.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
        return Divisor("original", count)
    if isinstance(given, Real) and not isinstance(given, bool):
        value = number("denominator", given)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"denominator: expected a finite number >= 0, got {value!r}")
        return Divisor("original", torch.full((), value, dtype=torch.float64, device=device))
    raise ValueError(f"denominator: expected one of {list(DENOMINATORS)}, a number or a 0-d tensor, got {shown(given)}")
