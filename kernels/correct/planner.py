"""Make the plan of a Spec: everything that the kernels branch on, and the columns of their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_corr.kernels.correct import peers_plan
from rollout_corr.kernels.correct.numbers import indices, numbers_of
from rollout_corr.kernels.correct.plan import CLASSES, Plan, Test, pairs_of
from rollout_corr.kernels.correct.prefixes import named_places
from rollout_corr.kernels.tokens import of_pair
from rollout_corr.metrics import labels as of_labels
from rollout_corr.metrics import peers
from rollout_corr.metrics import turns as of_turns
from rollout_corr.metrics.schema import columns_of
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Criterion, Spec
from rollout_corr.spec.thresholds import threshold_of


@cached(maxsize=256)
def plan_of(
    spec: Spec, *, double: bool, advantages: str | None, labelled: bool = False, split: bool = False, **of_batch: Any
) -> Plan:
    """Make the plan of a Spec for one kind of batch.

    Args:
        spec: The Spec.
        double: Compute in float64.
        advantages: "token", "sequence" or None.
        labelled: Sequences have labels.
        split: Sequences lie on several ranks.
        of_batch: Further fields of a plan that follow from what a batch has and is to get back.
    """
    weight = spec.weight
    tests = _tests(spec)
    plan = Plan(
        level=None if weight is None else weight.level,
        outside="clamp" if weight is None else weight.outside,
        bounded=weight is not None and (weight.lower, weight.upper) != (None, None),
        has_lower=weight is not None and weight.lower is not None,
        has_upper=weight is not None and weight.upper is not None,
        token_clamp=weight is not None and weight.token_clamp is not None,
        tests=tests,
        rejected=spec.rejected,
        nonfinite=spec.nonfinite,
        kept=spec.sums_over == "kept" and any(test.over == "token" for test in tests),
        full=spec.detail == "full",
        double=double,
        advantages=advantages if any(test.when != "any" for test in tests) else None,
        externals=1 + max((test.external for test in tests), default=-1),
        schemes=tuple(name for name in spec.report if name != "native"),
        pairs=pairs_of(spec),
        turns=spec.measures_turns,
        weighs_turns=weight is not None and weight.per_turn,
        prefix=None if weight is None else weight.reduce,
        prefix_within="sequence" if weight is None else weight.over,
        grows=weight is not None and weight.growth is not None,
        joins=split and spec.has_prefixes,
        **of_batch,
    )
    if spec.has_prefixes:
        plan = replace(plan, ahead=_ahead(plan, tuple(numbers_of(spec, double))))
    tables = columns_of(spec, indices(spec))._asdict() | _slot_tables(plan) | _turn_columns(spec, plan)
    if labelled:
        tables = _with_labels(tables, spec, plan)
    plan = replace(plan, **tables, numbers=tuple(numbers_of(spec, double)))
    return replace(plan, same_numbers=peers_plan.same_numbers(plan))


def _tests(spec: Spec) -> tuple[Test, ...]:
    names = list(dict.fromkeys(c.tensor_name for c in spec.criteria if c.tensor_name is not None))
    pairs = ("train/rollout", *pairs_of(spec))
    tests = []
    for i, criterion in enumerate(spec.criteria):
        threshold = threshold_of(criterion)
        tests.append(
            Test(
                index=i,
                # Ages come as a tensor, and so as an external statistic does.
                stat="external" if criterion.tensor_name is not None else criterion.stat,
                over=criterion.over,
                reduce=criterion.reduce,
                when=criterion.when,
                drop=criterion.drop,
                # What the batch decides is a value.
                compared="value" if criterion.rules and not criterion.statistic.log_space else threshold.on,
                holed=threshold.hole is not None,
                token_clamp=criterion.token_clamp is not None,
                external=-1 if criterion.tensor_name is None else names.index(criterion.tensor_name),
                pair=pairs.index(criterion.of),
                role=peers.role(criterion, spec),
                grows=criterion.growth is not None,
                along=_along(spec, i),
                within=criterion.within,
            )
        )
    return tuple(tests)


def _along(spec: Spec, i: int) -> str:
    """Name what runs along sequences for a criterion: for the weight or an earlier criterion it may do so already."""
    criteria, weight = spec.criteria, spec.weight
    if criteria[i].over != "prefix":
        return ""
    same = [_quantity(criterion) == _quantity(criteria[i]) for criterion in criteria[:i]]
    of_d = criteria[i].within == ("sequence" if weight is None else weight.over)
    of_d = of_d and criteria[i].stat == "ratio" and criteria[i].of == "train/rollout"
    of_d = of_d and criteria[i].reduce in ("sum", "mean")
    clamps = () if weight is None or weight.reduce not in ("sum", "mean") else (weight.token_clamp,)
    if of_d and criteria[i].token_clamp in clamps:
        return "weight"
    return f"{same.index(True) if True in same else i}/along"


def _quantity(criterion: Criterion) -> tuple[object, ...]:
    """Tell apart what runs along sequences for criteria."""
    summed = criterion.reduce in ("sum", "mean")
    reduce = "sum" if summed else (criterion.reduce, threshold_of(criterion).on)
    of_tokens = criterion.stat, criterion.tensor_name, criterion.of, criterion.token_clamp, criterion.eps
    return (criterion.over, criterion.within, reduce, *of_tokens)


def _ahead(plan: Plan, numbers: tuple[str, ...]) -> Plan:
    """Make the plan of the pass before, whose columns are what runs along sequences."""
    propagate = plan.nonfinite == "propagate"
    found: dict[str, tuple[int, bool]] = {}  # name: limbs of a sum, 0 of a maximum; whether it can be poisoned
    if plan.prefix is not None:
        found["weight"] = (0 if plan.prefix == "min" else 1), propagate
    for test in plan.tests:
        if test.over == "prefix":
            limbs = 0 if test.sum is None else 1 if test.one_limb else 2
            found.setdefault(test.along, (limbs, propagate or test.external >= 0))
    places = {named_places(0, plan.prefix_within)} if plan.prefix is not None else set()
    for test in plan.tests:
        if test.over == "prefix" and (test.reduce == "mean" or test.grows):
            places.add(named_places(test.pair, test.within))
    integers, floats = [], []
    for name, (limbs, poisoned) in found.items():
        integers += [name, f"{name}/fraction"][:limbs] if not plan.double else []
        floats += [name] * (plan.double and limbs > 0) + [f"{name}/rest"] * (poisoned and limbs > 0)
    return replace(
        plan,
        level=None,
        full=False,
        writes_weights=False,
        writes_mask=False,
        carries=True,
        counts=("valid", *sorted(places), *(f"{t.index}/lost" for t in plan.tests if plan.kept and t.rejects_early)),
        integers=tuple(integers),
        floats=tuple(floats),
        peaks=tuple(name for name, (limbs, _) in found.items() if not limbs),
        numbers=numbers,
    )


def _slot_tables(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name the columns that `read` stores for a slot: counts, integers and floats to add, peaks to maximise."""
    propagate = plan.nonfinite == "propagate"
    of_peers = peers_plan.slot_columns(plan)
    sums = [test for test in plan.tests if not test.per_token and test.sum not in (None, "d")]
    # Sums that decide: name, number of limbs, whether a non-finite value can reach them. A list times False is empty.
    exact = [("d", 1, propagate)]
    exact += [("d_kept", 1, propagate)] * plan.kept
    exact += [("weight", 1, propagate)] * (plan.level in ("product", "geometric") and plan.token_clamp)
    exact += [(str(t.sum), 1 if t.one_limb else 2, propagate or t.external >= 0) for t in sums]
    exact += [("advantage", 2, False)] * plan.averages_advantages
    limbs = [limb for name, many, _ in exact for limb in (name, f"{name}/fraction")[:many]]
    floats = ["train", "rollout", *["raw", "bounded"] * plan.weighs_tokens, *["abs_d", "k3"] * plan.turns]
    for name, _, poisoned in exact:
        floats += [name] * plan.double + [f"{name}/rest"] * poisoned

    counts = ["valid", "nonfinite"]
    counts += ["survivors"] * plan.kept
    counts += [f"{test.index}/lost" for test in plan.tests if test.per_token]
    counts += ["alive"] * plan.drops_tokens
    counts += CLASSES * plan.classes_of(0)
    counts += [f"alive/{name}" for name in CLASSES] * (plan.classes_of(0) and plan.drops_tokens)
    for k in range(1, 1 + len(plan.pairs)):
        names = ["nonfinite", *["survivors"] * plan.kept, *CLASSES * plan.classes_of(k)]
        counts += [of_pair(k, name) for name in names]
    peaks = [f"{test.index}/peak" for test in plan.tests if not test.per_token and test.sum is None]
    return {
        "counts": (*counts, *of_peers.counts),
        "integers": () if plan.double else tuple(limbs),
        "floats": (*floats, *of_peers.floats),
        "peaks": (*peaks, *["rest"] * plan.rests),
    }


