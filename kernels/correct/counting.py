"""Launch a round of the search for bounds of tokens: one launch, whatever the number of tokens and of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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
from rollout_corr.spec.bounds_of_batch import WEIGHT, MeanBelow, Place
from rollout_corr.spec.correction import Spec, rules_of


class Round(NamedTuple):
    """A round of some searches whose digits are the same.

    Attributes:
        places: Of the bounds.
        found: Of each, 0-d int64, the digits found.
        below: Bits behind these.
        bits: Of the next digit.
    """

    places: tuple[Place, ...]
    found: tuple[Tensor, ...]
    below: int
    bits: int


@dataclass(eq=False)
class CountRecipe:
    """Everything about rounds that share a Spec, bounds, dtypes and a device.

    Attributes:
        site: The kernel.
        plan: The plan of the Spec.
        constants: Values of `CONSTANTS`.
        searches: The bounds.
        upload: The thresholds of the Spec.
        units: Of the amounts that each rule adds up.
    """

    site: Site
    plan: Plan
    constants: tuple[object, ...]
    searches: tuple[Searched, ...]
    upload: Upload
    units: Upload


TENSORS = (
    *("train_logp", "rollout_logp", "mask", "log_mass", "advantages", "offsets", "numbers"),
    *("units", "firsts", "tables"),
)
CONSTANTS = ("PLAN", "SEARCHES", "nothing")


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
    labels, rules = [criterion.label for criterion in spec.criteria], rules_of(spec)
    # What rules add up they add up in units.
    units = [rule.below if isinstance(rule := rules[place], MeanBelow) else None for place in places]
    searches = tuple(
        Searched(-1 if place.label == WEIGHT else labels.index(place.label), place.side == "upper", unit is not None)
        for place, unit in zip(places, units, strict=True)
    )
    missing = {
        "mask": mask is None,
        "log_mass": log_mass is None,
        "advantages": plan.advantages is None,
        "offsets": offsets is None,
    }
    held = [name for name in TENSORS if not missing.get(name)]
    names = Names(held, (), (*names_of_strides(STRIDED), "externals", *SIZES, "shift", "digits", *CONSTANTS))
    absent = dict.fromkeys([name for name in TENSORS if name not in names.places], "nothing")
    return CountRecipe(
        site=Site(count_kernel, names, absent),
        plan=plan,
        constants=(plan, searches, None),
        searches=searches,
        upload=upload_of(spec, plan.double, device),
        units=Upload(tuple([1.0 if unit is None else unit for unit in units]), device),
    )


def count(given: Given, spec: Spec, one: Round) -> dict[Place, Tensor]:
    """Count tokens for a round: of each bound a table, [1 or 3, digits] int64."""
    with current(given.train):
        tables, launch = prepare_count(given, spec, one)
        launch.run()
    of_bounds = tables.sum(0).split([3 if search.sums else 1 for search in _searches(launch)])
    return dict(zip(one.places, of_bounds, strict=True))


def _searches(launch: Launch) -> tuple[Searched, ...]:
    found: tuple[Searched, ...] = launch.arguments["SEARCHES"]
    return found


def prepare_count(given: Given, spec: Spec, one: Round) -> tuple[Tensor, Launch]:
    """Allocate the tables, [COPIES, rows, digits] int64, and give the launch that adds to them."""
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
    tables = torch.zeros((COPIES.value, rows_of(recipe.searches), digits), dtype=torch.int64, device=train.device)
    firsts = torch.stack(one.found)
    # Before the first round nothing is found, and no shift is as wide as a key.
    firsts = firsts << one.below if one.below < (64 if recipe.plan.double else 32) else firsts
    advantages = given.advantages.contiguous() if recipe.plan.advantages and given.advantages is not None else None
    every = (
        train, rollout, mask, None if log_mass is None else log_mass.contiguous(), advantages, offsets,
        recipe.upload.read(), recipe.units.read(), firsts, tables,
    )  # fmt: skip
    tensors = tuple([x for x in every if x is not None])
    addresses = addresses_of(tensors)
    operands = Operands(
        values=(
            *addresses, *strides_of((train, rollout, mask), grid), extras, *sizes_of(grid), one.below - one.bits,
            digits, *recipe.constants,
        ),
        tensors=tensors,
        workspace=NOTHING,
        key=(grid.cut, alignment_of((*addresses, *addresses_of(extras)), (*tensors, *extras))),
        device=train.device,
    )  # fmt: skip
    return tables, Launch(recipe.site, grid.token_programs, grid.cut.warp, operands)
