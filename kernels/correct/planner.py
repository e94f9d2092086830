"""Make the plan of a Spec: everything that the kernels branch on, and the columns of their tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...metrics import native, peers
from ...metrics import turns as of_turns
from ...metrics.extra import Extra
from ...metrics.schema import columns_of, names_of
from ...specs.caches import cached_untraced
from ...specs.correction import Criterion, Spec
from ...specs.criterion import AGE, threshold_of
from ...specs.statistics import float32_at_least, float32_at_most, log_bound
from ...specs.weight import SMALLEST_MEAN
from ..tables import CLASSES, of_pair
from .peers import same_numbers, slot_columns
from .plan import Plan, PlannedCriterion, pairs_of


@cached_untraced(maxsize=256)
def plan_of(spec: Spec, *, advantages: str | None, ages: str | None = None, **of_batch: Any) -> Plan:
    """Make the plan of a Spec for one kind of batch, whose further fields follow from what it has and is to get back.

    Advantages, and versions from which ages are computed, are per "token", per "sequence" or None.
    """
    weight = spec.weight
    criteria, of_ages = _criteria(spec, ages is not None), Extra(ages=ages is not None)
    plan = Plan(
        weighs=None if weight is None else weight.over,
        geometric=weight is not None and weight.reduce == "mean",
        outside="clamp" if weight is None else weight.outside,
        bounded=weight is not None and (weight.lower, weight.upper) != (None, None),
        has_lower=weight is not None and weight.lower is not None,
        has_upper=weight is not None and weight.upper is not None,
        token_clamp=weight is not None and weight.token_clamp is not None,
        criteria=criteria,
        rejected=spec.rejected,
        nonfinite=spec.nonfinite,
        kept=spec.sums_over == "kept" and any(criterion.over == "token" for criterion in criteria),
        full=spec.detail == "full",
        advantages=advantages if any(each.when != "any" for each in criteria) else None,
        externals=1 + max((criterion.external for criterion in criteria), default=-1),
        schemes=tuple(name for name in spec.report if name != "native"),
        pairs=pairs_of(spec),
        turns=spec.measures_turns,
        ages=ages,
        age_sums=of_ages.sums(),
        age_maxima=of_ages.maxima(),
        mean=_mean(spec),
        **of_batch,
    )
    tables = columns_of(spec, indices(spec))._asdict() | _slot_tables(plan) | _turn_columns(spec, plan)
    tables["token_sums"] += plan.age_sums
    tables["token_maxima"] += plan.age_maxima
    plan = replace(plan, **tables, numbers=tuple(numbers_of(spec)))
    return replace(plan, same_numbers=same_numbers(plan))


def _mean(spec: Spec) -> tuple[int, int, float] | None:
    if spec.weight is None or spec.weight.normalize != "batch":
        return None
    weights, units = native.batch_mean(spec)
    sums = names_of(spec)[0]
    return sums.index(weights), sums.index(units), SMALLEST_MEAN


def _criteria(spec: Spec, computes_ages: bool) -> tuple[PlannedCriterion, ...]:
    names = list(dict.fromkeys(c.tensor_name for c in spec.criteria if c.tensor_name is not None))
    names = [name for name in names if name != AGE or not computes_ages]
    pairs = ("train/rollout", *pairs_of(spec))
    criteria = []
    for i, criterion in enumerate(spec.criteria):
        threshold = threshold_of(criterion)
        criteria.append(
            PlannedCriterion(
                index=i,
                # Ages are in a tensor, or computed, as an external statistic is.
                stat="external" if criterion.tensor_name is not None else criterion.stat,
                over=criterion.over,
                reduce=criterion.reduce,
                when=criterion.when,
                drop=criterion.drop,
                compared=threshold.on,
                holed=threshold.hole is not None,
                token_clamp=criterion.token_clamp is not None,
                external=names.index(criterion.tensor_name) if criterion.tensor_name in names else -1,
                source=criterion.statistic.source,
                pair=pairs.index(criterion.of),
                role=peers.role(criterion, spec),
            )
        )
    return tuple(criteria)


def _slot_tables(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name the columns that `read` stores for a slot: counts, integers and floats to add, peaks to maximize."""
    propagate = plan.nonfinite == "propagate"
    of_peers = slot_columns(plan)
    sums = [each for each in plan.criteria if not each.per_token and each.sum not in (None, "d")]
    # Sums that decide: name, number of limbs, whether a non-finite value can reach them. A list times False is empty.
    exact = [("d", 1, propagate)]
    exact += [("d_kept", 1, propagate)] * plan.kept
    exact += [("weight", 1, propagate)] * (plan.weighs in ("turn", "sequence") and plan.token_clamp)
    exact += [(str(t.sum), 1 if t.one_limb else 2, propagate or t.external >= 0) for t in sums]
    exact += [("advantage", 2, False)] * plan.averages_advantages
    limbs = [limb for name, many, _ in exact for limb in (name, f"{name}/fraction")[:many]]
    floats = [
        "train",
        "rollout",
        *["ratio_of_tokens", "weight_of_tokens"] * (plan.weighs == "token"),
        *["abs_d", "k3"] * plan.turns,
    ]
    for name, _, poisoned in exact:
        floats += [f"{name}/rest"] * poisoned

    counts = ["valid", "nonfinite", "differing"]
    counts += ["survivors"] * plan.kept
    counts += [f"{each.index}/lost" for each in plan.criteria if each.per_token]
    counts += [f"{each.index}/counted" for each in plan.criteria if each.per_token and each.may_be_nan]
    counts += ["alive"] * plan.drops_tokens
    counts += CLASSES * plan.classes_of(0)
    counts += [f"alive/{name}" for name in CLASSES] * (plan.classes_of(0) and plan.drops_tokens)
    for k in range(1, 1 + len(plan.pairs)):
        names = ["nonfinite", *["survivors"] * plan.kept, *CLASSES * plan.classes_of(k)]
        counts += [of_pair(k, name) for name in names]
    peaks = [f"{each.index}/peak" for each in plan.criteria if not each.per_token and each.sum is None]
    return {
        "counts": (*counts, *of_peers.counts),
        "integers": tuple(limbs),
        "floats": (*floats, *of_peers.floats),
        "peaks": tuple(peaks),
    }


