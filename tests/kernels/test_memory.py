"""The kernels where memory is odd: strides, expanded tensors, offsets that are garbage.

Interpreted on a CPU, compiled on a GPU, as in test_correct.py.
"""

from __future__ import annotations

import bisect
import math

import pytest
import torch
import triton
import triton.language as tl

import rollout_corr as rc
from builders.batches import Laid, lay_out, moved
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    SEQUENCES,
    TOKENS,
    WIDE,
    assert_like_reference,
    batch,
    between_fences,
    bits,
    fitted,
    over,
    same_bits,
    shaped,
    tokens,
    unchecked,
    watched,
)
from rollout_corr.kernels.grid import search_steps
from rollout_corr.kernels.tiles import Extents, owner_before

pytestmark = INTERPRETED

W = rc.Weight


@triton.jit
def owners_kernel(offsets, owners, sequences: tl.int64, tokens: tl.int64, steps, WAYS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    extents = Extents(tokens, sequences, tokens, tokens, steps)
    tl.store(owners + token, owner_before(offsets, token, extents, steps, WAYS))


def test_the_search_for_owners(device):
    """The last owner that begins before a token is found in as many steps as the launcher allows."""
    ways = 8
    for sequences in (0, 1, ways - 2, ways - 1, ways, ways**2 + 2 * ways - 1):
        generator = torch.Generator().manual_seed(sequences)
        lengths = torch.randint(0, 12, (sequences,), generator=generator)
        lengths[sequences // 3 : sequences // 2] = 0
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + 5
        tokens = int(offsets[-1]) + 9
        owners = torch.empty(tokens, dtype=torch.int64, device=device)
        steps = search_steps(sequences, ways)
        owners_kernel[(tokens,)](offsets.to(device), owners, sequences, tokens, steps, ways)
        assert owners.tolist() == [bisect.bisect_left(offsets.tolist(), token) for token in range(tokens)]


@pytest.mark.parametrize("packed", [True, False])
def test_expanded_tensors(packed, device):
    """Stride 0: one value for all, one row for all, one column for all."""
    spec = rc.Spec(W.product(upper=3.0), (tokens("abs", upper=0.2), over("ratio", "mean", upper=1.3)), "both")
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
        reference = rc.correct(*given[:2], mask=given[2], spec=spec, **others)
        assert not reference.mask.all()
        with shaped(FEW), watched():
            here = [moved(x, device) for x in given]
            out = rc.correct(*here[:2], mask=here[2], spec=spec, backend="triton", **others)
        assert_like_reference(out, reference)


def test_inputs_are_left_as_they_are(device):
    sequences = batch(7)
    spec = fitted(TOKENS, sequences)
    laid = between_fences(lay_out(sequences, "padded_holes", torch.float32), device)
    given = [laid.train, laid.rollout, laid.mask, laid.advantages, laid.external["entropy"]]
    copies = [bits(x).clone() for x in given]
    with shaped(FEW):
        laid.correct(spec, backend="triton")
    assert all(torch.equal(bits(x), copy) for x, copy in zip(given, copies, strict=True))


# --- offsets that are garbage ---


@pytest.mark.parametrize(
    ("offsets", "spec", "shape"),
    [
        ([60, 40, 20, 0], SEQUENCES, NARROW),
        ([0, 50, 5, 55, 10, 300], SEQUENCES, WIDE),
        ([-(2**63), 7, 2**63 - 1, 2**62, -(2**62), 2**40 + 9], SEQUENCES, NARROW),
        (torch.tensor([-(2**31), 2**31 - 1, 33, -(2**31)], dtype=torch.int32), TOKENS, WIDE),
    ],
    ids=["falling", "overlapping", "huge", "huge int32"],
)
def test_offsets_that_are_garbage(offsets, spec, shape, device):
    """Memory around tensors and the content of fresh memory change no bit; numbers are wrong, and finite.

    A token may have several owners then, which write its mask and weight in any order: that race is the caller's. None
    is without one, which programs of `apply` with several slots would leave unwritten.
    """
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(60, generator=generator)
    train = rollout + 0.3 * torch.randn(60, generator=generator)
    mask = torch.rand(60, generator=generator) > 0.2
    laid = Laid(train, rollout, mask, [], (60,), torch.as_tensor(offsets), torch.sign(train + 0.5), {"entropy": train})
    found = []
    for fence, filling in ((math.nan, 0xFF), (7.0, 0x00)):
        placed = between_fences(laid, device, fence)
        with unchecked(), shaped(shape), watched(filling):
            found.append(placed.correct(spec, backend="triton"))
        assert found[-1].weights.isfinite().all()
        assert all(math.isfinite(value) for value in found[-1].metrics().values())
    assert same_bits(*found)
