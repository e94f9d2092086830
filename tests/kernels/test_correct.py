"""The kernels against the reference and the oracle: interpreted on a CPU, compiled on a GPU, the same tests.

`backend="triton"` never falls back, so whatever passes here has run a kernel.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out, moved, random_sequences
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    REAL,
    SEQUENCES,
    TOKENS,
    WIDE,
    assert_like_reference,
    batch,
    between_fences,
    bits,
    check,
    fit_and_check,
    fitted,
    flat,
    over,
    shaped,
    tokens,
    unchecked,
    watched,
)

pytestmark = INTERPRETED

W = rc.Weight


# --- layouts and edges of tiles ---


# Layout, and lengths in tiles and tokens. Padded rows are two tokens wider than the longest sequence.
EDGES = (
    ("packed", (1, 0), (1, -1), (0, 0), (0, 1), (1, 1), (2, 0), (0, 2)),
    ("padded_right", (1, -2), (0, 5)),
    ("padded_left", (1, -3), (0, 5)),
    ("padded_strided", (1, -1), (0, 3)),
    ("padded_right", (1, 1), (0, 3)),
)
EDGES_OF_REAL = (("packed", (1, -1), (0, 1), (0, 0), (1, 1)), *EDGES[3:])
ON_EDGES = rc.Spec(W.product(lower=0.5, upper=1.5), (tokens("k1"), over("k3", "mean")), "both")


def with_edges(tile, edges):
    """Sequences of these lengths; the third is left out, in which nothing is valid."""
    lengths = tuple(tiles * tile + more for tiles, more in edges[1:])
    sequences = random_sequences(tile, lengths, scale=2.0 * tile**-0.5)
    return sequences[:2] + sequences[3:]


@pytest.mark.parametrize("edges", EDGES[:3], ids=lambda edges: edges[0])
def test_edges_of_tiles(edges, device):
    """One less than a tile, a tile, one more, two; first where tiles begin, then where none does, then as rows."""
    shape = NARROW[0][1]
    fit_and_check(with_edges(shape.tile, edges), ON_EDGES, edges[0], device, ((0, shape),))


@pytest.mark.parametrize(("shape", "edges"), list(zip(REAL, EDGES_OF_REAL, strict=True)), ids=["0", "1", "2"])
def test_edges_of_real_tiles(shape, edges, device):
    """Of 2,048 tokens, for which the oracle takes seconds."""
    spec = replace(ON_EDGES, criteria=(tokens("k1", upper=0.05), over("k3", "mean", upper=1e-3)))
    laid = lay_out(with_edges(shape[1].tile, edges), edges[0], torch.float32)
    with shaped(((0, shape[1]),)), watched():
        out = between_fences(laid, device).correct(spec, backend="triton")
    assert_like_reference(out, laid.correct(spec))
    assert set(flat(out.weights)[0].ne(0).flatten().tolist()) == {True, False}


@pytest.mark.parametrize("lengths", [tuple(range(1, 9)), (0, 0, 1, 0, 0, 16, 0, 1, 1, 1, 0), (50,)])
def test_starts(lengths, device):
    """At every place of a tile; behind empty ones; over many tiles."""
    fit_and_check(random_sequences(len(lengths), (3, 2, *lengths)), SEQUENCES, "packed", device, WIDE)


def test_dtypes_of_offsets(device):
    """From the CPU, and as the kernels get them on a device. What lies before and behind them counts as outside."""
    sequences = batch(1)
    spec = fitted(TOKENS, sequences)
    laid = lay_out(sequences, "packed_gaps", torch.float32)
    reference = laid.correct(spec)
    for dtype, passed_on in ((torch.int32, contextlib.nullcontext()), (torch.int64, unchecked())):
        with shaped(WIDE), passed_on:
            out = replace(laid.to(device), cu_seqlens=laid.cu_seqlens.to(dtype)).correct(spec, backend="triton")
        assert_like_reference(out, reference)
        assert out.metrics()["tokens_outside"] == 5


@pytest.mark.parametrize(("begin", "outside"), [(0, 8), (1, 9)])
def test_tokens_behind_the_last_sequence_of_one_tile_are_counted(begin, outside, device):
    """Of a batch that begins with its first sequence, the part of the tile before it has no slot."""
    x = -torch.rand(148, device=device)
    found = rc.correct(x, x - 0.01, cu_seqlens=torch.tensor([begin, 37, 140]), backend="triton").metrics()
    assert (found["tokens_outside"], found["tokens"]) == (outside, 148 - outside)


# --- nothing ---


NOTHING = rc.Spec(
    W.geometric(lower=0.5, upper=2.0, normalize="batch"),
    (over("ratio", "max"), over("k3", "mean"), tokens("tv")),
    "both",
)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [("packed", ()), ("packed_gaps", (0, 0, 0)), ("padded_right", (0, 3, 0)), ("jagged", (0,)), ("list", (0, 3, 0))],
)
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
        reference = rc.correct(*given[:2], mask=mask, spec=NOTHING, **others)
        with watched():
            here = [moved(x, device) for x in given]
            out = rc.correct(*here[:2], mask=here[2], spec=NOTHING, backend="triton", **others)
        assert_like_reference(out, reference)


@pytest.mark.parametrize("spec", [TOKENS, SEQUENCES], ids=["tokens", "sequences"])
def test_everything_rejected(spec, device):
    """No weight and no mask is left, and every metric is finite."""
    criteria = (tokens("abs", upper=1e-30), over("abs", "mean", upper=1e-30, label="all"))
    with shaped(FEW):
        out, _ = check(batch(2, invalid=0.0), replace(spec, criteria=criteria, rejected="both"), "packed_gaps", device)
    assert not out.mask.any() and not out.weights.any()
    assert all(math.isfinite(value) for value in out.metrics().values())


# --- masks ---


@pytest.mark.parametrize("rejected", ["mask", "both"])
def test_odd_masks(rejected, device):
    """A bool whose byte is 2, a mask value that is NaN or a denormal number, a 0 with a sign."""
    train, rollout = torch.tensor([[-1.0, -2.0, -0.5, -9.0]] * 3), torch.full((3, 4), -1.0)
    spec = rc.Spec(W.token(upper=2.0), (tokens("abs", upper=2.0),), rejected)
    byte = torch.tensor([[0, 1, 2, 2], [255, 0, 2, 1], [2, 2, 0, 128]], dtype=torch.uint8).view(torch.bool)
    odd = torch.tensor([[math.nan, -0.0, 0.0, math.nan], [-1.0, math.inf, 1e-45, 0.3], [0.0, -0.0, -math.inf, 1.0]])
    for mask in (byte, odd, odd.double(), odd.bfloat16()):
        reference = rc.correct(train, rollout, mask=mask, spec=spec)
        out = rc.correct(
            *(x.to(device) for x in (train, rollout)), mask=moved(mask, device), spec=spec, backend="triton"
        )
        assert out.mask.dtype == mask.dtype
        assert out.weights.cpu().ne(0).tolist() == reference.weights.ne(0).tolist()
        # As bytes: what is kept comes back as it was given, what is not as a plain 0. torch.where of torch 2.11 makes a
        # bool of 2 one of 1.
        kept = bits(reference.mask).view(mask.shape) != 0 if mask.dtype == torch.bool else reference.mask != 0
        expected = bits(mask).view(*mask.shape, -1) * kept[..., None]
        assert torch.equal(bits(out.mask.cpu()), expected.flatten())


@pytest.mark.parametrize("layout", ["packed_gaps", "list", "padded_right"])
def test_mask_of_none(layout, device):
    """Every token is valid; the mask that comes back is bool, and False at what belongs to no sequence."""
    sequences = random_sequences(1, (3, 0, 9, 17), invalid=0.0)
    sequences[2].mask = [1] * 9
    laid = lay_out(sequences, layout, torch.float32)

    def finite(x):
        """Replace the garbage in gaps and in padding, which would be valid here."""
        if isinstance(x, list):
            return [row.nan_to_num(0.5, 0.5, 0.5) for row in x]
        return x if x.is_nested else x.nan_to_num(0.5, 0.5, 0.5)

    laid.train, laid.rollout, laid.mask = finite(laid.train), finite(laid.rollout), None
    late = rc.Spec(W.token(), (over("abs", "mean", upper=0.3, drop="token"),), "both")
    for spec in (rc.Spec(), rc.Spec(W.geometric(), (tokens("abs", upper=0.3),), "both"), late):
        reference = laid.correct(spec)
        with shaped(FEW), watched():
            out = between_fences(laid, device).correct(spec, backend="triton")
        assert_like_reference(out, reference)


# --- dtypes ---


@pytest.mark.parametrize(
    ("dtype", "per"), [(torch.int64, "token"), (torch.bfloat16, "sequence"), (torch.float64, "column")]
)
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
    with shaped(FEW), watched():
        out = between_fences(laid, device).correct(spec, backend="triton")
    assert_like_reference(out, reference)


@pytest.mark.parametrize("layout", ["packed_gaps", "padded_left"])
def test_ages_of_tokens_and_of_sequences(layout, device):
    """With their statistics, next to an external value; of versions that float64 would round, and of a filler."""
    laid, far = lay_out(batch(4), layout, torch.float32), 2**60
    mean = over("external", "mean", name="entropy", upper=0.5)
    spec = rc.Spec(
        W.product(upper=1.5, normalize="batch"), (tokens("age", upper=4), over("age", "mean", upper=4), mean)
    )
    of_tokens = laid.versions + far
    of_tokens.view(-1)[next(i for i in laid.places[0] if laid.mask.view(-1)[i])] = -(2**63)
    of_sequences = torch.tensor([3, 6, 7, 9, 0])
    for versions, current in ((of_tokens, far + 7), (of_sequences.to(torch.int16), 7), (of_sequences + far, far + 7)):
        reference = laid.correct(spec, versions=versions, current_version=current)
        assert 0 < reference.keep.sum() < len(reference.keep)
        with shaped(FEW), watched():
            more = {"versions": moved(versions, device), "current_version": current}
            out = between_fences(laid, device).correct(spec, backend="triton", **more)
        assert_like_reference(out, reference)


# --- all of it: make test-all ---
