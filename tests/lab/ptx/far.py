"""Kernels where places in tensors are beyond 2^31; memory that nobody has touched takes no room."""

from __future__ import annotations

import numpy as np
import torch

import rollout_corr as rc
from builders.kernel_cases import assert_like_reference, unchecked
from builders.kernel_file import ALL, Given, batch_of
from builders.rounding import assert_near
from frozen.runners import one_thread
from lab.aot.file_variants import launches_of
from lab.ptx.session import Launch, compiled
from rollout_corr.eject import kernel
from rollout_corr.kernels.correct import launch
from rollout_corr.specs.operands import CorrectOperands

FAR = 2**31 + 1_048_653


def run_beyond_32_bits(seed: int = 0) -> None:
    """The last programs of more than 2^31 tokens: addresses, slots and weights at the end of the batch.

    Memory that nobody has touched takes no room, so only the last tokens and the tables of these programs do.
    """
    tokens, last, programs = FAR, 10_000, 5
    generator = torch.Generator().manual_seed(seed)
    train, rollout = torch.empty(tokens), torch.empty(tokens)
    mask = torch.empty(tokens, dtype=torch.bool)
    rollout[-last:] = -torch.rand(last, generator=generator)
    train[-last:] = rollout[-last:] + 0.1 * torch.randn(last, generator=generator)
    mask[-last:] = True
    given = CorrectOperands(
        train,
        rollout,
        mask,
        torch.tensor([0, tokens - last, tokens - 700, tokens]),
        None,
        per_sequence=False,
        externals=(),
    )
    with one_thread(), compiled(seed=seed, programs=lambda launch: np.arange(launch.programs)[-programs:]) as session:
        found, launches = launch.prepare(given, rc.Spec(rc.Weight.token(lower=0.9, upper=1.1)))
        session.run(launches[0])
    read, _ = session.executed[0]
    tile = 1 << read.arguments["tile_bits"]
    many = (programs - 1) * tile
    assert many < last and read.programs * tile > 2**31
    exact = (train[-many:].double() - rollout[-many:].double()).exp().clamp(0.9, 1.1)
    assert_near(found.weights[-many:].double(), exact, torch.float32, size=0.0)
    # The last owner, behind the last sequence, has the last slot, and the last sequence the one before.
    counts = read.arguments["p_counts"][0]
    assert counts[-2].item() == min(700, tokens % tile)


def run_sequences_beyond_32_bits(weight: rc.Weight, seed: int = 0) -> None:
    """Sequences at the end of more than 2^31 tokens: `decide` zeroes one that it rejects, or `apply` its tokens."""
    offsets, compared = torch.tensor([0, 6_000, 7_700, 12_700, 15_000]), slice(-7_000, None)
    begin = FAR - 15_000
    spec = rc.Spec(weight, (rc.Criterion("ratio", over="sequence", reduce="mean", upper=1.1),), rejected="both")
    train, rollout, mask = torch.empty(FAR), torch.empty(FAR), torch.empty(FAR, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    rollout[begin:] = -torch.rand(15_000, generator=generator)
    train[begin:] = rollout[begin:] + 1e-3 * torch.randn(15_000, generator=generator)
    train[begin + 7_700 : begin + 12_700] += 0.2
    mask[begin:] = True
    wanted = rc.correct(train[begin:], rollout[begin:], mask=mask[begin:], cu_seqlens=offsets, spec=spec)
    assert wanted.keep.tolist() == [True, True, False, True]

    def programs(launch: Launch) -> np.ndarray:
        """List the last programs over tokens, and the first of `read`, which zeroes the counter.

        Over sequences all but the first, which has a million slots of no sequence; so nothing of the first sequence.
        """
        every, name = np.arange(launch.programs), launch.kernel.__name__
        if name == "read_kernel":
            return every[[0, *range(-8, 0)]]
        if name == "apply_kernel":
            return every[-5:]
        many, plan = launch.arguments["sequence_programs"], launch.arguments["PLAN"]
        every = every[: many * (launch.arguments["shares"] if plan.zeroes else 1)]
        return every[every % many > 0]

    given = CorrectOperands(train, rollout, mask, begin + offsets, None, per_sequence=False, externals=())
    with one_thread(), compiled(seed=seed, programs=programs) as session:
        found, launches = launch.prepare(given, spec)
        for each in launches:
            session.run(each)
    assert found.keep[1:].equal(wanted.keep[1:]) and found.mask[compared].equal(wanted.mask[compared])
    assert_near(found.weights[compared], wanted.weights[compared], torch.float32, size=0.0)


def run_far_apart(rows: int, width: int, step: int, seed: int = 0) -> None:
    """Neighbors and rows that lie millions of elements apart, as a column of a table with an entry for each word."""
    row = 2**30 + 5

    def apart(x: torch.Tensor) -> torch.Tensor:
        around = torch.empty(row * (rows - 1) + step * (width - 1) + 1, dtype=x.dtype)
        return around.as_strided(x.shape, (row, step)).copy_(x)

    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, width, generator=generator).bfloat16()
    scale = torch.where(torch.arange(rows) == 1, 0.04, 0.01)[:, None]
    train = rollout + (scale * torch.randn(rows, width, generator=generator)).bfloat16()
    mask = torch.rand(rows, width, generator=generator) < 0.9
    spec = rc.Spec(
        rc.Weight.product(upper=3.0),
        (rc.Criterion("ratio", over="sequence", reduce="max", upper=1.07, drop="token"),),
        rejected="both",
    )
    wanted = rc.correct(train, rollout, mask=mask, spec=spec)
    assert wanted.mask.any(1).tolist() == [True, False, True][:rows]
    wide, wide_mask = apart(train), apart(mask)
    with one_thread(), unchecked(), compiled(seed=seed):
        out = rc.correct(wide, rollout, mask=wide_mask, spec=spec, backend="triton")
    assert_like_reference(out, wanted)


def run_file_beyond_32_bits(seed: int = 0) -> None:
    """The file to copy: sequences at the end of more than 2^31 tokens; its helpers zero one of them."""
    small = batch_of((3_000, 700, 2_000, 5_000, 9), seed, outside=0)
    last = small.train.numel()

    def behind(x: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(FAR, dtype=x.dtype)
        wide[-last:] = x
        return wide

    given = Given(*map(behind, small[:3]), small.cu_seqlens.long() + (FAR - last))

    def programs(launch: Launch) -> np.ndarray:
        every = np.arange(launch.programs)
        return every[-8:] if launch.kernel.__name__ == "read_kernel" else every

    with one_thread(), compiled(seed=seed, programs=programs) as session:
        launches, found = launches_of(*given, ALL)
        for each in launches:
            session.run(each)
    wanted = kernel.correct_reference(*small, ALL)
    assert launches[1].arguments["shares"] > 1 and 0 < wanted.keep.sum() < 5
    assert found.keep.equal(wanted.keep) and found.mask[-last:].equal(wanted.mask)
    assert_near(found.weights[-last:], wanted.weights, torch.float32, size=0.0)