# What a weight of turns adds up over tokens, and what its sequences have of it.
OF_TURN_WEIGHTS = (
    "raw2", "raw_around_one2", "weight2", "weight_around_one2", "tokens_above", "tokens_below", "of_sequence/raw",
    "of_sequence/weight",
)  # fmt: skip


def _turn_columns(spec: Spec, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name what is added up over the turns of a sequence; none without turns."""
    if not plan.turns:
        return {}
    rows = [row for row in of_turns.AGGREGATES if row.when(spec)]
    names = [name for row in rows for name in (*row.sums, *row.maxima)]
    names += ["of_sequence/kept", *OF_TURN_WEIGHTS * plan.weighs_turns]
    for i in (each.index for each in plan.criteria if each.over == "turn"):
        value = f"{i}/value"
        names += [f"{i}/lost", f"{i}/units", value, f"{value}2", f"max_{value}", f"-min_{value}"]
    maxima = tuple(name for name in names if name.startswith(("max_", "-min_")))
    return {"turn_sums": tuple(name for name in names if name not in maxima), "turn_maxima": maxima}


# --- the numbers: data of the kernels, found by name when one is compiled ---


def indices(spec: Spec) -> list[str]:
    """Name the criteria by their index: a label in a name would be part of a compile key."""
    return [str(i) for i in range(len(spec.criteria))]


def numbers_of(spec: Spec) -> dict[str, float]:
    """The thresholds by name, rounded so that a float32 compared with one is compared with the threshold itself."""
    numbers = {"clamp": spec.clamp}
    if spec.weight is not None:
        weight = spec.weight
        rounds = weight.over == "token"
        numbers |= {"lower": _low(weight.low), "upper": _high(weight.high)}
        numbers |= _interval("log", log_bound(weight.low), log_bound(weight.high), rounds)
        if weight.token_clamp is not None:
            numbers["token_clamp"] = weight.token_clamp
    for i, criterion in enumerate(spec.criteria):
        cut, rounds = threshold_of(criterion), criterion.over == "token"
        numbers |= _interval(f"{i}", cut.lower, cut.upper, rounds)
        if cut.hole is not None:
            hole = _interval(f"{i}/hole", cut.hole[1], cut.hole[0], rounds)
            numbers |= hole
        numbers |= _settings(f"{i}", criterion)
    for name, sides in peers.intervals(spec, indices(spec)).items():
        numbers |= _closed_sides(name, *sides, False) | _closed_sides(f"{name}/token", *sides, True)
    return numbers


def _settings(prefix: str, criterion: Criterion) -> dict[str, float]:
    found = {}
    if criterion.token_clamp is not None:
        found[f"{prefix}/token_clamp"] = criterion.token_clamp
    if criterion.statistic.has_eps:
        found[f"{prefix}/eps"] = criterion.eps
    return found


def _interval(prefix: str, lower: float | None, upper: float | None, rounds: bool) -> dict[str, float]:
    low, high = _low(lower), _high(upper)
    if rounds:
        low, high = float32_at_least(low), float32_at_most(high)
    return {f"{prefix}/lower": low, f"{prefix}/upper": high}


def _closed_sides(prefix: str, lower: float | None, upper: float | None, rounds: bool) -> dict[str, float]:
    """An interval without its open sides: not even a NaN lies beyond those."""
    found = {}
    if lower is not None:
        found[f"{prefix}/lower"] = float32_at_least(lower) if rounds else lower
    if upper is not None:
        found[f"{prefix}/upper"] = float32_at_most(upper) if rounds else upper
    return found


def _low(bound: float | None) -> float:
    return -math.inf if bound is None else bound


def _high(bound: float | None) -> float:
    return math.inf if bound is None else bound
