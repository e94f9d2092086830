"""Launch a round of the search for bounds of tokens: one launch, whatever the number of tokens and of bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.correct.count import count_kernel, rows_of
from rollout_corr.kernels.correct.launch import Given, contiguous_extras
from rollout_corr.kernels.correct.measures import COPIES
from rollout_corr.kernels.correct.plan import Plan, Searched
from rollout_corr.kernels.correct.planner import plan_of
from rollout_corr.kernels.correct.recipe import STRIDED, upload_of
from rollout_corr.kernels.grid import SIZES, current, grid_for, names_of_strides, sizes_of, strides_of
from rollout_corr.kernels.launches import NOTHING, Launch, Names, Operands, Site, addresses_of, alignment_of, dtypes_of
from rollout_corr.kernels.uploads import Upload
from rollout_corr.spec.bounds_of_batch import WEIGHT, Bottom, KeepESS, MeanBelow, OfBatch, Place, Quantile, TopK
from rollout_corr.spec.correction import Spec, rules_of
from rollout_corr.spec.thresholds import log_bound


class Round(NamedTuple):
    """A round of some searches whose digits are the same.

    Attributes:
        places: Of the bounds.
        found: Of each, 0-d int64, the digits found.
        below: Bits behind these.
        bits: Of the next digit.
        scales: [digits] float64, for a sample size: what weights are multiplied by to be whole numbers.
    """

    places: tuple[Place, ...]
    found: tuple[Tensor, ...]
    below: int
    bits: int
    scales: Tensor | None = None


@dataclass(eq=False)
class CountRecipe:
    """Everything about rounds that share a Spec, bounds, dtypes and a device.

    Attributes:
        site: The kernel.
        plan: The plan of the Spec.
        constants: Values of `CONSTANTS`.
        searches: The bounds.
        upload: The thresholds of the Spec.
        settings: Of each rule the number that it reads: the unit of amounts, the least logarithm of a weight.
    """

    site: Site
    plan: Plan
    constants: tuple[object, ...]
    searches: tuple[Searched, ...]
    upload: Upload
    settings: Upload


TENSORS = (
    *("train_logp", "rollout_logp", "mask", "log_mass", "advantages", "offsets", "numbers"),
    *("settings", "firsts", "scales", "tables"),
)
CONSTANTS = ("PLAN", "SEARCHES", "nothing")


# What a rule adds up beside counts, and the number that it needs for that.
READS: dict[type[OfBatch], tuple[str, Callable[[Any, Spec], float]]] = {
    Quantile: ("nothing", lambda rule, spec: 0.0),
    Bottom: ("nothing", lambda rule, spec: 0.0),
    TopK: ("nothing", lambda rule, spec: 0.0),
    MeanBelow: ("amounts", lambda rule, spec: rule.below),
    KeepESS: ("weights", lambda rule, spec: least_log_weight(spec)),
}


def least_log_weight(spec: Spec) -> float:
    """The logarithm of the lower bound that weights have before their sample size is asked for."""
    low = None if spec.weight is None else log_bound(spec.weight.low)
    return -math.inf if low is None else low


def searched_for(spec: Spec, places: tuple[Place, ...]) -> tuple[Searched, ...]:
    """Give bounds of a Spec as the kernels take them."""
    labels, rules = [criterion.label for criterion in spec.criteria], rules_of(spec)
    return tuple(
        Searched(
            -1 if place.label == WEIGHT else labels.index(place.label),
            place.side == "upper",
            READS[type(rules[place])][0],
        )
        for place in places
    )


@lru_cache(maxsize=256)
def recipe_of(
    spec: Spec,
    places: tuple[Place, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    extras: tuple[torch.dtype | None, ...],
    per_sequence: bool,
    mass_of_rollout: bool,
) -> CountRecipe:
    """Make the recipe for some bounds of a Spec; the other arguments are those of `correct.recipe.recipe_of`."""
    del extras
    train, rollout, mask, offsets, advantages, log_mass = dtypes
    assert train is not None and rollout is not None
    kind = torch.promote_types(torch.promote_types(train, rollout), torch.float32)
    plan = plan_of(
        spec,
        double=kind == torch.float64,
        packed=offsets is not None,
        masked=mask is not None,
        advantages=None if advantages is None else ("sequence" if per_sequence else "token"),
        writes_weights=False,
        writes_mask=False,
        edits_mask=False,
        mass=None if log_mass is None else ("rollout" if mass_of_rollout else "train"),
    )
    searches, rules = searched_for(spec, places), rules_of(spec)
    missing = {
        "mask": mask is None,
        "log_mass": log_mass is None,
        "advantages": plan.advantages is None,
        "offsets": offsets is None,
        "scales": all(one.sums != "weights" for one in searches),
    }
    held = [name for name in TENSORS if not missing.get(name)]
    names = Names(held, (), (*names_of_strides(STRIDED), "externals", *SIZES, "shift", "digits", "copies", *CONSTANTS))
    absent = dict.fromkeys([name for name in TENSORS if name not in names.places], "nothing")
    return CountRecipe(
        site=Site(count_kernel, names, absent),
        plan=plan,
        constants=(plan, searches, None),
        searches=searches,
        upload=upload_of(spec, plan.double, device),
        settings=Upload(tuple([READS[type(rule)][1](rule, spec) for rule in map(rules.__getitem__, places)]), device),
    )


def count(given: Given, spec: Spec, one: Round) -> dict[Place, Tensor]:
    """Count tokens for a round: of each bound a table, [1 or 3, digits] int64."""
    with current(given.train):
        tables, launch = prepare_count(given, spec, one)
        launch.run()
    of_bounds = tables.sum(0).split([search.rows for search in _searches(launch)])
    return dict(zip(one.places, of_bounds, strict=True))


def _searches(launch: Launch) -> tuple[Searched, ...]:
    found: tuple[Searched, ...] = launch.arguments["SEARCHES"]
    return found


def prepare_count(given: Given, spec: Spec, one: Round) -> tuple[Tensor, Launch]:
    """Allocate the tables, [copies, rows, digits] int64, and give the launch that adds to them."""
    train, rollout, mask, offsets, log_mass = given.train, given.rollout, given.mask, given.offsets, given.log_mass
    extras = () if not given.externals and given.new is None else contiguous_extras(given)
    recipe = recipe_of(
        spec,
        one.places,
        train.device,
        dtypes_of((train, rollout, mask, offsets, given.advantages, log_mass)),
        dtypes_of(extras),
        given.per_sequence,
        given.mass_of_rollout,
    )
    strided = (train, rollout) if mask is None else (train, rollout, mask)
    sequences, width = train.shape if offsets is None else (offsets.shape[0] - 1, None)
    grid = grid_for(sequences, width, strided, min(train.element_size(), rollout.element_size()), recipe.plan.double)
    digits = 1 << one.bits
    # The more digits there are, the fewer programs wait for one.
    copies = max(1, COPIES.value * 2048 // digits) if one.bits > 11 else COPIES.value
    tables = torch.zeros((copies, rows_of(recipe.searches), digits), dtype=torch.int64, device=train.device)
    firsts = torch.stack(one.found)
    # Before the first round nothing is found.
    firsts = firsts << one.below if one.below < 64 else firsts
    advantages = given.advantages.contiguous() if recipe.plan.advantages and given.advantages is not None else None
    every = (
        train, rollout, mask, None if log_mass is None else log_mass.contiguous(), advantages, offsets,
        recipe.upload.read(), recipe.settings.read(), firsts, one.scales, tables,
    )  # fmt: skip
    tensors = tuple([x for x in every if x is not None])
    addresses = addresses_of(tensors)
    operands = Operands(
        values=(
            *addresses, *strides_of((train, rollout, mask), grid), extras, *sizes_of(grid), one.below - one.bits,
            digits, copies, *recipe.constants,
        ),
        tensors=tensors,
        workspace=NOTHING,
        key=(grid.cut, alignment_of((*addresses, *addresses_of(extras)), (*tensors, *extras))),
        device=train.device,
    )  # fmt: skip
    return tables, Launch(recipe.site, grid.token_programs, grid.cut.warp, operands)
