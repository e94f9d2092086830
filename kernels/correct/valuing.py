"""Launch what gives the values of sequences for which the batch decides bounds: `read`, and a kernel behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.kernels.correct.counting import searched_for
from rollout_corr.kernels.correct.launch import Given, prepare
from rollout_corr.kernels.correct.plan import Searched
from rollout_corr.kernels.correct.recipe import BY_OWNER
from rollout_corr.kernels.correct.values import values_kernel
from rollout_corr.kernels.grid import SEQUENCE_THREADS, current
from rollout_corr.kernels.launches import NOTHING, Launch, Names, Site
from rollout_corr.spec.bounds_of_batch import Place
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec

TENSORS = ("numbers", "advantages", "offsets", *BY_OWNER)
SIZES = ("tokens", "sequences", "width", "tiles", "tile_bits", "slots")


@cached(maxsize=256)
def site_of(spec: Spec, searches: tuple[Searched, ...], there: tuple[bool, ...], of: Site) -> tuple[Names, Site]:
    """Name what the kernel takes, and make its site, behind that of `decide`, which tells dtypes apart."""
    tensors = dict(zip(TENSORS, there, strict=True)) | {"values": True, "chosen": True}
    names = Names(tensors, (), (), (*SIZES, "PLAN", "SHAPE", "SEARCHES"))
    return names, Site(values_kernel, names)


def values(given: Given, spec: Spec, places: tuple[Place, ...]) -> dict[Place, tuple[Tensor, Tensor]]:
    """Give of each bound the values of all sequences, [S] float64, and which of them decide it, [S] bool."""
    with current(given.train):
        found, chosen, launches = prepare_values(given, spec, places)
        for launch in launches:
            launch.run()
    return dict(zip(places, zip(found, chosen, strict=True), strict=True))


def prepare_values(given: Given, spec: Spec, places: tuple[Place, ...]) -> tuple[Tensor, Tensor, tuple[Launch, ...]]:
    """Allocate the values, [K, S] float64, and which of them decide, [K, S] bool, and list the two launches."""
    # The very kernel that runs when bounds are known: in float64, where sums are plain, another had other bits.
    read, decide, *_ = prepare(given, spec)[1]
    named, searches = decide.arguments, searched_for(spec, places)
    count, device = int(named["sequences"]), given.train.device
    found = torch.empty((len(places), count), dtype=torch.float64, device=device)
    chosen = torch.empty((len(places), count), dtype=torch.bool, device=device)
    given_to = [named[name] for name in TENSORS]
    names, site = site_of(spec, searches, tuple([x is not None for x in given_to]), decide.site)
    others = *(named[name] for name in SIZES), named["PLAN"], named["SHAPE"], searches
    operands = names.operands((*given_to, found, chosen), NOTHING, (), (), others, read.operands.key, device)
    owners = count + 2 if named["PLAN"].packed else count
    programs = max(1, -(-owners // named["SHAPE"].sequences))
    # The tables lie in the workspace of `read`, which lives as long as its launch.
    return found, chosen, (read, Launch(site, programs, SEQUENCE_THREADS, operands))
