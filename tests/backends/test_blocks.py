"""The ways to run the definition agree: in blocks, whole; and only the CPU backend reads values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import rollout_corr as rc
from rollout_corr.backends import blocks, cpu_sums
from rollout_corr.backends.batch import OpenBatch, Result
from rollout_corr.backends.blocks import Compaction
from rollout_corr.backends.cpu_sums import SMALL
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.backends.whole import run_whole
from rollout_corr.testing import example_batch, pad

C = rc.Criterion
GEOMETRIC = C("ratio", over="sequence", reduce="mean", lower=0.995, upper=1.005)
SPECS = {
    "metrics": rc.Spec(),
    "full": rc.Spec(detail="full"),
    "token": rc.Spec(weight=rc.Weight.token(lower=0.9, upper=1.1), criteria=(GEOMETRIC,)),
    "icepop": rc.Spec(weight=rc.Weight.token(lower=0.9, upper=1.1, outside="zero"), rejected="both"),
    "product": rc.Spec(weight=rc.Weight.product(upper=2.0, normalize="batch"), criteria=(C("tv", upper=0.05),)),
    "geometric": rc.Spec(weight=rc.Weight.geometric(token_clamp=0.1), rejected="zero", criteria=(GEOMETRIC,)),
    "statistics": rc.Spec(
        criteria=(
            C("k3", upper=0.01),
            C("binary_kl_symmetric", over="sequence", reduce="mean", upper=0.002),
            C("k2", over="sequence", reduce="max", upper=0.05),
            C("abs", over="sequence", reduce="sum", upper=30.0),
        ),
        rejected="both",
    ),
    "kept": rc.Spec(
        weight=rc.Weight.product(upper=5.0),
        criteria=(C("ratio", lower=0.9, upper=1.1), C("ratio", lower=1e-4, drop="sequence"), GEOMETRIC),
        sums_over="kept",
    ),
    "outward": rc.Spec(
        criteria=(C("ratio_deviation", over="sequence", reduce="mean", upper=0.01, when="outward", drop="token"),)
    ),
    "reports": rc.Spec(weight=rc.Weight.token(upper=2.0), report=("verl", "xtuner", "skyrl")),
}


def inputs(layout: str, seed: int = 0) -> dict[str, Tensor | None]:
    """24 sequences, some with holes, one empty, one with a NaN, per-token advantages."""
    batch = example_batch(sequences=24, median_length=60, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    train, mask = batch.train_logp.clone(), batch.mask.clone()
    n = train.numel()
    mask &= torch.rand(n, generator=generator) > 0.05
    mask[int(batch.cu_seqlens[7]) : int(batch.cu_seqlens[8])] = False
    train[int(batch.cu_seqlens[10]) - 1] = torch.nan
    advantages = torch.randn(n, generator=generator)
    values = {"train_logp": train, "rollout_logp": batch.rollout_logp, "mask": mask, "advantages": advantages}
    if layout == "packed":
        return {**values, "cu_seqlens": batch.cu_seqlens}
    return {name: pad(x, batch.lengths) for name, x in values.items()}


def assert_same_metrics(got: rc.Correction, wanted: rc.Correction, relative: float, least: float = 1e-3) -> None:
    for scheme in wanted.statistics.spec.report:
        a, b = got.metrics(scheme), wanted.metrics(scheme)
        assert list(a) == list(b)
        wrong = {key: (a[key], b[key]) for key in b if abs(a[key] - b[key]) > relative * max(least, abs(b[key]))}
        assert not wrong, wrong


def whole(given: dict[str, Tensor | None], spec: rc.Spec) -> Result:
    batch = rc.Batch(mask=given["mask"], cu_seqlens=given.get("cu_seqlens"))
    read = Given(given["train_logp"], given["rollout_logp"], batch, spec, given["advantages"])
    return run_whole(read_batch(read), spec)


@pytest.mark.parametrize(("name", "layout"), list(zip(SPECS, ("packed", "padded") * 5, strict=True)))
def test_whole_equals_blocks(name: str, layout: str) -> None:
    """The code for other devices, without compaction and without reading a value, gives the same bits."""
    spec, given = SPECS[name], inputs(layout)
    if spec.weight is not None and spec.weight.normalize is not None:
        spec = rc.Spec(weight=rc.Weight.product(upper=2.0), criteria=spec.criteria)
    expected = rc.correct(**given, spec=spec)
    got = whole(given, spec)
    assert torch.equal(got.keep, expected.keep)
    assert not expected.keep.all() or not spec.criteria
    if expected.weights is None:
        assert got.weights is None
    else:
        assert torch.equal(got.weights, expected.weights)
    assert torch.equal(given["mask"] if got.mask is None else got.mask, expected.mask)
    result = rc.Correction(got.weights, got.mask, got.keep, got.statistics)
    # Measured: float32 sums in another order differ by up to 4e-6 on these batches.
    assert_same_metrics(result, expected, 2e-5)


@pytest.mark.parametrize(("name", "layout"), list(zip(SPECS, ("packed", "padded") * 5, strict=True)))
def test_block_size_changes_nothing(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, given = SPECS[name], inputs(layout)
    expected = rc.correct(**given, spec=spec)
    for size in (1, 300):
        monkeypatch.setattr(blocks, "BLOCK", size)
        got = rc.correct(**given, spec=spec)
        assert torch.equal(got.keep, expected.keep)
        assert torch.equal(got.mask, expected.mask)
        if expected.weights is not None and spec.weight is not None and spec.weight.normalize is None:
            assert torch.equal(got.weights, expected.weights)
        assert_same_metrics(got, expected, 2e-5)


@pytest.mark.parametrize(("name", "layout"), list(zip(SPECS, ("packed", "padded") * 5, strict=True)))
def test_nothing_reads_a_value_on_a_device(name: str, layout: str) -> None:
    """Meta tensors have no values: whatever would wait for a device raises on them."""
    given = {key: x.to("meta") for key, x in inputs(layout).items()}
    out = rc.correct(**given, spec=SPECS[name])
    assert out.keep.device.type == out.mask.device.type == out.statistics.sums.device.type == "meta"
    assert out.mask.shape == given["mask"].shape
    assert out.weights is None or out.weights.shape == given["train_logp"].shape


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0], [1, 0, 1, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 0]]])
def test_compaction_takes_and_puts(mask: list[list[int]]) -> None:
    valid = torch.tensor(mask, dtype=torch.bool)
    compaction = Compaction(valid.flatten().nonzero().squeeze(1), int(valid.sum()))
    x = torch.arange(valid.numel()).view(valid.shape)
    assert torch.equal(compaction.take(x), x[valid])
    out = torch.full_like(x, -1)
    compaction.put(out, x[valid])
    assert torch.equal(out, torch.where(valid, x, 0))


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("packed", "mask_dtype", "name"),
    [
        (True, None, "token"),
        (False, torch.int64, "geometric"),
        (True, torch.bool, "kept"),
        (False, torch.float32, "statistics"),
        (True, torch.int64, "outward"),
        (False, torch.bool, "icepop"),
    ],
)
def test_every_slot_is_written(
    packed: bool, mask_dtype: torch.dtype | None, name: str, unwritten_memory_is_nan: None
) -> None:
    """Slots before, between and behind sequences too, and the rows of a batch that has no token."""
    generator = torch.Generator().manual_seed(5)
    shape = (90,) if packed else (3, 30)
    train, rollout = (-torch.rand(shape, generator=generator) for _ in range(2))
    mask = None if mask_dtype is None else (torch.rand(shape, generator=generator) > 0.3).to(mask_dtype)
    offsets = torch.tensor([4, 30, 30, 77]) if packed else None
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[slice(4, 77) if packed else slice(None)] = True
    out = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=SPECS[name], advantages=torch.ones(shape))
    given = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    if out.mask is not mask:
        assert (out.mask[out.mask != given] == 0).all()
        assert (out.mask[~inside] == 0).all()
    if out.weights is not None:
        assert out.weights.isfinite().all()
        assert (out.weights[~(inside & (given != 0))] == 0.0).all()
    new = train.clone().requires_grad_()
    rc.policy_loss(new, torch.ones(shape), mask=mask, cu_seqlens=offsets, old_logp=rollout).value.backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert (new.grad[~(inside & (given != 0))] == 0.0).all()


@pytest.mark.parametrize(
    ("outside", "lower", "upper", "beyond", "small"),
    [
        ("clamp", 0.3, 2.0, 0, 0),
        ("clamp", 0.3, 2.0, 3, 0),
        ("zero", 0.3, 2.0, 3, 0),
        ("zero", 0.3, 2.0, 2000, 0),
        ("clamp", 0.3, 2.0, 2000, SMALL),
        ("zero", 0.3, 2.0, 3, SMALL),
        # A token that is small otherwise is beyond the bound.
        ("zero", 0.92, 2.0, 3, 0),
        ("clamp", 0.3, 1.09, 3, 0),
    ],
)
def test_outliers_beyond_the_bounds_are_counted_like_many_tokens(
    outside: str, lower: float, upper: float, beyond: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few outliers the sums of their sequences are corrected; with many, or without the CPU's sums, all are summed.

    Up to a number of tokens all are taken one by one.
    """
    monkeypatch.setattr(cpu_sums, "SMALL", small)
    generator = torch.Generator().manual_seed(8)
    rollout = -torch.rand((4, 1500), generator=generator)
    train = rollout + 0.02 * torch.randn(rollout.shape, generator=generator)
    far = torch.randperm(train.numel(), generator=generator)[:beyond]
    train.view(-1)[far] += torch.where(far % 3 == 0, -2.0, 1.5)
    train[0, 7] = 25.0  # beyond the clamp too
    train[0, 8:10] = rollout[0, 8:10] + torch.tensor([0.1, -0.1])
    mask = (torch.arange(1500) < torch.tensor([1500, 3, 900, 1200])[:, None]).long()
    given: dict[str, Tensor | None] = {"train_logp": train, "rollout_logp": rollout, "mask": mask}
    given |= {"cu_seqlens": None, "advantages": None}
    spec = rc.Spec(weight=rc.Weight.token(lower=lower, upper=upper, outside=outside))
    with mock.patch.object(cpu_sums, "BoundedSums", wraps=cpu_sums.BoundedSums) as bounded:
        found = rc.correct(**given, spec=spec)
    assert bounded.call_count == (beyond < 2000 or small > 0)
    wanted = rc.Correction(None, None, found.keep, whole(given, spec).statistics)
    # Measured: 2e-7, because float32 sums have another order; e^20 adds 1e-8. The other way rounds weights near 1 to
    # float32, by up to 6e-8, which their standard deviation keeps.
    assert_same_metrics(found, wanted, 1e-6, least=0.06)
    ratios = (train - rollout)[mask == 1].tolist()
    metrics = found.metrics()
    assert metrics["weight_above_upper_fraction"] == sum(x > math.log(upper) for x in ratios) / len(ratios)
    assert metrics["weight_below_lower_fraction"] == sum(x < math.log(lower) for x in ratios) / len(ratios)


