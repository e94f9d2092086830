"""The kernels where memory is odd: strides, expanded tensors, offsets that are garbage or a column of a table."""

from __future__ import annotations

import bisect
import math

import pytest
import torch
import triton
import triton.language as tl

import rollout_corr as rc
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    WIDE,
    assert_loss_like_reference,
    between_fences,
    bits,
    check,
    given,
    same_bits,
    shaped,
    unchecked,
    watched,
)
from rollout_corr.backends import turns as reading
from rollout_corr.kernels.grid import search_steps
from rollout_corr.kernels.tiles import Extents, owner_before

pytestmark = INTERPRETED

C, W = rc.Criterion, rc.Weight


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
    criteria = (C("abs", upper=0.2), C("ratio", "sequence", "mean", upper=1.3))
    spec = rc.Spec(W.product(upper=3.0), criteria, "both")
    shape = (40,) if packed else (4, 21)
    offsets = {"cu_seqlens": torch.tensor([2, 9, 9, 33, 38])} if packed else {}
    rollout = -torch.rand(shape, generator=torch.Generator().manual_seed(0))
    value, ones = torch.tensor(-0.3).expand(shape), torch.ones((), dtype=torch.int64).expand(shape)
    expanded = [(value, rollout, ones), (rollout, value, None)]
    if not packed:
        mask = torch.tensor([1, 0, 1, 1])[:, None].expand(shape)
        expanded += [(rollout[:1].expand(shape), rollout[:, :1].expand(shape), mask)]
    for *logps, mask in expanded:
        out, _ = check(given(spec, *logps, mask=mask, **offsets), device)
        assert not out.mask.all()


# --- offsets ---


def batch(tokens):
    """Log-probs, and a mask of four fifths."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(tokens, generator=generator)
    train = rollout + 0.3 * torch.randn(tokens, generator=generator)
    return train, rollout, torch.rand(tokens, generator=generator) > 0.2


OF_TOKENS = rc.Spec(
    W.token(lower=0.8, upper=1.2),
    (C("k1", lower=0.1, upper=1.0), C("abs", "sequence", "sum", upper=1.0, when="outward", drop="token")),
    "both",
)
OF_SEQUENCES = rc.Spec(
    W.product(upper=1.5),
    (
        C("ratio", "sequence", "min", lower=0.1),
        C("k2", "sequence", "sum", upper=1.0),
        C("external", "sequence", "mean", name="entropy", upper=1.0),
    ),
)
OF_TURNS = rc.Spec(
    W.geometric(upper=1.25, over="turn"), (C("k3", "turn", "max", upper=0.1, drop="token"),), rejected="both"
)


@pytest.mark.parametrize(
    ("offsets", "spec", "shape"),
    [
        ([60, 40, 20, 0], OF_SEQUENCES, NARROW),
        ([0, 50, 5, 55, 10, 300], OF_SEQUENCES, WIDE),
        ([-(2**63), 7, 2**63 - 1, 2**62, -(2**62), 2**40 + 9], OF_SEQUENCES, NARROW),
        (torch.tensor([-(2**31), 2**31 - 1, 33, -(2**31)], dtype=torch.int32), OF_TOKENS, WIDE),
    ],
    ids=["falling", "overlapping", "huge", "huge int32"],
)
def test_offsets_that_are_garbage(offsets, spec, shape, device):
    """Memory around tensors and the content of fresh memory change no bit; numbers are wrong, and finite.

    A token may have several owners then, which write its mask and weight in any order: that race is the caller's. None
    is without one, which programs of `apply` with several slots would leave unwritten.
    """
    train, rollout, mask = batch(60)
    fields = {"mask": mask, "cu_seqlens": torch.as_tensor(offsets), "external": {"entropy": train}}
    call, found = given(spec, train, rollout, torch.sign(train + 0.5), **fields), []
    for fence, filling in ((math.nan, 0xFF), (7.0, 0x00)):
        with unchecked(), shaped(shape), watched(filling):
            found.append(between_fences(call, device, fence).corrected(spec, "triton"))
        assert found[-1].weights.isfinite().all()
        assert all(math.isfinite(value) for value in found[-1].metrics().values())
    assert same_bits(*found)


@pytest.mark.parametrize("turns", [[0, 9, 3, 20, 4, 29], [-4, 3, 60], [3]])
@pytest.mark.parametrize("offsets", [[0, 20, 3, 29], [0, 5, 6, 29]])
def test_wrong_offsets_of_turns_stay_within_the_batch(offsets, turns, device, monkeypatch):
    """Nobody reads offsets of a device: what falls, overlaps or lies outside gives wrong numbers and nothing else."""
    monkeypatch.setattr(reading, "read_offsets_of_turns", lambda turns, *_: turns)
    train, rollout, mask = batch(29)
    call = given(OF_TURNS, train, rollout, mask=mask, cu_seqlens=torch.tensor(offsets), turns=torch.tensor(turns))
    with shaped(WIDE), unchecked(), watched():
        out = between_fences(call, device).corrected(OF_TURNS, "triton")
    assert out.keep_turns.shape == (len(turns) - 1,)
    assert set(bits(out.keep_turns.cpu()).tolist()) <= {0, 1}


@pytest.mark.parametrize("lossy", [False, True])
def test_offsets_that_are_a_column_of_a_table(lossy, device):
    """Kernels have their address, and no stride: of a correction, and of a loss whose turns have factors."""
    train, rollout, mask = batch(90)
    fields = {
        "mask": mask,
        "cu_seqlens": torch.tensor([2, 40, 41, 41, 85]),
        "turns": torch.tensor([2, 20, 40, 41, 60, 85]),
    }
    call = given(OF_SEQUENCES if not lossy else None, train, rollout, mask * 0.5, external={"entropy": train}, **fields)
    columns = {name: torch.stack([x, x // 3], 1)[:, 0] for name, x in fields.items() if name != "mask"}
    call.drawn.batch |= columns
    if not lossy:
        check(call, device)
        return
    call.drawn.tensors["new"], call.loss = train + 0.05, rc.Loss(rc.GSPO(over="turn"), rc.Mean("sequence"))
    with shaped(FEW), unchecked():
        assert_loss_like_reference(between_fences(call, device))
