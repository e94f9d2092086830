"""`correct` on Triton: three launches, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves per-slot sums, `judge` turns them into verdicts and weights of sequences,
`apply` brings those to the tokens and adds the statistics up. Only stream order hands anything over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rollout_corr.definition.histogram import HISTOGRAM_BINS
from rollout_corr.kernels.correct.apply import apply_kernel
from rollout_corr.kernels.correct.judge import judge_kernel
from rollout_corr.kernels.correct.measures import COPIES
from rollout_corr.kernels.correct.numbers import numbers_of
from rollout_corr.kernels.correct.plan import plan_of
from rollout_corr.kernels.correct.read import read_kernel
from rollout_corr.kernels.gather import gather_kernel
from rollout_corr.kernels.grid import Launch, as_bytes, current, cut_of, on_device, strides_of
from rollout_corr.spec.correction import Spec


@dataclass
class Given:
    """A batch as the kernels take it: [N] with offsets, or [B, T] without. No mask of zeros and ones is needed."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    advantages: Tensor | None
    per_sequence: bool
    externals: Sequence[Tensor]
    new: Tensor | None = None  # of the policy that trains, for criteria that compare it


@dataclass
class BySequence:
    """What the slots left behind, added up by sequence: [columns, S], of a packed batch [columns, 1 + S + 1].

    The first and the last column of a packed batch are what belongs to no sequence.
    """

    counts: Tensor  # int64
    integers: Tensor | None  # int64
    floats: Tensor  # float64
    peaks: Tensor | None  # int32 or int64: floats as integers of the same order


@dataclass
class Found:
    """What the kernels give back."""

    weights: Tensor | None
    mask: Tensor | None
    keep: Tensor
    statistics: Tensor  # float64, the sums and then the maxima
    tables: BySequence | None = None


@lru_cache(maxsize=256)
def _numbers(spec: Spec, double: bool, device: torch.device) -> Tensor:
    """The thresholds on the device; copied once, and again only when one changes."""
    return on_device(tuple(numbers_of(spec, double).values()), device)


def run(given: Given, spec: Spec, writes_weights: bool, writes_mask: bool, edits_mask: bool) -> Found:
    """Run the kernels on tensors that `layout.read_batch` has checked.

    Args:
        given: The batch.
        spec: What to do.
        writes_weights: Weights are handed back.
        writes_mask: A new mask is handed back.
        edits_mask: It lacks what was rejected.
    """
    with current(given.train.device):
        found, launches = prepare(given, spec, writes_weights, writes_mask, edits_mask)
        for launch in launches:
            launch.run()
    return found


