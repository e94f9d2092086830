"""The kernels against the reference and the oracle: interpreted on a CPU, compiled on a GPU, the same tests.

`backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import oracle
import rollout_corr as rc
from batches import LAYOUTS, MASK_DTYPES, Laid, lay_out, moved, one_thread, random_sequences, rounded, spoil, wild
from kernel_cases import (
    BOTH,
    MIDDLE,
    NARROW,
    REAL,
    SEQUENCES,
    TOKENS,
    WIDE,
    assert_like_reference,
    batch,
    between_fences,
    bits,
    cast,
    check,
    fitted,
    over,
    same_bits,
    same_but_for_order,
    shaped,
    tokens,
    unchecked,
    watched,
)
from products import criteria_product, weights_product
from rollout_corr.kernels.grid import search_steps
from rollout_corr.kernels.slots import owners_of
from rollout_corr.kernels.variant import LONG, LONGEST, MEDIUM, SHORT
from rollout_corr.kernels.variants import VARIANTS
from rollout_corr.spec import LEVELS, NONFINITE, REDUCTIONS, STATS, WHEN

# What NumPy says of NaN, in whose name the interpreter computes.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:invalid value encountered:RuntimeWarning"
)

W = rc.Weight


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


SHAPES = {LONGEST: NARROW, LONG: NARROW, MEDIUM: MIDDLE, SHORT: WIDE}


def as_declared(name, **others):
    """A batch of a variant, its Spec with bounds that cut it, and how the variant has its tensors."""
    variant, number = VARIANTS[name], list(VARIANTS).index(name)
    valid = {} if variant.mask is not None else {"invalid": 0.0}
    sequences = batch(number, **{"advantages": variant.advantages} | valid | others)
    if variant.mask is None:
        del sequences[2]
    if number % 4 == 1:
        sequences = wild(sequences)
    if number % 4 == 3 or variant.spec.nonfinite != "reject":
        sequences = spoil(sequences, number)
    dtypes = (variant.train, variant.rollout)
    sequences = cast(sequences, dtypes, variant.computes)
    spec = fitted(variant.spec, sequences)
    return sequences, spec, {"dtype": dtypes, "mask_dtype": variant.mask, "offsets": variant.offsets}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, device):
    """Each in its own layout, dtypes and strides; every criterion rejects something and keeps something."""
    variant = VARIANTS[name]
    sequences, spec, others = as_declared(name)
    with shaped(SHAPES[variant.length]):
        layout = "packed_gaps" if variant.packed else "padded_left"
        _, expected = check(sequences, spec, layout, device, place=variant.place, **others)
    for criterion, verdict in zip(spec.criteria, expected.verdicts, strict=True):
        rows = [row if isinstance(row, list) else [row] for row in verdict.failed]
        assert {failed for row in rows for failed in row} == {True, False}, criterion


# --- layouts and edges of tiles ---


def fit_and_check(sequences, spec, layout, device, shapes=WIDE, **others):
    """The kernels with bounds that cut this batch."""
    with shaped(shapes):
        return check(sequences, fitted(spec, sequences), layout, device, **others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    number = LAYOUTS.index(layout)
    fit_and_check(batch(number), (TOKENS, SEQUENCES)[number % 2], layout, device)


@pytest.mark.parametrize("shape", [shape for _, shape in (*REAL, *NARROW)], ids=lambda shape: f"tile {shape.tile}")
def test_edges_of_tiles(shape, device):
    """One less than a tile, a tile, one more, two; first where tiles begin, then where none does, then as rows."""
    tile = shape.tile
    spec = rc.Spec(W("product", 0.5, 1.5), (tokens("k1"), over("k3", "mean")), "both")
    # Padded rows are two tokens wider than the longest sequence.
    for layout, lengths in (
        ("packed", (tile, tile - 1, 0, 1, tile + 1, 2 * tile, 2)),
        ("padded_right", (tile - 2, 5)),
        ("padded_left", (tile - 3, 5)),
        ("padded_strided", (tile - 1, 3)),
        ("padded_right", (2 * tile - 2, 3)),
    ):
        sequences = random_sequences(tile, lengths, scale=2.0 * tile**-0.5)
        sequences[2:3] = []
        fit_and_check(sequences, spec, layout, device, ((0, shape),))


@pytest.mark.parametrize("lengths", [tuple(range(1, 21)), (0, 0, 1, 0, 0, 16, 0, 1, 1, 1, 0), (50,), (33, 7)])
def test_starts(lengths, device):
    """At every place of a tile; behind empty ones; over many tiles."""
    sequences = random_sequences(len(lengths), (3, 2, *lengths))
    for layout in ("packed", "packed_gaps"):
        fit_and_check(sequences, SEQUENCES, layout, device)


def test_many_sequences(device):
    """More than one step of the search for a slot's owner looks at; most of them empty, in one tile or in many."""
    for lengths in (tuple(i % 3 for i in range(150)), (1,) * 20 + (0,) * 120 + (9,) + (0,) * 20):
        spec = rc.Spec(W("token", upper=1.2), (over("abs", "mean"),))
        fit_and_check(random_sequences(0, lengths, advantages=None, external=False), spec, "packed_gaps", device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_offsets(dtype, device):
    """From the CPU, and as the kernels get them on a device. What lies before and behind them counts as outside."""
    sequences = batch(1)
    spec = fitted(TOKENS, sequences)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    reference = laid.correct(spec)
    for passed_on in (contextlib.nullcontext(), unchecked()):
        with shaped(WIDE), passed_on:
            out = replace(laid.to(device), cu_seqlens=laid.cu_seqlens.to(dtype)).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        assert out.metrics()["tokens_outside"] == 5


# --- nothing ---


NOTHING = rc.Spec(
    W("geometric", 0.5, 2.0, normalize="batch"), (over("ratio", "max"), over("k3", "mean"), tokens("tv")), "both"
)


@pytest.mark.parametrize("layout", ["packed", "packed_gaps", "padded_right", "jagged", "list"])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (0, 3, 0)])
def test_nothing_to_train_on(layout, lengths, device):
    """No sequences, no tokens, nothing valid: zero counts, finite metrics, no exception."""
    out, _ = check(random_sequences(3, lengths, invalid=1.0), NOTHING, layout, device)
    assert out.keep.tolist() == [True] * len(lengths)
    assert all(math.isfinite(value) for value in out.metrics().values())


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (3, 0), (1, 1), (0,), (9,)])
def test_sizes_of_zero(shape, device):
    """No rows, no columns, no tokens; offsets of no sequence at all, which leave every token outside."""
    others = {"cu_seqlens": torch.tensor([5 * (shape != (0,))])} if len(shape) == 1 else {}
    for mask in (None, torch.ones(shape)):
        given = (torch.zeros(shape), torch.zeros(shape), mask)
        reference = rc.correct(*given, spec=NOTHING, **others)
        with watched():
            out = rc.correct(*(moved(x, device) for x in given), spec=NOTHING, backend="triton", **others)
        assert_like_reference(out, reference)


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_everything_rejected(spec, device):
    """No weight and no mask is left, and every metric is finite."""
    criteria = (tokens("abs", upper=1e-30), over("abs", "mean", upper=1e-30, label="all"))
    with shaped(WIDE):
        out, _ = check(batch(2, invalid=0.0), replace(spec, criteria=criteria, rejected="both"), "packed_gaps", device)
    assert not out.mask.any() and not out.weights.any()
    assert all(math.isfinite(value) for value in out.metrics().values())


