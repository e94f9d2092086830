"""Batches from real use, on any device: whose they are, and how their tensors lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Standard deviations of D = old - rollout, of D at one token in 1000, and of new - old. Some weights meet their bound,
# some short sequences are rejected and some are not, a few tokens are clipped.
USUAL, RARE, STEP = 0.01, 0.5, 0.1


@dataclass(frozen=True)
class Case:
    """A batch that somebody has.

    Args:
        name: What tables call it.
        whose: Where such a batch occurs.
        tokens: Slots: of a packed batch N, of a padded one rows x width.
        sequences: How many.
        packed: By offsets, or the rows of [B, T].
        skew: Standard deviation of the logarithm of a sequence's length, before lengths are scaled to fit.
        fill: Padded: the part of the slots that are tokens. Packed: 1.
        left: Padded on the left.
        prompt: The first part of every sequence that the mask leaves out.
        pads: Packed: so many of the sequences, at the end, are 1024 pads each, which the mask leaves out.
        logp: Dtype of all log-probs.
        mask: Dtype of the mask, None without one.
    """

    name: str
    whose: str
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
        """Of the log-probs."""
        return (self.tokens,) if self.packed else (self.sequences, self.tokens // self.sequences)

    def tiny(self) -> Case:
        """The same kind of batch, of a size that shows only that things work."""
        sequences = min(self.sequences, 8)
        pads = min(self.pads, 1)
        width = min(self.tokens // self.sequences, 96)
        return replace(self, sequences=sequences, pads=pads, tokens=sequences * width + pads * PAD)


PAD = 1024

CASES = (
    Case("32k in 256", "a packed batch of short answers (prime-rl#2951)", 1 << 15, 256),
    Case("xtuner's pack", "a pack of xtuner: prompts and answers, pads at its end", 1 << 15, 37, skew=0.9, pads=3),
    Case(
        "SkyRL's row",
        "a micro-batch of SkyRL: one row, on the right, float mask",
        4096,
        1,
        packed=False,
        fill=0.25,
        left=True,
        prompt=0.0,
        mask=torch.float32,
    ),
    Case(
        "TRL's batch",
        "a generation of TRL: 64 answers of up to 1024 tokens, int64 mask",
        1 << 16,
        64,
        packed=False,
        fill=0.4,
        prompt=0.0,
        mask=torch.int64,
    ),
    Case(
        "1024 x 8192 at 25 %",
        "a step of verl's driver, int64 mask",
        1 << 23,
        1024,
        packed=False,
        fill=0.25,
        prompt=0.0,
        mask=torch.int64,
    ),
    Case("1M", "a step of a small run, or a rank's share", 1 << 20, 256),
    Case("1M in 1", "one sequence of a million tokens", 1 << 20, 1),
    Case("16M", "a step of a large run", 1 << 24, 4096),
    Case("16M, bf16", "the same with log-probs in bf16", 1 << 24, 4096, logp=torch.bfloat16),
    Case(
        "2048 x 8192, int64",
        "the same padded and full, int64 mask",
        1 << 24,
        2048,
        packed=False,
        skew=0.0,
        prompt=0.0,
        mask=torch.int64,
    ),
    Case("16M in 100,000", "the same in short answers", 1 << 24, 100_000),
    Case("64M", "larger than any cache, beyond any doubt", 1 << 26, 16_384),
)


def named(name: str) -> Case:
    """A case by its name."""
    return next(case for case in CASES if case.name == name)


@dataclass(frozen=True)
class Batch:
    """The tensors of a case on a device.

    Attributes:
        case: What it is.
        new: [N] or [B, T], under the policy that trains; requires grad.
        old: Same shape, under the policy before the step.
        rollout: Same shape, under the engine.
        advantages: Same shape, fp32.
        mask: Same shape or None.
        cu_seqlens: [S + 1] int32, or None when padded.
        lengths: [S] int64 on the CPU: slots of a sequence when packed, tokens of a row when padded.
        valid_tokens: How many the mask selects.
    """

    case: Case
    new: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    lengths: Tensor
    valid_tokens: int

    @property
    def slots(self) -> int:
        return self.old.numel()

    @property
    def valid(self) -> Tensor:
        """Bool, shaped like the log-probs."""
        return torch.ones_like(self.old, dtype=torch.bool) if self.mask is None else self.mask != 0


def lengths_of(case: Case, seed: int) -> Tensor:
    """[S] int64 on the CPU, each at least 1: exactly the slots of a packed batch, about `fill` of a padded one's."""
    generator = torch.Generator().manual_seed(seed)
    real = case.sequences - case.pads
    share = (case.skew * torch.randn(real, generator=generator, dtype=torch.float64)).exp()
    share /= share.sum()
    if not case.packed:
        width = case.shape[1]
        return (share * (case.fill * case.tokens)).round().long().clamp(1, width)
    tokens = case.tokens - case.pads * PAD
    bounds = (share.cumsum(0) * (tokens - real)).round().long()
    bounds[-1] = tokens - real
    lengths = bounds.diff(prepend=bounds.new_zeros(1)) + 1
    return torch.cat([lengths, torch.full((case.pads,), PAD)])


def make(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Batch:
    """The tensors of a case, of random numbers that a seed and a kind of device decide.

    Args:
        case: What to make.
        device: Where; drawn there too, since drawing 64M numbers on a CPU takes seconds.
        seed: Another one for every batch that must not be in a cache yet.
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
    new = (old + STEP * normal()).clamp_(max=0.0)
    if case.packed:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
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
        old, new, rollout = (torch.where(valid, x, 0.0) for x in (old, new, rollout))
    return Batch(
        case,
        new.to(case.logp).requires_grad_(),
        old.to(case.logp),
        rollout.to(case.logp),
        normal(),
        None if case.mask is None else valid.to(case.mask),
        cu_seqlens,
        lengths,
        int(valid.sum()) if case.mask is not None else case.tokens,
    )


# --- scaling ---


def by_tokens(most: int) -> list[Case]:
    """1k to `most` tokens in sequences of about 512."""
    sizes = [1 << power for power in range(10, 27, 2) if 1 << power <= most]
    return [Case(f"{size // 1024}k", "time against tokens", size, max(1, size // 512)) for size in sizes]


def by_sequences(tokens: int) -> list[Case]:
    """The same tokens in 1 to 100,000 sequences."""
    counts = [count for count in (1, 10, 100, 1000, 10_000, 100_000) if count <= tokens // 8]
    return [Case(f"{count} sequences", "time against sequences", tokens, count, skew=0.0) for count in counts]


def by_skew(tokens: int) -> list[Case]:
    """The same tokens and sequences, from equal lengths to one that holds most of the tokens."""
    sequences = max(1, tokens // 512)
    return [
        Case(f"skew {skew:g}", "time against the skew of lengths", tokens, sequences, skew=skew)
        for skew in (0.0, 0.5, 1.0, 2.0, 3.0)
    ]
