"""Launch the backward of `policy_loss` on Triton: the gradient is there already, and is scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.grid import SIZES, current, grid_for, sizes_of
from rollout_corr.kernels.launches import (
    NOTHING,
    Launch,
    Names,
    Operands,
    Site,
    addresses_of,
    alignment_of,
    dtypes_of,
    picker,
)
from rollout_corr.kernels.policy_loss.gradient import scale_kernel
from rollout_corr.kernels.policy_loss.plan import Scaling


class Slope(NamedTuple):
    """The operands of `scale`."""

    gradient: Tensor  # [N] or [B, T], contiguous
    inners: Tensor | None  # [S] in its dtype; None or empty: sequences do not matter
    upstream: Tensor  # 0-d, any floating dtype, on the device of the gradient
    divisor: Tensor  # 0-d float64
    offsets: Tensor | None  # of a packed batch
    dtype: torch.dtype  # of the result


def scale(slope: Slope) -> Tensor:
    """Scale the gradient, in one launch: gradient * upstream / divisor, times each sequence's inner factor."""
    with current(slope.gradient):
        scaled, launch = prepare_scale(slope)
        launch.run()
    return scaled


def prepare_scale(slope: Slope) -> tuple[Tensor, Launch]:
    """Allocate the result of `scale` and say what has to be launched; see there."""
    gradient, inners, upstream, divisor, offsets, dtype = slope
    device = gradient.device
    if inners is None or not inners.numel():
        # All tokens are one row.
        sequences, width, inners, offsets = 1, gradient.numel(), None, None
    elif offsets is None:
        sequences, width = gradient.shape
    else:
        # The kernel goes on from the address of the first.
        offsets = (offsets if offsets.device == device else offsets.to(device)).contiguous()
        sequences, width = offsets.shape[0] - 1, None
    scaled = torch.empty(*gradient.shape, dtype=dtype, device=device)
    grid = grid_for(sequences, width, (gradient,), min(gradient.element_size(), scaled.element_size()))
    tensors = gradient, inners, upstream, divisor, offsets, scaled
    site, held, constants = _recipe_of_scaling(device, dtypes_of(tensors))
    operands = held(tensors)
    addresses = addresses_of(operands)
    key = grid.cut, alignment_of(addresses, operands)
    call = Operands((*addresses, *sizes_of(grid), *constants), operands, NOTHING, key, device)
    return scaled, Launch(site, grid.token_programs, grid.cut.warp, call)


class ScaleRecipe(NamedTuple):
    """Everything about launches of `scale` that share dtypes and a device."""

    site: Site
    held: Callable[[Sequence[Any]], tuple[Tensor, ...]]  # picks the tensors that there are
    constants: tuple[Scaling, None]


@lru_cache(maxsize=256)
def _recipe_of_scaling(device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> ScaleRecipe:
    del device  # all launches of a site share it
    all_names = ("gradient", "inners", "upstream", "divisor", "offsets", "scaled")
    there = [place for place, dtype in enumerate(dtypes) if dtype is not None]
    names = Names([all_names[place] for place in there], (), (*SIZES, "PLAN", "nothing"))
    absent = dict.fromkeys([name for name in all_names if name not in names.places], "nothing")
    plan = Scaling("offsets" not in absent, "inners" not in absent)
    return ScaleRecipe(Site(scale_kernel, names, absent), picker(there), (plan, None))
