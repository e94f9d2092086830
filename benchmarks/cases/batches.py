"""Batches from real use: tensors in both layouts for the CPU benchmark, and the cases of the GPU benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# CPU: rows x width. The last is the largest that a shipped recipe of verl uses: a step's 2048 answers of up to 8192
# tokens. The first fits into a second-level cache, the third has few long rows.
SHAPES = ((64, 1024), (256, 2048), (64, 16384), (1024, 8192), (2048, 8192))
# The longest sequence as a part of the width, where that is not 1: 1024 x 8192 is verl's driver, a quarter full.
LONGEST = {(1024, 8192): 0.4}
LAYOUTS = ("padded", "packed")

# GPU: standard deviations of D = old - rollout, of D at one token in 1000, and of new - old. Some weights reach their
# bound, some short sequences are rejected and some are not, a few tokens are clipped.
USUAL, RARE, STEP = 0.01, 0.5, 0.1
# Tokens of a padding sequence in xtuner's packs.
PAD = 1024


@dataclass(frozen=True)
class Batch:
    """Tensors that contenders compute on.

    Attributes:
        old: [N] or [B, T], log-probs under the policy before the step.
        rollout: Shaped like `old`, log-probs under the rollout engine.
        mask: Shaped like `old`, non-zero is valid; None: all tokens are.
        cu_seqlens: [S + 1] int, or None when padded.
        lengths: [S] int64 on the CPU: slots of a sequence when packed, tokens of a row when padded.
        new: Shaped like `old`, under the policy in training, requires grad.
        advantages: Shaped like `old`, or [S], fp32.
        padded: The tokens of a packed batch as rows, for who has no packed form; None if there are none.
    """

    old: Tensor
    rollout: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    lengths: Tensor
    new: Tensor | None = None
    advantages: Tensor | None = None
    padded: Batch | None = None

    @property
    def slots(self) -> int:
        return self.old.numel()

    @property
    def valid(self) -> Tensor:
        """Bool, shaped like the log-probs."""
        return torch.ones_like(self.old, dtype=torch.bool) if self.mask is None else self.mask != 0

    @property
    def tokens(self) -> int:
        """Number of valid tokens."""
        return int(self.valid.sum())


# --- CPU --------------------------------------------------------------------------------------------------------------


def both_layouts(rows: int, width: int, seed: int = 0) -> dict[str, Batch]:
    """Make one batch in both layouts, {"padded": ..., "packed": ...}.

    Padded: [rows, width] fp32 with an int64 mask, right-padded, as verl's driver has it. Packed: its valid tokens, no
    mask, int64 offsets. Lengths are uniform from 10 % to 100 % of the width, or to what LONGEST says. D has a standard
    deviation of 0.02, and of 1 at one token in 1000: weights reach their bound and short sequences are rejected.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    longest = LONGEST.get((rows, width), 1.0)
    lengths = (width * (0.1 + (longest - 0.1) * uniform(rows))).long().clamp(1, width)
    valid = torch.arange(width) < lengths[:, None]
    rollout = uniform(rows, width).clamp(min=1e-4).log()
    scale = torch.where(uniform(rows, width) < 1e-3, 1.0, 0.02)
    old = (rollout + scale * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    new = (old + STEP * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, width)
    every = [torch.where(valid, x, 0.0) for x in (old, rollout, new, advantages)]
    offsets = offsets_of(lengths)

    def batch(mask: Tensor | None, cu_seqlens: Tensor | None, tensors: list[Tensor], padded: Batch | None) -> Batch:
        old, rollout, new, advantages = tensors
        return Batch(old, rollout, mask, cu_seqlens, lengths, new.requires_grad_(), advantages, padded)

    padded = batch(valid.long(), None, every, None)
    return {"padded": padded, "packed": batch(None, offsets, [x[valid] for x in every], padded)}


def offsets_of(lengths: Tensor) -> Tensor:
    """[S] lengths -> [S + 1] offsets."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


# --- GPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Shape of a batch that occurs in practice.

    Args:
        name: Its name in tables.
        tokens: Slots: N of a packed batch, rows x width of a padded one.
        sequences: Number of sequences.
        packed: Whether sequences lie behind each other ([N] and offsets) or are the rows of [B, T].
        skew: Standard deviation of the logarithm of a sequence's length, before lengths are scaled to fit.
        fill: Padded: the part of the slots that are tokens. Packed: 1.
        left: Padded on the left.
        prompt: The first part of every sequence that the mask leaves out.
        pads: Packed: the last `pads` sequences are PAD tokens each, which the mask leaves out.
        logp: Dtype of all log-probs.
        mask: Dtype of the mask, None without one.
    """

    name: str
    tokens: int
    sequences: int
    packed: bool = True
    skew: float = 0.7
    fill: float = 1.0
    left: bool = False
    prompt: float = 0.2
    pads: int = 0
    logp: torch.dtype = torch.float32
    mask: torch.dtype | None = torch.bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the log-probs."""
        return (self.tokens,) if self.packed else (self.sequences, self.tokens // self.sequences)

    def tiny(self) -> Case:
        """Return a case of the same kind, so small that it shows only that things work."""
        sequences, pads = min(self.sequences, 8), min(self.pads, 1)
        width = min(self.tokens // self.sequences, 96)
        return replace(self, sequences=sequences, pads=pads, tokens=sequences * width + pads * PAD)


def _rows(name: str, tokens: int, sequences: int, **more: Any) -> Case:
    """Padded rows without prompts, a quarter full, with an int64 mask."""
    given = {"packed": False, "prompt": 0.0, "fill": 0.25, "mask": torch.int64, **more}
    return Case(name, tokens, sequences, **given)


CASES = {
    case.name: case
    for case in (
        # Short answers in one row: prime-rl#2951.
        Case("32k in 256", 1 << 15, 256),
        # Prompts and answers, padding at the end.
        Case("xtuner's pack", 1 << 15, 37, skew=0.9, pads=3),
        # A micro-batch of one row.
        _rows("SkyRL's row", 4096, 1, left=True, mask=torch.float32),
        # A generation of 64 answers.
        _rows("TRL's batch", 1 << 16, 64, fill=0.4),
        # A step of verl's driver.
        _rows("1024 x 8192 at 25 %", 1 << 23, 1024),
        # A step of a small run, or a rank's share of a large one; one sequence of that many tokens.
        Case("1M", 1 << 20, 256),
        Case("1M in 1", 1 << 20, 1),
        # A step of a large run: in fp32, in bf16, padded and full, in short answers.
        Case("16M", 1 << 24, 4096),
        Case("16M, bf16", 1 << 24, 4096, logp=torch.bfloat16),
        _rows("2048 x 8192, int64", 1 << 24, 2048, skew=0.0, fill=1.0),
        Case("16M in 100,000", 1 << 24, 100_000),
        # Larger than any cache.
        Case("64M", 1 << 26, 16_384),
    )
}


def lengths_of(case: Case, seed: int) -> Tensor:
    """Draw [S] int64 on the CPU, each at least 1: exactly the slots of a packed batch, about `fill` of a padded one."""
    generator = torch.Generator().manual_seed(seed)
    real = case.sequences - case.pads
    share = (case.skew * torch.randn(real, generator=generator, dtype=torch.float64)).exp()
    share /= share.sum()
    if not case.packed:
        return (share * (case.fill * case.tokens)).round().long().clamp(1, case.shape[1])
    tokens = case.tokens - case.pads * PAD
    bounds = (share.cumsum(0) * (tokens - real)).round().long()
    bounds[-1] = tokens - real
    lengths = bounds.diff(prepend=bounds.new_zeros(1)) + 1
    return torch.cat([lengths, torch.full((case.pads,), PAD)])


def make(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Batch:
    """Make the tensors of a case.

    Args:
        case: The shape.
        device: Where; random numbers are drawn there too, because drawing 64M on a CPU takes seconds.
        seed: Decides the numbers, per kind of device; another one for every batch that must not be in a cache yet.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = lengths_of(case, seed)
    held = lengths.to(device)

    def uniform() -> Tensor:
        return torch.rand(case.shape, generator=generator, device=device)

    def normal() -> Tensor:
        return torch.randn(case.shape, generator=generator, device=device)

    rollout = uniform().clamp_(min=1e-4).log_()
    spread = torch.where(uniform() < 1e-3, RARE, USUAL)
    old = (rollout + spread * normal()).clamp_(max=0.0)
    if case.packed:
        offsets = offsets_of(lengths)
        starts = offsets[:-1].to(device).repeat_interleave(held, output_size=case.tokens)
        place = torch.arange(case.tokens, device=device) - starts
        prompts = (case.prompt * held).long()
        if case.pads:
            prompts[-case.pads :] = PAD
        valid = place >= prompts.repeat_interleave(held, output_size=case.tokens)
        cu_seqlens = offsets.to(device, torch.int32)
    else:
        column = torch.arange(case.shape[1], device=device).expand(case.shape)
        valid = column >= case.shape[1] - held[:, None] if case.left else column < held[:, None]
        cu_seqlens = None
    if case.sequences == 1:
        # Its mean D decides for the whole batch: a loss of nothing but a rejected sequence has no gradient to compare.
        old = (old - torch.where(valid, old - rollout, 0.0).sum() / valid.sum()).clamp_(max=0.0)
    new = (old + STEP * normal()).clamp_(max=0.0)
    if not case.packed:
        old, new, rollout = (torch.where(valid, x, 0.0) for x in (old, new, rollout))
    return Batch(
        old=old.to(case.logp),
        rollout=rollout.to(case.logp),
        mask=None if case.mask is None else valid.to(case.mask),
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        new=new.to(case.logp).requires_grad_(),
        advantages=normal(),
    )