# What a weight of turns adds up over tokens, and what its sequences have of it.
OF_TURN_WEIGHTS = ("raw2", "weight2", "tokens_above", "tokens_below", "of_sequence/raw", "of_sequence/bounded")


def _turn_columns(spec: Spec, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name what is added up over the turns of a sequence; none without turns."""
    if not plan.turns:
        return {}
    rows = [row for row in of_turns.AGGREGATES if row.when(spec)]
    names = [name for row in rows for name in (*row.sums, *row.maxima)]
    names += ["of_sequence/kept", *OF_TURN_WEIGHTS * plan.weighs_turns]
    for i in (test.index for test in plan.tests if test.over == "turn"):
        value = f"{i}/value"
        names += [f"{i}/lost", f"{i}/units", value, f"{value}2", f"max_{value}", f"-min_{value}"]
    names += [f"{test.index}/lost" for test in plan.tests if test.drop == "rest" and test.within == "turn"]
    maxima = tuple(name for name in names if name.startswith(("max_", "-min_")))
    return {"turn_sums": tuple(name for name in names if name not in maxima), "turn_maxima": maxima}


def _with_labels(tables: dict[str, tuple[str, ...]], spec: Spec, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Keep what labels add up of each sequence: of a slot what is else of the batch, but for what follows from it."""
    columns, own = of_labels.columns_of(spec, "sequences"), dict(zip(_labels(spec), indices(spec), strict=True))
    sums, maxima = (tuple(_by_index(name, own) for name in names) for names in (columns.all_sums, columns.all_maxima))
    of_slots = {
        "floats": [name for name in sums if name in tables["token_sums"] and _varies(name, plan)],
        "peaks": [name for name in maxima if name in tables["token_maxima"][plan.derived :]],
    }
    more = {table: (*tables[table], *(f"label/{name}" for name in names)) for table, names in of_slots.items()}
    return tables | more | {"label_sums": sums, "label_maxima": maxima}


def _labels(spec: Spec) -> list[str]:
    return [criterion.label for criterion in spec.criteria]


def _by_index(name: str, own: dict[str, str]) -> str:
    """Name a column of a criterion by its index, as the tables of a plan do, in the place of its label."""
    for side in ("max_", "-min_", ""):
        label, slash, column = name.removeprefix(side).rpartition("/")
        if slash and name.startswith(side) and label in own:
            return f"{side}{own[label]}/{column}"
    return name


def _varies(name: str, plan: Plan) -> bool:
    """Tell whether a sum can be anything but 0: beyond a bound that is open there is no token."""
    return {"tokens_above": plan.has_upper, "tokens_below": plan.has_lower}.get(name, True)