# --- masks ---


@pytest.mark.parametrize("mask_dtype", MASK_DTYPES)
def test_mask_dtypes(mask_dtype, device):
    """0.3 is valid and stays 0.3, 2 stays 2."""
    number = MASK_DTYPES.index(mask_dtype)
    values = (1,) if mask_dtype is torch.bool else (0.3, 1, 2) if mask_dtype.is_floating_point else (1, 2, 3)
    sequences = batch(number, mask_values=values)
    layout = ("packed_gaps", "padded_left")[number % 2]
    fit_and_check(sequences, (TOKENS, SEQUENCES)[number // 2 % 2], layout, device, mask_dtype=mask_dtype)


@pytest.mark.parametrize("rejected", ["mask", "both"])
def test_odd_masks(rejected, device):
    """A bool whose byte is 2, a mask value that is NaN or a denormal number, a 0 with a sign."""
    train, rollout = torch.tensor([[-1.0, -2.0, -0.5, -9.0]] * 3), torch.full((3, 4), -1.0)
    spec = rc.Spec(W("token", upper=2.0), (tokens("abs", upper=2.0),), rejected)
    byte = torch.tensor([[0, 1, 2, 2], [255, 0, 2, 1], [2, 2, 0, 128]], dtype=torch.uint8).view(torch.bool)
    odd = torch.tensor([[math.nan, -0.0, 0.0, math.nan], [-1.0, math.inf, 1e-45, 0.3], [0.0, -0.0, -math.inf, 1.0]])
    for mask in (byte, odd, odd.double(), odd.bfloat16()):
        reference = rc.correct(train, rollout, mask, spec=spec)
        out = rc.correct(*(x.to(device) for x in (train, rollout)), moved(mask, device), spec=spec, backend="triton")
        assert out.mask.dtype == mask.dtype
        assert out.weights.cpu().ne(0).tolist() == reference.weights.ne(0).tolist()
        # As bytes: what is kept comes back as it was given, what is not as a plain 0.
        kept = bits(reference.mask).view(mask.shape) != 0 if mask.dtype == torch.bool else reference.mask != 0
        assert torch.equal(bits(out.mask.cpu()), bits(torch.where(kept, mask, torch.zeros_like(mask))))


@pytest.mark.parametrize("layout", ["packed_gaps", "packed_row", "jagged", "list", "padded_right"])
def test_mask_of_none(layout, device):
    """Every token is valid; the mask that comes back is bool, and False at what belongs to no sequence."""
    sequences = random_sequences(1, (3, 0, 9, 17), invalid=0.0)
    sequences[2].mask = [1] * 9
    laid = lay_out(sequences, layout, torch.float32)

    def finite(x):
        """What stands in gaps and in padding is garbage, which would be valid here."""
        if isinstance(x, list):
            return [row.nan_to_num(0.5, 0.5, 0.5) for row in x]
        return x if x.is_nested else x.nan_to_num(0.5, 0.5, 0.5)

    laid.train, laid.rollout, laid.mask = finite(laid.train), finite(laid.rollout), None
    late = rc.Spec(W("token"), (over("abs", "mean", upper=0.3, drop="token"),), "both")
    for spec in (rc.Spec(), rc.Spec(W("geometric"), (tokens("abs", upper=0.3),), "both"), late):
        reference = laid.correct(spec)
        with shaped(WIDE), watched():
            out = between_fences(laid, device).correct(spec, backend="triton")
        assert_like_reference(out, reference)


# --- dtypes ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype, device):
    for spec, layout in ((TOKENS, "packed_gaps"), (SEQUENCES, "padded_left")):
        fit_and_check(rounded(batch(5), dtype), spec, layout, device, dtype=dtype)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_log_probs_of_two_dtypes(dtypes, device):
    """Both are upcast before the subtraction; fp64 on either side computes in fp64."""
    sequences = rounded(batch(2), torch.bfloat16)
    fit_and_check(sequences, SEQUENCES, "packed_gaps", device, dtype=dtypes)


@pytest.mark.parametrize("per", ["token", "sequence", "column"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.bfloat16])
def test_dtypes_of_advantages_and_of_external_values(dtype, per, device):
    sequences = batch(3)
    for q in sequences:
        q.external["entropy"] = [8 * x if math.isfinite(x) else 0.0 for x in q.external["entropy"]]
    criteria = (tokens("abs", when="outward"), over("k2", "mean", when="negative_advantage"))
    spec = fitted(rc.Spec(criteria=(*criteria, over("external", "mean", name="entropy", upper=0.5))), sequences)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    laid.external["entropy"] = laid.external["entropy"].nan_to_num(0.0, 0.0, 0.0).to(dtype)
    laid.advantages = (4 * laid.advantages.nan_to_num(0.0, 0.0, 0.0)).to(dtype)
    if per != "token":
        laid.advantages = laid.advantages[: len(sequences)]
        laid.advantages = laid.advantages[:, None] if per == "column" else laid.advantages
    reference = laid.correct(spec)
    with shaped(WIDE), watched():
        out = between_fences(laid, device).correct(spec, backend="triton")
    assert_like_reference(out, reference)


# --- strides ---


def slices(x):
    """The same values with other strides: rows apart, columns apart, transposed, every third row."""
    width = x.shape[1]
    yield torch.nn.functional.pad(x, (3, 2))[:, 3 : 3 + width]
    yield x.repeat_interleave(2, 1)[:, ::2]
    yield x.t().contiguous().t()
    yield x.repeat_interleave(3, 0)[::3]


def test_padded_strides(device):
    """Each tensor its own strides; bits as without any. How wide accesses are has a say in how large tiles are."""
    sequences = batch(4)
    spec = fitted(TOKENS, sequences)
    laid = lay_out(sequences, "padded_holes", torch.float32)
    with shaped(WIDE):
        wanted = laid.to(device).correct(spec, backend="triton")
        assert_like_reference(wanted, laid.correct(spec))
        for i in range(4):
            names = ("train", "rollout", "mask", "advantages")
            sliced = {name: list(slices(getattr(laid, name)))[(i + j) % 4] for j, name in enumerate(names)}
            external = {name: list(slices(x))[i] for name, x in laid.external.items()}
            placed = between_fences(replace(laid, **sliced, external=external), device)
            with watched():
                out = placed.correct(spec, backend="triton")
            assert same_but_for_order(out, wanted)


@triton.jit
def owners_kernel(
    offsets, owners, sequences: tl.int64, tokens: tl.int64, steps, ROWS: tl.constexpr, WAYS: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(owners + slot, owners_of(offsets, slot, sequences, tokens, steps, ROWS, 8, WAYS))


@pytest.mark.parametrize(("rows", "ways"), [(1, 8), (16, 8)])
def test_the_search_for_owners(rows, ways, device):
    """Every slot's sequence is found in as many steps as the launcher allows, also the first of many empty ones."""
    for sequences in (0, 1, ways - 2, ways - 1, ways, ways**2 + 2 * ways - 1):
        generator = torch.Generator().manual_seed(sequences)
        lengths = torch.randint(0, 12, (sequences,), generator=generator)
        lengths[sequences // 3 : sequences // 2] = 0
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + 5
        tokens = int(offsets[-1]) + 9
        programs = -(-(tokens // 8 + sequences + 2) // rows)
        owners = torch.empty(programs * rows, dtype=torch.int64, device=device)
        steps = search_steps(sequences, ways)
        owners_kernel[(programs,)](offsets.to(device), owners, sequences, tokens, steps, rows, ways)
        firsts = [0, *(start // 8 + 1 + i for i, start in enumerate(offsets.tolist()))]
        assert owners.tolist() == [bisect.bisect_right(firsts, slot) - 1 for slot in range(programs * rows)]


def test_packed_strides(device):
    """One token apart, three apart, a slice without its first tokens, a row of which."""
    sequences = batch(6)
    spec = fitted(SEQUENCES, sequences)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    given = {name: getattr(laid, name) for name in ("train", "rollout", "mask")}
    with shaped(WIDE):
        wanted = laid.to(device).correct(spec, backend="triton")
        for change in (
            lambda x: x.repeat_interleave(2)[::2],
            lambda x: x.repeat_interleave(3)[1::3] if x.dtype == torch.bool else x,
            lambda x: torch.nn.functional.pad(x, (1, 0))[1:],
            lambda x: torch.nn.functional.pad(x, (3, 0))[3:] if x.dtype == torch.bool else x,
            lambda x: torch.nn.functional.pad(x[None], (1, 0))[:, 1:],
        ):
            placed = between_fences(replace(laid, **{name: change(x) for name, x in given.items()}), device)
            with watched():
                out = placed.correct(spec, backend="triton")
            assert out.weights.shape == placed.train.shape
            assert same_but_for_order(out, wanted)


@pytest.mark.parametrize("packed", [True, False])
def test_expanded_tensors(packed, device):
    """Stride 0: one value for all, one row for all, one column for all."""
    spec = rc.Spec(W("product", upper=3.0), (tokens("abs", upper=0.2), over("ratio", "mean", upper=1.3)), "both")
    generator = torch.Generator().manual_seed(0)
    shape = (40,) if packed else (4, 21)
    others = {"cu_seqlens": torch.tensor([2, 9, 9, 33, 38])} if packed else {}
    rollout = -torch.rand(shape, generator=generator)
    ones, value = torch.ones((), dtype=torch.int64), torch.tensor(-0.3)
    expanded = [(value.expand(shape), rollout, ones.expand(shape)), (rollout, value.expand(shape), None)]
    if not packed:
        mask = torch.tensor([1, 0, 1, 1])[:, None].expand(shape)
        expanded += [(rollout[:1].expand(shape), rollout[:, :1].expand(shape), mask)]
    for given in expanded:
        reference = rc.correct(*given, spec=spec, **others)
        assert not reference.mask.all()
        with shaped(WIDE), watched():
            out = rc.correct(*(moved(x, device) for x in given), spec=spec, backend="triton", **others)
        assert_like_reference(out, reference)


def test_inputs_are_left_as_they_are(device):
    sequences = batch(7)
    spec = fitted(TOKENS, sequences)
    laid = between_fences(lay_out(sequences, "padded_holes", torch.float32), device)
    given = [laid.train, laid.rollout, laid.mask, laid.advantages, laid.external["entropy"]]
    copies = [bits(x).clone() for x in given]
    with shaped(WIDE):
        laid.correct(spec, backend="triton")
    assert all(torch.equal(bits(x), copy) for x, copy in zip(given, copies, strict=True))


# --- offsets that are garbage ---


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 40, 10, 60],
        [60, 40, 20, 0],
        [-5, 10, -30, 60],
        [0, 30, 200, 300],
        [0, 50, 5, 55, 10, 60],
        [-(2**63), 7, 2**63 - 1, 2**62, -(2**62), 2**40 + 9],
        torch.tensor([-(2**31), 2**31 - 1, 33, -(2**31)], dtype=torch.int32),
    ],
    ids=["unsorted", "falling", "negative", "beyond", "overlapping", "huge", "huge int32"],
)
def test_offsets_that_are_garbage(offsets, spec, device):
    """What lies around tensors, and what fresh memory held, changes no bit; numbers are wrong, and finite."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(60, generator=generator)
    train = rollout + 0.3 * torch.randn(60, generator=generator)
    mask = torch.rand(60, generator=generator) > 0.2
    laid = Laid(train, rollout, mask, [], (60,), torch.as_tensor(offsets), torch.sign(train + 0.5), {"entropy": train})
    found = []
    for fence, filling in ((math.nan, 0xFF), (7.0, 0x00)):
        placed = between_fences(laid, device, fence)
        with unchecked(), shaped(WIDE if spec is TOKENS else NARROW), watched(filling):
            found.append(placed.correct(spec, backend="triton"))
        assert found[-1].weights.isfinite().all()
        assert all(math.isfinite(value) for value in found[-1].metrics().values())
    assert same_bits(*found)


# --- values that are not finite, and values at the ends of ranges ---


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_broken_log_probs(nonfinite, spec, device):
    """In front of the mask: NaN, infinities, inf - inf, a sentinel. Behind it they stand in every batch."""
    sequences = batch(8, invalid=0.2)
    broken = [(math.nan, -1.0), (-math.inf, -1.0), (-math.inf, -math.inf), (-1.0, math.nan), (-9999.0, -1.0)]
    broken += [(-math.inf, -1.0), (-1.0, -math.inf)]
    places = ((1, 0), (7, 0), (6, 15), (6, 16), (9, 20), (9, 21), (9, 22))
    for (s, t), (train, rollout) in zip(places, broken, strict=True):
        q, sign = sequences[s], -1.0 if train < rollout else 1.0
        q.train[t], q.rollout[t], q.mask[t], q.advantages[t], q.external["entropy"][t] = train, rollout, 1, sign, 0.25
    spec = replace(spec, nonfinite=nonfinite, sums_over="kept" if spec is TOKENS else "valid")
    fit_and_check(sequences, spec, ("packed_gaps", "padded_left")[spec.rejected == "both"], device)


@pytest.mark.parametrize("broken", [("train",), ("rollout",), ("train", "rollout"), ()])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_extrema_of_weights_where_every_gap_is_infinite(outside, broken, device):
    """Under "propagate" an infinite D has a weight, and extrema of such weights are not those of no token at all.

    Whose log-probs are -inf, one sequence after the other; nobody's, but no token is valid.
    """
    sequences = batch(10, (3, 9, 17), invalid=0.3)
    for q, whose in zip(sequences, itertools.cycle(broken or ("",))):
        q.train, q.rollout = ([-math.inf if name == whose else -1.0] * len(q) for name in ("train", "rollout"))
        q.mask = q.mask if broken else [0] * len(q)
    for bounds in ({}, {"lower": 0.5}, {"upper": 2.0}, {"lower": 0.5, "upper": 2.0}):
        spec = rc.Spec(W("token", **bounds, outside=outside), nonfinite="propagate")
        laid = lay_out(sequences, "packed_gaps", torch.float32)
        reference = laid.correct(spec)
        with shaped(WIDE):
            out = laid.to(device).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        a, b = (x.statistics.maxima.cpu() for x in (out, reference))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)


def test_odd_advantages(device):
    """One that is NaN selects nothing, nor does a 0 of either sign; in a mean only those that are finite count."""
    sequences = batch(4)
    late = [over("abs", "mean", when=when, drop="token", label=when) for when in ("negative_advantage", "outward")]
    spec = fitted(rc.Spec(W("token"), (tokens("abs", when="outward"), *late), "both"), sequences)
    # These fail wherever they test.
    all_of = [over("k2", "sum", upper=1e-12, when=f"{sign}_advantage", label=sign) for sign in ("positive", "negative")]
    spec = replace(spec, criteria=(*spec.criteria, *all_of))
    odd = itertools.cycle((math.nan, -0.0, -math.inf, 0.0, math.inf))
    for s, q in enumerate(sequences):
        q.advantages = [next(odd) if t % 3 == 0 else (0.25, -0.25)[s % 2] for t in range(len(q))]
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    reference = laid.correct(spec)
    with shaped(WIDE):
        assert_like_reference(laid.to(device).correct(spec, backend="triton"), reference)


def test_whom_a_criterion_of_sequences_tests(device):
    """Every pair of signs of D and of advantages; all of them fail, if they are tested."""
    each = list(itertools.product((0.5, -0.5), (0.25, -0.25, 0.0)))
    made = [[one] for one in each] + [list(pair) for pair in itertools.product(each, repeat=2)]
    sequences = [
        oracle.Sequence([d - 1.0 for d, _ in q], [-1.0] * len(q), [1] * len(q), [a for _, a in q]) for q in made
    ]
    criteria = tuple(
        over("abs", "mean", upper=0.25, when=when, drop=drop, label=f"{when} {drop}")
        for when, drop in itertools.product(WHEN, ("unit", "token"))
    )
    for tested in (criteria, criteria[-2:]):
        with shaped(WIDE):
            check(sequences, rc.Spec(criteria=tested), "packed_gaps", device)


@pytest.mark.parametrize("odd", [math.nan, math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_odd_external_values(odd, device):
    """A NaN of the caller's own statistic passes no bound, an infinity only an open one."""
    sequences = batch(5, (3, 9, 17, 8), invalid=0.0)
    sequences[1].external["entropy"][8] = odd
    of = {"name": "entropy", "upper": 0.5}
    tests = (tokens("external", **of), *(over("external", reduce, **of, label=reduce) for reduce in REDUCTIONS))
    low = (tokens("external", name="entropy", lower=-0.5, upper=None, label="low"),)
    low += tuple(over("external", r, name="entropy", lower=-0.5, upper=None, label=f"low {r}") for r in REDUCTIONS)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    for nonfinite in ("reject", "propagate"):
        spec = rc.Spec(criteria=tests + low, nonfinite=nonfinite)
        reference = laid.correct(spec)
        with shaped(WIDE):
            out = laid.to(device).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        expected = oracle.correct(rounded(sequences, torch.float32), spec)
        assert [laid.read(out.mask), out.keep.tolist()] == [expected.mask, expected.keep]


def test_log_probs_above_0(device):
    """They are none: their probability is read as 1."""
    sequences = batch(6, invalid=0.1)
    for q in sequences:
        q.train[::3] = [3.0 if m else x for x, m in zip(q.train[::3], q.mask[::3], strict=True)]
        q.rollout[::4] = [0.5 if m else x for x, m in zip(q.rollout[::4], q.mask[::4], strict=True)]
    spec = rc.Spec(None, (tokens("tv"), over("prob_diff", "mean", **BOTH), tokens("binary_kl", eps=0.1)), detail="full")
    fit_and_check(sequences, spec, "packed_gaps", device)


def test_ranges_of_what_is_summed(device):
    """D enters sums within +-1024, other statistics within +-2^37; extrema and tokens are compared as they are."""
    sequences = random_sequences(0, (3, 17, 0, 1), invalid=0.0)
    sequences[0].train[:], sequences[0].rollout[:] = [3000.0, -500.0, 2.0**40], [0.0] * 3
    sequences[3].train[:], sequences[3].rollout[:] = [0.0], [-20.0]  # on the clamp, not beyond it
    sequences[0].external["entropy"] = [2.0**39, -(2.0**38), 2.0**36]
    open_ended = {"lower": -1e99, "upper": None}
    sums = [over("k1", reduce, **open_ended, label=reduce) for reduce in REDUCTIONS]
    sums += [over(stat, "sum", upper=1e99, label=stat) for stat in ("ratio", "abs", "k2", "k3")]
    sums += [over("external", "sum", name="entropy", upper=1e99, label="entropy"), tokens("k2", upper=1e99)]
    for spec in (
        rc.Spec(W("product"), tuple(sums)),
        rc.Spec(
            W("geometric", token_clamp=5000.0),
            (tokens("external", name="entropy", **open_ended), *sums),
            sums_over="kept",
            clamp=40.0,
        ),
    ):
        with shaped(WIDE):
            check(sequences, spec, "packed_gaps", device)


@pytest.mark.parametrize("d", [0.3, -1e-2, 1e-4, -1e-5, 1e-6])
def test_k3_of_a_small_step_does_not_cancel(d, device):
    train = torch.tensor([[d]], device=device)
    stats = {"k3": oracle.k3(train.item()), "k3_reverse": oracle.k3(-train.item())}
    spec = rc.Spec(criteria=tuple(tokens(stat, label=stat) for stat in stats))
    metrics = rc.correct(train, torch.zeros_like(train), spec=spec, backend="triton").metrics()
    assert [metrics[f"{stat}/max"] for stat in stats] == pytest.approx(list(stats.values()), rel=5e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, "sum", "max"])
def test_bounds_are_inclusive_to_the_bit(dtype, reduce, device):
    """A value on the bound passes, and fails a bound that float32 would round to it."""
    d = 0.5 + 2.0**-7
    train = torch.tensor([[d]], dtype=dtype, device=device)
    unit = {} if reduce is None else {"over": "sequence", "reduce": reduce}
    criteria, expected = [], []
    for stat, value in {"k1": -d, "abs": d, "external": d}.items():
        named = {"name": "entropy"} if stat == "external" else {}
        for side, bound, passes in (
            ("lower", value, True),
            ("lower", math.nextafter(value, math.inf), False),
            ("upper", value, True),
            ("upper", math.nextafter(value, -math.inf), False),
        ):
            criteria.append(rc.Criterion(stat, **unit, **named, **{side: bound}, label=str(len(criteria))))
            expected.append(0.0 if passes else 1.0)
    spec = rc.Spec(criteria=tuple(criteria))
    out = rc.correct(train, torch.zeros_like(train), spec=spec, external={"entropy": train}, backend="triton")
    values = out.statistics.metrics_async().values()
    assert [values[f"{i}/tokens"] for i in range(len(criteria))] == expected


@pytest.mark.parametrize(("stat", "grid"), [("k1", 2.0**-28), ("external", 2.0**-38)])
def test_sums_that_decide_are_rounded_to_the_nearest_step(stat, grid, device):
    """On either side of 0 what falls between two steps is rounded, not cut off."""
    name = {"name": "x"} if stat == "external" else {}
    for quarters, nearest in (((1, -1), 0), ((3, 5), 1), ((-3, -5), -1)):
        x = torch.tensor(quarters)[:, None].expand(2, 4).to(device) * (grid / 4)
        total = 4 * nearest * grid * (-1 if stat == "k1" else 1)
        criterion = over(stat, "sum", lower=total - 0.4 * grid, upper=total + 0.4 * grid, **name)
        spec = rc.Spec(criteria=(criterion,))
        out = rc.correct(x, torch.zeros_like(x), spec=spec, external={"x": x}, backend="triton")
        assert out.keep.tolist() == [True, True], (quarters, nearest)


# --- all of it: make test-all ---


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_in_every_layout_and_dtype(name, device):
    """Whatever a variant says of its own: in every layout, in tiles of every shape, in every precision."""
    number = list(VARIANTS).index(name)
    for i, (layout, dtype) in enumerate(itertools.product(LAYOUTS, (torch.float32, torch.bfloat16, torch.float64))):
        sequences, spec, others = as_declared(name, advantages=("token", "sequence")[i % 2])
        with shaped((WIDE, MIDDLE, NARROW)[(i + number) % 3]):
            sequences = rounded(sequences, dtype)
            check(sequences, fitted(spec, sequences), layout, device, **others | {"dtype": dtype})


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_their_transforms(level, device):
    walk(weights_product(level), level, device)


@pytest.mark.slow
@pytest.mark.parametrize("stat", STATS)
def test_criteria_cross_product(stat, device):
    walk(criteria_product(stat), stat, device)


def walk(product, seed, device):
    """Dtypes and tiles are drawn; below float64 bounds are fitted anew, to what a cast leaves."""
    rng = random.Random(seed)
    for sequences, spec, layout, _ in product:
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        sequences = rounded(sequences, dtype)
        with shaped(rng.choice((WIDE, MIDDLE, REAL))):
            check(sequences, fitted(spec, sequences), layout, device, dtype=dtype)
