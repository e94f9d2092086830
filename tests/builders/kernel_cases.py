"""Cases of the tests of the kernels: Specs that reach every branch, batches that reach every tile, and the check.

The check runs the kernels between fences: inputs lie in the middle of garbage, and so does what the kernels allocate,
which is garbage itself until they write it. What they read and should not have read shows in their results.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.batches import compare_all, fitted, lay_out, moved, random_sequences, rounded, spoil, wild
from builders.rounding import FORMULA, assert_near, is_near
from builders.same_bits import is_count
from lab.aot.variants import VARIANTS
from oracles import correction as oracle
from rollout_corr.backends import batch as reading
from rollout_corr.kernels import grid, launches
from rollout_corr.kernels.grid import Shape
from rollout_corr.metrics.schema import layout as columns

C, W = rc.Criterion, rc.Weight

# What a file of tests of the kernels needs. The warnings are NumPy's, in whose name the interpreter computes.
INTERPRETED = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:invalid value encountered:RuntimeWarning"
    ),
]

# Tiles so small that a short sequence has many: one slot a program, some, and more; in one part and in several.
NARROW = ((0, Shape(tile=16, lanes=2, sequences=2, chunk=2, parts=1)),)
MIDDLE = ((0, Shape(tile=16, lanes=4, sequences=8, chunk=1)),)
WIDE = ((0, Shape(tile=8, lanes=1, sequences=4, chunk=2, parts=8)),)
# For what hangs on no tile: two programs of each kind for LENGTHS. A program costs the interpreter 50 ms.
FEW = ((0, Shape(tile=16, lanes=4, sequences=4, chunk=2, parts=2)),)
REAL = grid.SHAPES

# Of a tile of 8: one less, one more, several; an empty one, a single one, and one that is all invalid (the third).
# Nothing starts where a tile does; what fills tiles has tests of its own. Every token costs the interpreter 20 ms.
LENGTHS = (7, 1, 9, 0, 17)
# For more sequences on either side of a bound.
MORE = (5, 1, 9, 0, 7, 8, 17, 1, 16, 30)


def over(stat, reduce, **others):
    """A criterion over sequences; where it cuts is fitted to the batch."""
    return C(stat, over="sequence", reduce=reduce, **({"upper": 1.0} | others))


def tokens(stat, **others):
    """A criterion over tokens."""
    return C(stat, **({"upper": 1.0} | others))


BOTH = {"lower": 0.1, "upper": 1.0}
LOWER = {"lower": 0.1, "upper": None}
ENTROPY = {"name": "entropy"}
# For what the Spec does not change: one that weighs tokens and drops them early and late, one that weighs sequences.
TOKENS = rc.Spec(
    W.token(lower=0.8, upper=1.2), (tokens("k1", **BOTH), over("abs", "sum", when="outward", drop="token")), "both"
)
SEQUENCES = rc.Spec(
    W.product(upper=1.5), (over("ratio", "min", **LOWER), over("k2", "sum"), over("external", "mean", **ENTROPY))
)


@contextlib.contextmanager
def shaped(shapes):
    """Cut the work into other tiles, and what programs over tokens leave into several parts."""
    with mock.patch.object(grid, "SHAPES", shapes), mock.patch.object(grid, "LEAST_PART", 3):
        grid.divided.cache_clear()
        yield
    grid.divided.cache_clear()


# Elements before and behind a tensor: more than the largest tile, and a multiple of what an aligned start is.
ROOM = 4096


def fenced(x, device, fence=math.nan):
    """A tensor on a device, in the middle of a larger one; where that has integers, the fence is 1."""
    if x is None or isinstance(x, list) or x.is_nested:
        return moved(x, device)
    x = moved(x, device)
    held = x.untyped_storage().nbytes() // x.element_size()
    around = x.new_full((ROOM + held + ROOM,), fence if x.is_floating_point() else 1)
    around[ROOM : ROOM + held] = x.as_strided((held,), (1,), 0)
    return around.as_strided(x.shape, x.stride(), ROOM + x.storage_offset())


def between_fences(laid, device, fence=math.nan):
    """Copy the arguments of a call, each between fences."""
    place = partial(fenced, device=device, fence=fence)
    names = ("train", "rollout", "mask", "advantages", "log_mass", "cu_seqlens")
    external = None if laid.external is None else {name: place(x) for name, x in laid.external.items()}
    return replace(laid, **{name: place(getattr(laid, name)) for name in names}, external=external)


@contextlib.contextmanager
def shuffled(seed):
    """Have the interpreter run the programs of a launch in an order that the seed decides, as a GPU does in any."""
    from triton.runtime.interpreter import InterpreterBuilder

    place = InterpreterBuilder.set_grid_idx

    @functools.cache
    def order(programs):
        return torch.randperm(programs, generator=torch.Generator().manual_seed(seed)).tolist()

    def placed(builder, x, y, z):
        place(builder, order(builder.grid_dim[0])[x], y, z)

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", placed):
        yield


@contextlib.contextmanager
def watched(filling=0xFF, seed=0):
    """Fill the kernels' allocations with garbage, and check that nothing is written outside of them.

    What is read outside of a tensor, and races, tests/lab/ptx finds in compiled code.

    Args:
        filling: The byte that stands everywhere; of these, 0xFF makes NaN, -1 and a bool of 255.
        seed: Of the order in which the interpreter runs programs.
    """
    empty, handed, lay_out_tables, scratches = torch.empty, [], launches.Scratch.__init__, []

    def laid_out(scratch, *arguments):
        lay_out_tables(scratch, *arguments)
        scratches.append(scratch)

    def between(*size, dtype, device, pin_memory=False):
        if pin_memory:  # the host's, to which no kernel writes
            return empty(*size, dtype=dtype, device=device, pin_memory=True)
        size = size[0] if size and isinstance(size[0], tuple) else size
        held = math.prod(size)
        around = empty(ROOM + held + ROOM, dtype=dtype, device=device)
        bits(around).fill_(filling)
        handed.append((around, held))
        return around[ROOM : ROOM + held].view(size)

    with (
        mock.patch.object(torch, "empty", between),
        mock.patch.object(launches, "GAP", ROOM),
        mock.patch.object(launches.Scratch, "__init__", laid_out),
        shuffled(seed),
    ):
        yield
    for scratch in scratches:
        outside = torch.ones_like(scratch.memory, dtype=torch.bool)
        for name, *_ in scratch.tables:
            table = scratch.tensor(name)
            outside[table.data_ptr() - scratch.memory.data_ptr() :][: table.numel() * table.element_size()] = False
        assert bool((scratch.memory[outside] == filling).all()), "written outside of a table"
    for around, held in handed:
        for fence in (around[:ROOM], around[ROOM + held :]):
            assert bool((bits(fence) == filling).all()), "written outside of a tensor"


@contextlib.contextmanager
def unchecked():
    """Offsets on the CPU go to the kernels as those on a device do: as they are, in their dtype, whatever they say."""
    with mock.patch.object(reading, "checked_offsets", lambda offsets, *_: offsets):
        yield


def check(
    sequences, spec, layout, device, *, dtype=torch.float32, mask_dtype=torch.bool, offsets=None, place=None, **others
):
    """The kernels against the oracle and against the reference: what is exact exactly, the rest within.

    Args:
        dtype: Of the log-probs; two, if they differ.
        mask_dtype: None for a call without a mask.
        offsets: Their dtype as the kernels get them; by default what the layout has.
        place: How log-probs and masks lie in memory, as a function of a tensor.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    computes = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    laid = lay_out(sequences, layout, dtypes[0] if dtypes[0] == dtypes[1] else computes, mask_dtype or torch.bool)
    if dtypes[0] != dtypes[1]:
        laid.train, laid.rollout = laid.train.to(dtypes[0]), laid.rollout.to(dtypes[1])
    laid.others.update(others)
    valid = laid.mask
    if mask_dtype is None:
        laid.mask = None
    expected = oracle.correct(cast(sequences, dtypes, computes), spec)
    reference = laid.correct(spec)
    if place is not None:
        names = ("train", "rollout", "mask")
        laid = replace(
            laid, **{name: None if getattr(laid, name) is None else place(getattr(laid, name)) for name in names}
        )
    laid = between_fences(laid, device)
    if offsets is not None and laid.cu_seqlens is not None:
        laid.cu_seqlens = laid.cu_seqlens.to(offsets)
    with unchecked(), watched():
        out = laid.correct(spec, backend="triton")
    case = f"{layout} {dtype} {mask_dtype} {spec.to_dict()}"
    compare_all(laid, out, expected, spec, mask_dtype or torch.bool, computes, case, valid)
    assert_like_reference(out, reference, case)
    return out, expected


