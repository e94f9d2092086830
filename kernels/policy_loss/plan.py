"""The plan of a policy loss: its structure as a compile-time constant of the kernels, its numbers as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from ...metrics.loss import OF_SEQUENCES, max_names, sum_names
from ...specs.caches import cached_untraced
from ...specs.statistics import float32_at_least, float32_at_most, log_of
from ...specs.terms import Objective
from ..correct.plan import Plan
from ..tables import Tables


@dataclass(frozen=True, kw_only=True)
class LossPlan(Tables):
    """Everything the kernels of `policy_loss` branch on.

    Where the gradient of a token depends on its sequence, a first pass over the tokens adds up (phase "sum") and a
    second one writes ("write"); otherwise one pass does everything ("whole").
    """

    phase: str
    surrogate: str
    option: str | None  # the value of the field that `Traits.formula` names
    takes: str  # whose log-ratio, `Surrogate.ratio_level`
    sequence_value: str | None  # what a token reads of its sequence, `Surrogate.sequence_value`
    has_lower: bool
    has_upper: bool  # for PPO: a bound where A < 0
    own_ratio: bool
    scaled: bool  # by `Surrogate.coef`
    kl: str | None
    kl_gradient: str | None
    kl_weight: str | None
    kl_everywhere: bool
    value_clamp: bool
    kl_bound: bool
    kl_swapped: bool
    regularizer: str | None  # its scope
    mean: str
    over: str | None  # what the mean counts, None where the caller has counted
    based: bool  # there are log-probs that new_logp is compared with
    weighted: bool  # there are weights
    referred: bool  # there are log-probs of a reference policy
    trained: bool  # there is a mask of what trains
    advantages: str  # "token" | "sequence"
    differentiable: bool  # the gradient is handed back
    mass: str | None  # whose log-probs the kept mass is taken from: "train", which is new, or "rollout", the base
    has_scales: bool  # factors of all that a token adds
    chosen: bool  # the surrogate chose tokens from the whole batch
    turns: bool  # slots and offsets are of turns, whose ratio it is; sequences are counted apart
    gated: bool = False  # the weights are a bool mask: 0 or 1, whatever byte is true
    # Where the two log-probs of a correction in the same pass come from: "own" tensors, "new" or "base"; None: there is
    # no such correction.
    trainer: str | None = None
    engine: str | None = None
    spec_mass: bool = False  # that correction takes the kept mass off
    spec_pairs: bool = False  # and compares further policies
    clip_counts: tuple[str, ...] = ()  # clips that can happen
    sums: tuple[str, ...] = ()  # the statistics, in the order in which they are handed out
    of_choice: tuple[str, ...] = ()  # the ones that are summed where tokens are chosen
    maxima: tuple[str, ...] = ()
    of_sequences = OF_SEQUENCES

    __hash__ = Tables.__hash__

    @property
    def averages(self) -> bool:
        """Whether every sequence is divided by its own length."""
        return self.mean == "sequence"

    @property
    def clips(self) -> bool:
        """Whether the surrogate clips as PPO does."""
        return self.surrogate in ("PPO", "GSPO", "ClipCov")

    @property
    def levels(self) -> bool:
        """Whether a token needs the mean or the total log-ratio of its sequence."""
        return self.sequence_value is not None

    @property
    def pulls(self) -> bool:
        """Whether the gradient of a token is computed for its sequence."""
        return self.surrogate == "GMPO" or (self.surrogate == "GSPO" and self.option == "sequence")

    @property
    def averages_late(self) -> bool:
        """Whether sequences are divided by their lengths in backward, because the only pass does not know them."""
        return self.averages and self.phase == "whole"

    @property
    def assumes(self) -> str | None:
        """What the gradient is written over, before the divisor is known: "given", "rows", "tokens", or None for 1."""
        if self.averages_late or (self.averages and self.turns):
            return None
        if self.over is None:
            return "given"
        if self.mean == "sum":
            return None
        return "rows" if self.averages or self.over == "rows" else "tokens"

    @property
    def registers(self) -> int | None:
        """The most registers of a thread on NVIDIA: with a correction for 12 warps of a multiprocessor, or 11."""
        if self.trainer is None:
            return None
        # With the kept mass 168 spill 20 bytes on sm_100, with further policies 24.
        return 184 if self.has_mass or self.spec_pairs else 168

    @property
    def has_mass(self) -> bool:
        """Whether the kept mass is read."""
        return self.mass is not None or self.spec_mass

    @property
    def total(self) -> str:
        """The column with the sum of the loss: the one of the policy alone, where nothing else is in it."""
        more = self.kl is not None or self.regularizer is not None or self.has_scales or self.averages
        return "total" if more else "loss_policy"

    @property
    def adds_up(self) -> bool:
        """Whether this pass stores sums of slots."""
        return self.phase != "write"

    @property
    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Every accumulator; a second pass reads the slots of the first, and counts sequences by them."""
        every = super().recorded
        if self.adds_up:
            return every
        return tuple(one for one in every if one[0] not in self.of_slots and one[1] not in self.sequence_sums)

    @property
    def writes(self) -> bool:
        """Whether this pass writes the gradient and adds up the loss."""
        return self.phase in ("whole", "write")


