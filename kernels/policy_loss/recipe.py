"""The recipe of calls of `policy_loss`: everything about them that no size and no address affects.

A pass over the tokens writes the gradient before it is divided, a pass over the sequences counts, and its last program
finishes. GSPO and GMPO, whose gradient depends on whole sequences, pass over both twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.grid import SIZES
from rollout_corr.kernels.launches import Field, Names, Site, WorkspaceLayout, picker
from rollout_corr.kernels.partials import groups
from rollout_corr.kernels.policy_loss.gradient import gradient_kernel
from rollout_corr.kernels.policy_loss.plan import LossPlan, numbers_of, plans_of
from rollout_corr.kernels.policy_loss.sequences import sequences_kernel
from rollout_corr.kernels.uploads import Upload, upload_of
from rollout_corr.spec.caches import cached
from rollout_corr.spec.loss import Objective


class Pass(NamedTuple):
    """A launch of a loss.

    Attributes:
        site: The kernel.
        over_tokens: Its programs pass over tokens.
        over_sequences: Its programs pass over sequences.
        groups: Of the columns that programs behind those add up.
    """

    site: Site
    over_tokens: bool = False
    over_sequences: bool = False
    groups: int = 0


@dataclass(eq=False)
class LossRecipe:
    """Everything about calls that share an objective, dtypes and a device, whatever their sizes and addresses.

    Attributes:
        kind: The dtype that computes.
        averages: Sequences are averaged, so their gradients have factors.
        scratch: The tables.
        names: Names what launches take: the tensors are `LossGiven.tensors`, the numbers, and what is handed back.
        strided: Picks from all tensors that may lie in memory anyhow those that there are.
        passes: Over tokens and over sequences, and where there is a further pass over tokens both again.
        upload: The numbers of the objective.
        statistics: How many.
        constants: The plan of each pass over the tokens.
    """

    kind: torch.dtype
    averages: bool
    scratch: WorkspaceLayout
    names: Names
    strided: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    passes: tuple[Pass, ...]
    upload: Upload
    statistics: int
    constants: tuple[LossPlan, ...]


# The tensors of a batch.
TENSORS = (
    *("new_logp", "base_logp", "ref_logp", "weights", "trains", "mask", "advantages", "offsets", "given", "log_mass"),
    *("scales", "looked"),
)
PER_TOKEN = ("new", "base", "ref", "weights", "trains", "mask", "log_mass", "scales", "looked")
STRIDED = ("new", "base", "ref", "weights", "trains", "mask")


@cached(maxsize=256)
def recipe_of(
    objective: Objective,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    double: bool,
    per_sequence: bool,
    mass_of_base: bool,
    differentiable: bool,
    turns: bool,
) -> LossRecipe:
    """Make the recipe for an objective and the dtypes of `LossGiven.tensors`, by which every argument has its type."""
    _, base, ref, weights, trains, mask, _, offsets, divisor, log_mass, scales, looked = dtypes
    kind = torch.float64 if double else torch.float32
    plans = plans_of(
        objective,
        counted=divisor is None,
        double=double,
        packed=offsets is not None,
        based=base is not None,
        weighted=weights is not None,
        referred=ref is not None,
        trained=trains is not None,
        masked=mask is not None,
        advantages="sequence" if per_sequence else "token",
        differentiable=differentiable,
        mass=None if log_mass is None else ("rollout" if mass_of_base else "train"),
        has_scales=scales is not None,
        looked=looked is not None,
        turns=turns,
    )
    last = plans[-1]
    scratch = _scratch_of(plans, kind)
    tensors: dict[str, object] = dict(zip(TENSORS, dtypes, strict=True))
    tensors |= {"numbers": True, "gradient": differentiable, "inners": last.averages and last.writes}
    tensors |= dict.fromkeys(("value", "divisor", "statistics"), last.writes)
    tensors |= {"within": turns}
    plan_names = [f"PLAN {number}" for number in range(len(plans))]
    names = Names(tensors, scratch.names, STRIDED, (*SIZES, *plan_names))
    passes = []
    for plan, name in zip(plans, plan_names, strict=True):
        unused = [
            *OF_SEQUENCES[plan.phase],
            *(() if plan.adds_up else OF_SLOTS),
            *(() if plan.writes else OF_LAST_PASS),
        ]
        over_tokens = Site(gradient_kernel, names, {"PLAN": name} | dict.fromkeys(unused, "nothing"))
        over_sequences = Site(sequences_kernel, names, {"PLAN": name})
        passes.append(Pass(over_tokens, over_tokens=True))
        adding = groups(plan) if plan.writes else 0
        passes.append(Pass(over_sequences, over_sequences=plan.adds_up, groups=adding))
    return LossRecipe(
        kind=kind,
        averages=last.averages,
        scratch=scratch,
        names=names,
        strided=picker([place for place, x in enumerate(dtypes[: len(STRIDED)]) if x]),
        passes=tuple(passes),
        upload=upload_of(tuple(numbers_of(objective, double).values()), device),
        statistics=len(last.sums) + len(last.maxima),
        constants=plans,
    )


# Parameters of `gradient_kernel` that only some of the passes over the tokens look at. Another pass gets None: their
# dtype and alignment would be part of its compile key. Those that a phase does not read of sequences:
OF_SEQUENCES = {
    "sum": ("levels", "pulls", "inners"),
    "write": (),
    "whole": ("inners",),
}
OF_SLOTS = ("counts", "integers", "floats")
OF_LAST_PASS = ("gradient", "token_sums", "token_maxima")


def _scratch_of(plans: tuple[LossPlan, ...], kind: torch.dtype) -> WorkspaceLayout:
    """List the tables of a loss: [columns, slots], [columns, programs] of programs over tokens.

    Those of programs over sequences and of parts are [rows, columns] to the kernels. The counter is the first of its
    table.
    """

    def tables(*named: tuple[str, tuple[str, ...], torch.dtype]) -> list[Field]:
        return [Field(name, len(columns), dtype) for name, columns, dtype in named if columns]

    first, last = plans[0], plans[-1]
    # Passes use them one after the other, and some need more columns.
    integers, floats = (max((getattr(plan, name) for plan in plans), key=len) for name in ("integers", "floats"))
    of_sequences = ("levels", last.levels), ("pulls", last.pulls)
    return WorkspaceLayout(
        tables(("counts", first.counts, torch.int32), ("integers", integers, torch.int64), ("floats", floats, kind)),
        tables(("token_sums", last.token_sums, torch.float64), ("token_maxima", last.token_maxima, torch.float64)),
        [*tables(("sequence_sums", first.sequence_sums, torch.float64)), Field("counter", None, torch.int32)],
        [Field(name, None, kind) for name, wanted in of_sequences if wanted],
        tables(("part_sums", last.token_sums, torch.float64), ("part_maxima", last.token_maxima, torch.float64)),
    )
