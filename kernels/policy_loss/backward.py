"""Launch the backward of `policy_loss` on Triton: the gradient is there already, and is scaled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.grid import SIZES, current, grid_for, sizes_of
from rollout_corr.kernels.launches import NOTHING, Launch, Names, Site, dtypes_of
from rollout_corr.kernels.policy_loss.gradient import scale_kernel
from rollout_corr.kernels.policy_loss.plan import Scaling
from rollout_corr.spec.caches import cached


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
    names, site, plan = _recipe_of_scaling(device, dtypes_of(tensors))
    operands = names.operands(tensors, NOTHING, (), (), (*sizes_of(grid), plan), grid.cut, device)
    return scaled, Launch(site, grid.token_programs, grid.cut.warp, operands)


@cached(maxsize=256)
def _recipe_of_scaling(device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> tuple[Names, Site, Scaling]:
    """Name the tensors, and make the site and the plan, of launches that share dtypes and a device."""
    del device  # all launches of a site share it
    tensors = dict(zip(("gradient", "inners", "upstream", "divisor", "offsets", "scaled"), dtypes, strict=True))
    names = Names(tensors, (), (), (*SIZES, "PLAN"))
    plan = Scaling(packed=tensors["offsets"] is not None, averages=tensors["inners"] is not None)
    return names, Site(scale_kernel, names), plan