@dataclass(frozen=True)
class Scaling:
    """Everything that the kernel of backward branches on."""

    packed: bool
    averages: bool
    in_place: bool  # the product replaces the gradient
    flagged: bool  # flags tell the steps that have a valid token from those whose gradient is 0
    registers: None = None  # of a thread at most: there are few


@cached_untraced(maxsize=256)
def plans_of(objective: Objective, *, counted: bool, **of_batch: Any) -> tuple[LossPlan, ...]:
    """Make a plan for each pass over the tokens; with `counted` the divisor is counted here, and not given."""
    surrogate, kl, regularizer = objective.surrogate, objective.kl, objective.regularizer
    cuts, own_ratio = list(surrogate.thresholds.values()), not objective.weights_are_the_ratio
    plan = LossPlan(
        phase="whole",
        surrogate=type(surrogate).__name__,
        option=None if surrogate.traits.formula is None else getattr(surrogate, surrogate.traits.formula),
        has_lower=any(lower is not None for lower, _ in cuts),
        has_upper=bool(cuts) and cuts[-1][1] is not None,
        takes=surrogate.ratio_level,
        sequence_value=surrogate.sequence_value,
        own_ratio=own_ratio,
        scaled=surrogate.coef != 1.0,
        clip_counts=tuple(f"clip_{side}" for side in surrogate.clips(own_ratio)),
        kl=None if kl is None else kl.kind,
        kl_gradient=None if kl is None else kl.gradient or kl.kind,
        kl_weight=None if kl is None else kl.weight,
        kl_everywhere=kl is not None and kl.scope == "all",
        value_clamp=kl is not None and kl.value_clamp is not None,
        kl_bound=kl is not None and kl.bound is not None,
        kl_swapped=kl is not None and kl.swapped,
        regularizer=None if regularizer is None else regularizer.scope,
        mean=objective.mean.of,
        over=objective.mean.over if counted else None,
        nonfinite=objective.nonfinite,
        numbers=tuple(numbers_of(objective)),
        sums=sum_names(objective),
        of_choice=surrogate.traits.sums,
        maxima=max_names(),
        **of_batch,
    )
    passes = [replace(plan, phase=phase) for phase in (("sum", "write") if surrogate.reads_sequences else ("whole",))]
    return tuple(replace(each, **_columns(each)) for each in passes)


def _columns(plan: LossPlan) -> dict[str, Any]:
    """Name the columns of the tables that a pass fills."""
    found: dict[str, Any] = {"counts": ("valid", "counted")} | ({} if plan.phase == "whole" else _of_slots(plan))
    if not plan.writes:
        return found
    empty = {"clip_low", "clip_high", "clip_dual", *plan.of_choice} - set(plan.clip_counts)
    measured = [name for name in plan.sums if name not in OF_SEQUENCES and name not in empty]
    others = () if plan.total == "loss_policy" else ("total",)
    found |= {"token_sums": (*others, *measured), "token_maxima": plan.maxima, "sequence_sums": OF_SEQUENCES}
    if plan.phase == "write":
        found["token_sums"] += OF_SEQUENCES
    elif plan.averages:
        found |= {"token_sums": tuple(measured), "floats": ("total",), "sequence_sums": (*OF_SEQUENCES, "total")}
    return found