def cast(sequences, dtypes, computes):
    """The sequences as they are after a cast of the log-probs to their dtypes, and of all else to a third."""
    same = dtypes[0] == dtypes[1]
    trains, rollouts, others = (rounded(sequences, dtype) for dtype in (*dtypes, computes))
    return [
        replace(other, train=train.train, rollout=rollout.rollout, mass=(train if same else other).mass)
        for train, rollout, other in zip(trains, rollouts, others, strict=True)
    ]


def assert_like_reference(out, reference, case=""):
    """Require equal decisions, masks and counts; weights and statistics as near as float32 in another order gets."""
    assert torch.equal(out.keep.cpu(), reference.keep), case
    for got, wanted in zip(flat(out.mask), flat(reference.mask), strict=True):
        assert torch.equal(bits(got), bits(wanted)), case
    for got, wanted in zip(flat(out.weights), flat(reference.weights), strict=True):
        assert torch.equal(got == 0, wanted == 0), case
        assert_near(got, wanted, terms=FORMULA)
    a, b = (x.statistics.metrics_async().values() for x in (out, reference))
    held = columns(out.statistics.spec, extra=out.statistics.extra)
    assert list(a) == list(b) == [name for names in held for name in names]
    if not b["tokens_nonfinite"] or out.statistics.spec.nonfinite != "propagate":
        wrong = {name: (a[name], b[name]) for name in b if not same(name, a[name], b)}
        assert not wrong, f"{wrong}: {case}"


