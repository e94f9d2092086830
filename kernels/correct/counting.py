"""Launch a round of the search for bounds of tokens: one launch, whatever the number of tokens and of bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.correct.count import count_kernel, rows_of
from rollout_corr.kernels.correct.launch import Given, contiguous_extras
from rollout_corr.kernels.correct.measures import COPIES
from rollout_corr.kernels.correct.numbers import numbers_of
from rollout_corr.kernels.correct.plan import Plan, Searched
from rollout_corr.kernels.correct.recipe import STRIDED, Wanted, kind_and_plan
from rollout_corr.kernels.grid import SIZES, current, grid_for, sizes_of, strides_of
from rollout_corr.kernels.launches import NOTHING, Launch, Names, Site, dtypes_of
from rollout_corr.kernels.uploads import Upload, upload_of
from rollout_corr.spec.bounds_of_batch import WEIGHT, Bottom, KeepESS, MeanBelow, OfBatch, Place, Quantile, TopK
from rollout_corr.spec.caches import cached
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
        names: Names what the kernel takes: `prepare_count` lists the tensors in the same order.
        site: The kernel.
        plan: The plan of the Spec.
        searches: The bounds.
        upload: The thresholds of the Spec.
        settings: Of each rule the number that it reads: the unit of amounts, the least logarithm of a weight.
    """

    names: Names
    site: Site
    plan: Plan
    searches: tuple[Searched, ...]
    upload: Upload
    settings: Upload


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


@cached(maxsize=256)
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
    _, plan = kind_and_plan(spec, dtypes, per_sequence, mass_of_rollout, Wanted(False, False, False))
    searches, rules = searched_for(spec, places), rules_of(spec)
    _, _, mask, offsets, _, log_mass = dtypes
    tensors: dict[str, object] = {"train_logp": True, "rollout_logp": True, "mask": mask, "log_mass": log_mass}
    tensors |= {"advantages": plan.advantages, "offsets": offsets, "numbers": True, "settings": True, "firsts": True}
    tensors |= {"scales": any(one.sums == "weights" for one in searches), "tables": True}
    names = Names(tensors, (), STRIDED, (*SIZES, "shift", "digits", "copies", "PLAN", "SEARCHES"))
    return CountRecipe(
        names=names,
        site=Site(count_kernel, names),
        plan=plan,
        searches=searches,
        upload=upload_of(tuple(numbers_of(spec, plan.double).values()), device),
        settings=upload_of(tuple([READS[type(rules[place])][1](rules[place], spec) for place in places]), device),
    )


def count(given: Given, spec: Spec, one: Round) -> dict[Place, Tensor]:
    """Count tokens for a round: of each bound a table, [1 or 3, digits] int64."""
    with current(given.train):
        tables, launch = prepare_count(given, spec, one)
        launch.run()
    of_bounds = tables.sum(0).split([search.rows for search in searched_for(spec, one.places)])
    return dict(zip(one.places, of_bounds, strict=True))


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
    tensors = (
        train, rollout, mask, None if log_mass is None else log_mass.contiguous(), advantages, offsets,
        recipe.upload.read(), recipe.settings.read(), firsts, one.scales, tables,
    )  # fmt: skip
    others = *sizes_of(grid), one.below - one.bits, digits, copies, recipe.plan, recipe.searches
    strides = strides_of((train, rollout, mask), grid)
    operands = recipe.names.operands(tensors, NOTHING, strides, extras, others, grid.cut, train.device)
    return tables, Launch(recipe.site, grid.token_programs, grid.cut.warp, operands)
