"""Launch `policy_loss` on Triton: two launches for value, statistics and gradient; one more in backward.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.kernels.by_turns import by_turns
from rollout_corr.kernels.grid import SEQUENCE_THREADS, Grid, current, grid_for, of_units, sizes_of, strides_of
from rollout_corr.kernels.launches import Launch, Sized, Workspace, dtypes_of
from rollout_corr.kernels.policy_loss.recipe import PER_TOKEN, STRIDED, LossRecipe, recipe_of
from rollout_corr.spec.caches import cached
from rollout_corr.spec.loss import Objective


@dataclass
class LossGiven:
    """A batch as the kernels take it: per-token tensors are [N] with offsets, or [B, T] without.

    Attributes:
        new: new_logp.
        base: The log-probs that it is compared with.
        ref: Log-probs of the reference policy.
        advantages: Per token, or [S].
        per_sequence: True if advantages are [S].
        weights: Factors of the loss.
        trains: Non-zero at tokens that train.
        mask: Non-zero at valid tokens.
        offsets: [S + 1] int32 or int64, of a packed batch.
        divisor: 0-d float64, where the caller has counted.
        scales: Per token, factors of all that it adds to the loss.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_base: True if it is taken from the base, and not from new_logp.
        double: float64 computes.
        looked: Per token, non-zero where the look at the batch chose it.
        turns: [U + 1] int32 or int64, offsets of turns among the tokens, for a surrogate of turns.
    """

    new: Tensor
    base: Tensor | None
    ref: Tensor | None
    advantages: Tensor
    per_sequence: bool
    weights: Tensor | None
    trains: Tensor | None
    mask: Tensor | None
    offsets: Tensor | None
    divisor: Tensor | None
    scales: Tensor | None = None
    log_mass: Tensor | None = None
    mass_of_base: bool = False
    double: bool = False
    turns: Tensor | None = None
    looked: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of `recipe.TENSORS`; the first may lie in memory anyhow, see `STRIDED`."""
        return (
            self.new, self.base, self.ref, self.weights, self.trains, self.mask,
            self.advantages, self.offsets, self.divisor, self.log_mass, self.scales, self.looked,
        )  # fmt: skip


@dataclass
class LossFound:
    """The results of the kernels."""

    value: Tensor
    gradient: Tensor | None  # of the value times its divisor, and times its length where a sequence is averaged
    inners: Tensor | None  # [S], the factor of each sequence's gradient; [U] of each turn's, where turns are given
    divisor: Tensor
    statistics: Tensor  # float64, the sums and then the maxima


def run(given: LossGiven, objective: Objective, differentiable: bool) -> LossFound:
    """Run the kernels on tensors that `policy_loss` has checked.

    Args:
        given: The batch.
        objective: Everything that is fixed about the loss.
        differentiable: The gradient is handed back.
    """
    with current(given.new):
        found, launches = prepare(given, objective, differentiable)
        for launch in launches:
            launch.run()
    return found


def prepare(given: LossGiven, objective: Objective, differentiable: bool) -> tuple[LossFound, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone; see `run`."""
    shape, device, turns, within = given.new.shape, given.new.device, given.turns, None
    if turns is not None:
        given, within = by_turns(given, turns, given.new, PER_TOKEN)
    new, base, offsets, tensors = given.new, given.base, given.offsets, given.tensors
    recipe = recipe_of(
        objective,
        device,
        dtypes_of(tensors),
        given.double,
        given.per_sequence,
        given.mass_of_base,
        differentiable,
        turns is not None,
    )
    element = new.element_size() if base is None else min(new.element_size(), base.element_size())
    sequences, width = new.shape if offsets is None else (offsets.shape[0] - 1, None)
    strided = tensors[: len(STRIDED)]
    alone = recipe.constants[0].phase == "whole"
    grid = grid_for(sequences, width, recipe.strided(strided), element, given.double, alone)
    if within is not None:
        grid = of_units(grid, within.shape[0] - 1, beside=True)
    gradient = torch.empty(*shape, dtype=recipe.kind, device=device) if differentiable else None
    inners = torch.empty(grid.sequences, dtype=recipe.kind, device=device) if recipe.averages else None
    value = torch.empty((), dtype=recipe.kind, device=device)
    divisor = torch.empty((), dtype=torch.float64, device=device)
    statistics = torch.empty(recipe.statistics, dtype=torch.float64, device=device)
    workspace = Workspace(recipe.scratch, grid.counted, device)
    log_mass = None if given.log_mass is None else given.log_mass.contiguous()
    scales = None if given.scales is None else given.scales.contiguous()
    looked = None if given.looked is None else given.looked.contiguous()
    tensors = (
        *strided, given.advantages.contiguous(), offsets, given.divisor, log_mass, scales, looked,
        recipe.upload.read(), gradient, inners, value, divisor, statistics, within,
    )  # fmt: skip
    sized = _sized(recipe, grid)
    operands = recipe.names.operands(tensors, workspace, strides_of(strided, grid), (), sized.values, grid.cut, device)
    return LossFound(value, gradient, inners, divisor, statistics), sized.on(operands)


@cached(maxsize=1024)
def _sized(recipe: LossRecipe, grid: Grid) -> Sized:
    """List the launches of a recipe on batches of a size."""
    launches = []
    for site, over_tokens, over_sequences, adding in recipe.passes:
        if over_tokens:
            launches.append((site, grid.token_programs, grid.cut.warp))
        else:
            programs = grid.parts * adding + (grid.sequence_programs if over_sequences else 0)
            launches.append((site, programs, SEQUENCE_THREADS))
    return Sized((*sizes_of(grid), *recipe.constants), tuple(launches))