def same(name, got, reference):
    """Compare a raw statistic with the reference's; float sums up to the rounding of their terms."""
    wanted = reference[name]
    if got == wanted or is_count(name):
        return got == wanted
    added = math.sqrt(reference["tokens"] * reference.get(f"{name}2", 0.0))
    # An exponential is off by what its exponent is, and that by its size.
    exponent = max(1.0, math.log(wanted)) if name.endswith("_ppl") and wanted > 0.0 else 1.0
    # All else is made of ratios and probabilities, which are about 1, however small their differences are.
    return is_near(got, wanted, torch.float32, size=exponent * max(1.0, abs(wanted), added))


def same_bits(one, other):
    """Compare two corrections bit by bit, statistics included."""
    a, b = ([*flat(x.weights), *flat(x.mask), x.keep, x.statistics.sums, x.statistics.maxima] for x in (one, other))
    return all(torch.equal(bits(x).flatten(), bits(y).flatten()) for x, y in zip(a, b, strict=True))


def same_but_for_order(one, other):
    """Compare weights, masks and decisions bit by bit, and statistics but for the order of sums."""
    a, b = ([*flat(x.weights), *flat(x.mask), x.keep] for x in (one, other))
    for name in ("sums", "maxima"):
        got, wanted = (getattr(x.statistics, name) for x in (one, other))
        assert_near(got, wanted, torch.float32)
    return all(torch.equal(bits(x).flatten(), bits(y).flatten()) for x, y in zip(a, b, strict=True))


def flat(x):
    """A result as a list of tensors on the CPU."""
    rows = [] if x is None else x if isinstance(x, list) else [x]
    return [(row.values() if row.is_nested else row).cpu() for row in rows]


def bits(x):
    """A tensor as the bytes that it holds: a bool of 2, a NaN and -0.0 are what they are."""
    return x.contiguous().flatten().view(torch.uint8)


def batch(seed=0, lengths=LENGTHS, **others):
    """Random sequences of the lengths that matter to small tiles, with both of the statistics that variants bring."""
    made = random_sequences(seed, lengths, **others)
    for sequence in made:
        sequence.external["surprise"] = [0.5 - x for x in sequence.external["entropy"]]
    return made


def fit_and_check(sequences, spec, layout, device, shapes=FEW, **others):
    """The kernels with bounds that cut this batch."""
    with shaped(shapes):
        return check(sequences, fitted(spec, sequences), layout, device, **others)


def as_declared(name, lengths=MORE, **others):
    """A batch of a variant, its Spec with bounds that cut it, and how the variant has its tensors."""
    variant, number = VARIANTS[name], list(VARIANTS).index(name)
    valid = {} if variant.mask is not None else {"invalid": 0.0}
    side = {None: None, "train": "rollout", "rollout": "train"}[variant.mass]
    sequences = batch(number, lengths, **{"advantages": variant.advantages, "renormalized": side} | valid | others)
    if variant.mask is None:
        del sequences[2]
    if number % 4 == 1:
        sequences = wild(sequences)
    if number % 4 == 3 or variant.spec.nonfinite != "reject":
        sequences = spoil(sequences, number)
    dtypes = (variant.train, variant.rollout)
    computes = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    sequences = cast(sequences, dtypes, computes)
    spec = fitted(variant.spec, sequences)
    return sequences, spec, {"dtype": dtypes, "mask_dtype": variant.mask, "offsets": variant.offsets}