def _of_slots(plan: LossPlan) -> dict[str, Any]:
    """Name the sums of a slot that the first of two passes stores: exact, so that tiles do not affect the gradient."""
    ratios, others = ["level"], []
    if plan.surrogate == "GMPO":
        ratios += ["log_weight"] if plan.weighted else []
        others += ["advantage"]
    elif plan.pulls:
        others += ["up", "down"]
    floats = [f"{name}/rest" for name in (*ratios, *others)] if plan.nonfinite == "propagate" else []
    limbs = [limb for name in others for limb in (name, f"{name}/fraction")]
    return {"integers": (*ratios, *limbs), "floats": tuple(floats)}


@dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """A correction and a loss in one pass over the tokens: the columns of both.

    The sums of the loss are kept by slot, because a sequence may still be rejected when its gradient has been written.
    """

    loss: LossPlan

    __hash__ = Tables.__hash__

    @property
    def unreported(self) -> int:
        """The sum of the loss, where that is no statistic."""
        return int(self.loss.total == "total")

    @property
    def rejects_from_loss(self) -> bool:
        """Whether a rejected sequence has no part in the loss: a dry run only reports it."""
        return self.loss.trained or self.loss.weighted

    @property
    def zeroes_weights(self) -> bool:
        """Whether the gradient of rejected sequences has to be zeroed."""
        return self.rejects_sequences and self.rejects_from_loss and self.loss.differentiable

    @property
    def zeroes_mask(self) -> bool:
        """False: no mask is written."""
        return False

    @property
    def applies(self) -> bool:
        """False: no pass follows."""
        return False


def step_plan(correction: Plan, loss: LossPlan) -> StepPlan:
    """Join the plans of a correction and of a loss whose only pass is the correction's too."""
    empty = {"clip_low", "clip_high", "clip_dual"} - set(loss.clip_counts)
    counted = ("loss_tokens_nonfinite", *loss.clip_counts)
    floats = [name for name in loss.sums if name not in (*OF_SEQUENCES, *counted, *empty)]
    total = () if loss.total == "loss_policy" else ("total",)
    columns = {
        "counts": (*correction.counts, "counted", *counted),
        "floats": (*correction.floats, *floats, *total),
        "peaks": (*correction.peaks, *loss.maxima),
        "sequence_sums": (*correction.sequence_sums, *loss.sums, *total),
        "sequence_maxima": (*correction.sequence_maxima, *loss.maxima),
    }
    given = {field.name: getattr(correction, field.name) for field in fields(Plan)}
    return StepPlan(**(given | columns), loss=loss)


def numbers_of(objective: Objective) -> dict[str, float]:
    """All numbers by name; logarithms so that a float32 compared with one is compared with the bound itself."""
    surrogate, kl = objective.surrogate, objective.kl
    numbers = {"clamp": surrogate.clamp, "max_length": objective.mean.length or 1.0} | surrogate.numbers

    def cut(name: str, lower: float | None, upper: float | None) -> None:
        low = -math.inf if lower is None else log_of(lower)
        high = math.inf if upper is None else log_of(upper)
        numbers[f"{name}/lower"] = float32_at_least(low)
        numbers[f"{name}/upper"] = float32_at_most(high)

    if surrogate.coef != 1.0:
        numbers["coef"] = surrogate.coef
    for name, (lower, upper) in surrogate.thresholds.items():
        cut(name, lower, upper)
    if kl is not None:
        numbers |= {"kl": kl.coef, "kl_log_clamp": kl.log_clamp, "kl_value_clamp": kl.value_clamp or 0.0}
        numbers |= {} if kl.bound is None else {"kl_bound": kl.bound}
    if objective.regularizer is not None:
        numbers |= {"regularizer": objective.regularizer.coef}
    return numbers