def prepare(
    given: Given, spec: Spec, writes_weights: bool, writes_mask: bool, edits_mask: bool, split: bool = False
) -> tuple[Found, tuple[Launch, ...]]:
    """Allocate everything and say what has to be launched, from metadata alone; see `run`.

    With `split` there is a launch more, the second, which leaves `Found.tables`: what ranks that hold parts of
    sequences have to add up before the third.
    """
    train, device, packed = given.train, given.train.device, given.offsets is not None
    kind = torch.promote_types(torch.promote_types(train.dtype, given.rollout.dtype), torch.float32)
    plan = plan_of(
        spec,
        double=kind == torch.float64,
        packed=packed,
        masked=given.mask is not None,
        advantages=None if given.advantages is None else ("sequence" if given.per_sequence else "token"),
        writes_weights=writes_weights,
        writes_mask=writes_mask,
        edits_mask=edits_mask,
    )
    mask = as_bytes(given.mask)
    lines = [x for x in (train, given.rollout, mask) if x is not None]
    cut = cut_of(train, given.offsets, lines, min(train.element_size(), given.rollout.element_size()), plan.halvings)
    shape, sequences, slots, readers, judges = cut.shape, cut.sequences, cut.slots, cut.readers, cut.judges

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    weights = empty(*train.shape, dtype=kind) if writes_weights else None
    mask_out = None
    if writes_mask:
        mask_out = empty(*train.shape, dtype=torch.bool if given.mask is None else given.mask.dtype)
    keep = empty(sequences, dtype=torch.bool)
    counts = empty(len(plan.counts), slots, dtype=torch.int32)
    integers = empty(len(plan.integers), slots, dtype=torch.int64) if plan.integers else None
    floats = empty(len(plan.floats), slots, dtype=kind)
    keys = torch.int64 if plan.double else torch.int32
    peaks = empty(len(plan.peaks), slots, dtype=keys) if plan.peaks else None
    # Four allocations and not slices of one: how a pointer is aligned is part of a compile key, and must not hang on
    # the number of programs.
    token_sums = empty(len(plan.token_sums), readers, dtype=torch.float64)
    token_maxima = empty(len(plan.token_maxima) - plan.derived, readers, dtype=torch.float64)
    sequence_sums = empty(len(plan.sequence_sums), judges, dtype=torch.float64)
    sequence_maxima = empty(len(plan.sequence_maxima), judges, dtype=torch.float64)
    bins = HISTOGRAM_BINS if plan.full else 0
    histogram = torch.zeros(COPIES.value * bins, dtype=torch.int64, device=device) if plan.full else None
    columns = plan.token_sums, plan.sequence_sums, plan.call_sums, plan.token_maxima, plan.sequence_maxima
    finishers = sum(map(len, columns)) + bins
    statistics = empty(finishers + len(plan.call_maxima), dtype=torch.float64)
    owners = empty(slots, dtype=torch.int32) if packed and plan.applies else None
    states = empty(sequences, dtype=torch.int32) if plan.applies else None
    sequence_weights = empty(sequences, dtype=kind) if plan.spreads else None

    strides = [stride for x in (train, given.rollout, mask) for stride in strides_of(x, packed)]
    extents = (cut.tokens, sequences, cut.width, cut.tiles)
    offsets, numbers = given.offsets, _numbers(spec, plan.double, device)
    advantages = given.advantages.contiguous() if plan.advantages and given.advantages is not None else None
    # Read like one more external tensor.
    new = () if given.new is None else (given.new,)
    externals = tuple(x.contiguous() for x in (*given.externals, *new))
    mask_bytes, keep_bytes = as_bytes(mask_out), as_bytes(keep)
    read = (
        train, given.rollout, mask, advantages, externals, offsets, numbers,
        weights, mask_bytes, owners, counts, integers, floats, peaks, token_sums, token_maxima, histogram,
        *extents, cut.steps, *strides,
    )  # fmt: skip
    slotted, of_slots = (counts, integers, floats, peaks), (cut.tokens, sequences, cut.tiles, slots)
    judged, judged_offsets, of_judged = slotted, offsets, of_slots
    tables, many = None, sequences + 2 * packed
    if split:
        tables = BySequence(
            empty(len(plan.counts), many, dtype=torch.int64),
            empty(len(plan.integers), many, dtype=torch.int64) if plan.integers else None,
            empty(len(plan.floats), many, dtype=torch.float64),
            empty(len(plan.peaks), many, dtype=keys) if plan.peaks else None,
        )
        # To `judge` a batch without tokens, whose every sequence has one slot.
        judged = (tables.counts, tables.integers, tables.floats, tables.peaks)
        judged_offsets, of_judged = None if offsets is None else torch.zeros_like(offsets), (0, sequences, 1, many)
    judge = (
        numbers, advantages if plan.advantages == "sequence" else None, judged_offsets, *judged,
        keep_bytes, states, sequence_weights, sequence_sums, sequence_maxima, *of_judged,
    )  # fmt: skip
    spreaders = readers if plan.applies else 0
    apply = (
        train, given.rollout, mask, advantages, offsets, numbers, owners, states, sequence_weights, weights, mask_bytes,
        token_sums, sequence_sums, histogram, token_maxima, sequence_maxima, statistics,
        *extents, *strides, spreaders, readers, judges,
    )  # fmt: skip
    threads = 32 * shape.warps
    of_read = {"PLAN": plan, **cut.constants, "UNIT": cut.unit}
    of_judge = {"PLAN": plan, "SEQUENCES": shape.sequences, "CHUNK": shape.chunk, "TILE": shape.tile}
    of_apply = {name: x for name, x in of_read.items() if name != "LANES"} | {"CHUNK": 256}
    gather = Launch(gather_kernel, judges, (*slotted, *judged, offsets, *of_slots, many), of_judge, 128)
    return Found(weights, mask_out, keep, statistics, tables), (
        Launch(read_kernel, readers, read, of_read, threads),
        *([gather] if split else []),
        Launch(judge_kernel, judges, judge, of_judge, 128),
        Launch(apply_kernel, spreaders + finishers, apply, of_apply, threads),
    )
