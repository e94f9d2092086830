"""Builders for tests of the kernels: tiles, calls of given tensors, and the comparison with plain torch.

Kernels run between fences: inputs lie in the middle of garbage, and so does what the kernels allocate, which is garbage
itself until they write it. What they read and should not have read shows in their results.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import fields, is_dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.rounding import FORMULA, SUM, assert_near, near
from builders.same_bits import is_count
from frozen.calls import Call
from frozen.generator import Drawn
from frozen.runners import TILES, shaped
from rollout_corr.backends import batch as reading
from rollout_corr.kernels import grid, launches
from rollout_corr.kernels.grid import Shape
from rollout_corr.metrics.schema import layout as columns

# What a file of tests of the kernels needs. The warnings are NumPy's, in whose name the interpreter computes.
INTERPRETED = [
    pytest.mark.usefixtures("one_thread", "quick_interpreter"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:invalid value encountered:RuntimeWarning"
    ),
]

NARROW, MIDDLE, WIDE = (((0, Shape(**tile)),) for tile in TILES)
# For what hangs on no tile: two programs of each kind for 34 tokens. A program costs the interpreter 50 ms.
FEW = ((0, Shape(tile=16, lanes=4, sequences=4, chunk=2, parts=2)),)
REAL = grid.SHAPES


# Elements before and behind a tensor: more than the largest tile, and a multiple of what an aligned start is.
ROOM = 4096


def fenced(x, device, fence=math.nan):
    """An argument on a device, each of its tensors in the middle of a larger one; of integers, the fence is 1."""
    place = partial(fenced, device=device, fence=fence)
    if isinstance(x, dict):
        return {name: place(value) for name, value in x.items()}
    if isinstance(x, list):
        return list(map(place, x))
    if isinstance(x, (rc.KeptMass, rc.Versions)):
        return type(x)(*map(place, x))
    if is_dataclass(x):
        return replace(x, **{field.name: place(getattr(x, field.name)) for field in fields(x)})
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested:
        return torch.nested.nested_tensor_from_jagged(x.values().to(device), x.offsets().to(device))
    if x.dtype == torch.bool:
        # torch copies a bool whose byte is 2 as one of 1.
        return fenced(x.view(torch.uint8), device).view(torch.bool)
    held = x.untyped_storage().nbytes() // x.element_size()
    around = x.new_full((ROOM + held + ROOM,), fence if x.is_floating_point() else 1, device=device)
    around[ROOM : ROOM + held] = x.as_strided((held,), (1,), 0)
    return around.as_strided(x.shape, x.stride(), ROOM + x.storage_offset())


def between_fences(call, device, fence=math.nan):
    """Put every tensor of a call in the middle of garbage on a device."""
    drawn, place = call.drawn, partial(fenced, device=device, fence=fence)
    drawn = replace(drawn, tensors=place(drawn.tensors), batch=place(drawn.batch))
    return replace(call, drawn=drawn, given=place(call.given), place=place)


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


def given(spec, train, rollout, advantages=None, **batch):
    """A call of `correct` with given tensors, and given fields of its Batch."""
    tensors = {"train": train, "rollout": rollout, "advantages": advantages}
    return Call(Drawn(tensors, batch, None, (train.dtype, rollout.dtype), None), spec)


def check(call, device="cpu", shapes=FEW):
    """Correct by the kernels, between fences, and require what plain torch finds; give both."""
    reference = call.corrected(call.spec, "torch")
    with shaped(shapes), unchecked(), watched():
        out = between_fences(call, device).corrected(call.spec, "triton")
    assert_like_reference(out, reference, f"{call.spec!r} {call.drawn.batch}")
    return out, reference


def assert_like_reference(out, reference, case=""):
    """Require equal decisions, masks and counts; weights and statistics as near as float32 in another order gets."""
    assert torch.equal(out.keep.cpu(), reference.keep), case
    if reference.keep_turns is not None:
        assert torch.equal(out.keep_turns.cpu(), reference.keep_turns), case
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


def assert_loss_like_reference(call):
    """Require value, gradient and metrics of a loss as plain torch has them; infinite ones at the same tokens."""
    found, wanted = (call.lost(backend, call.loss) for backend in ("triton", "torch"))
    slopes = [torch.autograd.grad(out.value, new)[0] for out, new, _ in (found, wanted)]
    assert_near(*(out.value for out, *_ in (found, wanted)), torch.float32)
    for got, slope in zip(*map(flat, slopes), strict=True):
        assert_near(got, slope, terms=SUM if got.dtype == torch.float32 else 1)
    one, other = (out.metrics() for out, *_ in (found, wanted))
    assert {key: (one[key], x) for key, x in other.items() if one[key] != near(x, torch.float32)} == {}


def same(name, got, reference):
    """Compare a raw statistic with the reference's; float sums up to the rounding of their terms."""
    wanted = reference[name]
    if got == wanted or is_count(name):
        return got == wanted
    added = math.sqrt(reference["tokens"] * reference.get(f"{name}2", 0.0))
    # An exponential is off by what its exponent is, and that by its size.
    exponent = max(1.0, math.log(wanted)) if name.endswith("_ppl") and wanted > 0.0 else 1.0
    # All else is made of ratios and probabilities, which are about 1, however small their differences are.
    return bool(got == near(wanted, torch.float32, size=exponent * max(1.0, abs(wanted), added)))


def same_bits(one, other):
    """Compare two corrections bit by bit, statistics included."""
    a, b = ([*flat(x.weights), *flat(x.mask), x.keep, x.statistics.sums, x.statistics.maxima] for x in (one, other))
    return all(torch.equal(bits(x).flatten(), bits(y).flatten()) for x, y in zip(a, b, strict=True))


def flat(x):
    """A result as a list of tensors on the CPU."""
    rows = [] if x is None else x if isinstance(x, list) else [x]
    return [(row.values() if row.is_nested else row).cpu() for row in rows]


def bits(x):
    """A tensor as the bytes that it holds: a bool of 2, a NaN and -0.0 are what they are."""
    return x.contiguous().flatten().view(torch.uint8)