@pytest.mark.parametrize("size", [1, 6, 12, 1000])
@pytest.mark.parametrize("lengths", [[], [0, 0], [5, 1, 0, 7, 20, 0, 3, 3, 3, 2]])
def test_spans_are_as_large_as_they_may_be(lengths: list[int], size: int) -> None:
    """Every sequence is in one span; a further one would be too much."""
    offsets = torch.tensor([4, *lengths]).cumsum(0)
    batch = OpenBatch(torch.zeros(60), torch.zeros(60), None, offsets, len(lengths), lambda x: x, None)
    found = list(blocks.spans(batch, size))
    assert [i for rows, _ in found for i in range(rows.start, rows.stop)] == [*range(len(lengths))]
    assert len(found) == 1 or all(rows.stop > rows.start for rows, _ in found)
    for rows, slots in found:
        span, longer = lengths[rows], lengths[rows.start : rows.stop + 1]
        assert slots == slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        assert sum(span) <= size or len(span) == 1
        assert rows.stop == len(lengths) or sum(longer) > size


def test_a_batch_a_little_larger_than_a_block_is_one_where_that_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a mask, tokens outside, or room of the caller's, with which a larger block would be more memory."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    spec = rc.Spec(weight=rc.Weight.token(upper=1.1))

    def cut(size: int, of: rc.Spec = spec, outside: int = 0, **more: object) -> int:
        x, offsets = torch.zeros(size), torch.tensor([0, 40, size - outside])
        batch = read_batch(Given(x, x, rc.Batch(cu_seqlens=offsets), of))
        for name, value in more.items():
            setattr(batch, name, value)
        return len(list(blocks.blocks_of(batch, blocks.slots_of(batch, of))))

    assert [cut(size) for size in (64, 72, 73)] == [1, 1, 2]
    assert cut(72, outside=1) == cut(72, mask=torch.ones(72)) == cut(72, weights_out=torch.zeros(72)) == 2
    assert [cut(size, rc.Spec()) for size in (128, 129)] == [1, 2]
