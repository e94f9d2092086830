"""Every preset and a grid of thresholds over the same dump: what each keeps, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_corr.api import correct as ops
from rollout_corr.definition.sequences import Packed
from rollout_corr.diagnose.read.block import Block, ValidTokens
from rollout_corr.diagnose.read.reading import Dump
from rollout_corr.frameworks import registry
from rollout_corr.metrics.warnings import NEAR_CLAMP
from rollout_corr.spec.correction import LEVELS, Criterion, Reduce, Spec, Weight

# Bounds of ratios, which lie far from 1 for tokens and products, and next to it for geometric means.
UPPERS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
NEAR_ONE = (1.0003, 1.001, 1.003, 1.01, 1.03, 1.1)
LOWERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Setting:
    """One correction that is tried.

    Attributes:
        name: A preset's, or what it does.
        spec: What it is.
        family: The curve of the grid that it lies on; empty for a preset.
        threshold: Its place on the curve.
        same: Further presets whose Spec is the same.
    """

    name: str
    spec: Spec
    family: str = ""
    threshold: float = math.nan
    same: tuple[str, ...] = ()

    @property
    def products(self) -> bool:
        """Whether the product over a sequence decides."""
        weighted = self.spec.weight is not None and self.spec.weight.level == "product"
        return weighted or any(c.statistic.one_limb and c.reduce == "sum" for c in self.spec.criteria)


@dataclass(frozen=True)
class Outcome:
    """What a setting makes of a dump. The weight of a rejected token is 0, and of one without a weight 1.

    Attributes:
        tokens_kept: Part of the valid tokens that train.
        sequences_kept: Part of the non-empty sequences that hold one of them.
        weight_mean: Mean weight of valid tokens, rejected ones included.
        ess: (sum w)^2 / (n sum w^2) of those weights.
        bias: Mean |w - r| over mean r, where r is the ratio that nothing cuts: exp(D) of the token, and under a
            product weight exp(sum of D).
        variance: Variance of w over its squared mean: 1 / ess - 1.
        note: Why products over sequences should not decide here, or nothing.
    """

    tokens_kept: float
    sequences_kept: float
    weight_mean: float
    ess: float
    bias: float
    variance: float
    note: str = ""


@dataclass
class _Tally:
    """Sums over blocks: tokens, kept, sequences, kept, w, w^2, |w - r|, r."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.float64))

    def outcome(self, note: str) -> Outcome:
        n, kept, sequences, kept_sequences, w, w2, apart, r = self.sums.tolist()
        mean, ess = (w / n, w * w / (n * w2) if w2 else 0.0) if n else (0.0, 0.0)
        return Outcome(
            tokens_kept=kept / n if n else 0.0,
            sequences_kept=kept_sequences / sequences if sequences else 0.0,
            weight_mean=mean,
            ess=ess,
            bias=apart / r if r else 0.0,
            variance=max(0.0, 1.0 / ess - 1.0) if ess else math.inf,
            note=note,
        )


def grid() -> list[Setting]:
    """Truncated and cut weights, and rejections, over their thresholds."""
    found = []
    for level in LEVELS:
        for upper in NEAR_ONE if level == "geometric" else UPPERS:
            weight = Weight(level, upper=upper)
            found.append(Setting(f"{level} weight <= {upper:g}", Spec(weight), f"{level} weight, truncated", upper))
    for upper in UPPERS:
        cut = Weight("token", lower=1.0 / upper, upper=upper, outside="zero")
        found.append(Setting(f"token weight, 0 beyond {upper:g}", Spec(cut), "token weight, 0 outside", upper))
    aggregates: tuple[tuple[Reduce, str, tuple[float, ...]], ...] = (
        ("mean", "geometric", NEAR_ONE),
        ("sum", "product", UPPERS),
    )
    for reduce, name, uppers in aggregates:
        for upper in uppers:
            criterion = Criterion("ratio", over="sequence", reduce=reduce, lower=1.0 / upper, upper=upper)
            found.append(
                Setting(f"reject sequences by {name} {upper:g}", Spec(None, (criterion,)), f"{name} rejection", upper)
            )
    for lower in LOWERS:
        veto = Criterion("ratio", over="sequence", reduce="min", lower=lower)
        found.append(Setting(f"veto below {lower:g}", Spec(None, (veto,)), "veto", lower))
    return found


def presets(has_advantages: bool) -> tuple[list[Setting], dict[str, str]]:
    """Every preset that a dump is enough for, equal ones together; and why the others are left out."""
    found: dict[Spec, list[str]] = {}
    left_out: dict[str, str] = {}
    for name in registry.names():
        spec = registry.preset(name)
        if any(criterion.of != "train/rollout" for criterion in spec.criteria):
            left_out[name] = "compares with the policy that trains, inside of policy_loss"
        elif any(criterion.statistic.source == "caller" for criterion in spec.criteria):
            left_out[name] = "needs a tensor from outside"
        elif not has_advantages and any(criterion.when != "any" for criterion in spec.criteria):
            left_out[name] = "needs advantages, and the dump has none"
        else:
            found.setdefault(spec, []).append(name)
    return [Setting(names[0], spec, same=tuple(names[1:])) for spec, names in found.items()], left_out


class WhatIf:
    """The settings over a dump, block by block. Batch-normalised weights are divided by the mean of their block.

    Args:
        has_advantages: Whether presets that look at advantages are tried.
    """

    def __init__(self, has_advantages: bool) -> None:
        tried, self.left_out = presets(has_advantages)
        self.settings = [Setting("no correction", Spec()), *tried, *grid()]
        self._tallies = [_Tally() for _ in self.settings]
        self._sums = torch.zeros(2, dtype=torch.float64)

    def add(self, block: Block) -> None:
        """Add a block."""
        tokens = ValidTokens.of(block)
        rejoined = Packed.of_lengths(tokens.lengths, tokens.d.numel())
        totals = rejoined.sum(tokens.d)
        self._sums += torch.tensor([float(totals.abs().sum()), float((tokens.lengths > 0).sum())])
        ratios = {"token": tokens.d.double().clamp(-20.0, 20.0).exp()}
        ratios["product"] = rejoined.spread(totals.clamp(-20.0, 20.0).exp())
        advantages = tokens.column("advantages")
        for setting, tally in zip(self.settings, self._tallies, strict=True):
            self._try(setting.spec, tally, tokens, rejoined.offsets, ratios, advantages)

    def _try(
        self,
        spec: Spec,
        tally: _Tally,
        tokens: ValidTokens,
        offsets: Tensor,
        ratios: dict[str, Tensor],
        advantages: Tensor | None,
    ) -> None:
        # Without what is masked, which would be skipped anew each time.
        out = ops.correct(
            tokens.train,
            tokens.rollout,
            cu_seqlens=offsets,
            spec=spec,
            advantages=advantages if any(criterion.when != "any" for criterion in spec.criteria) else None,
        )
        kept = out.mask
        if out.weights is not None:
            # Rejection by "zero" hands the mask back as it came.
            kept = kept if spec.rejected == "mask" else kept & (out.weights != 0)
            weights = out.weights.double().where(kept, 0.0)
        else:
            weights = kept.double()
        level = "product" if spec.weight is not None and spec.weight.level == "product" else "token"
        ratio, finite = ratios[level], tokens.finite
        alive = torch.bincount(tokens.owner[kept], minlength=tokens.lengths.shape[0]) > 0
        tally.sums += torch.stack(
            [
                *(torch.tensor(float(x)) for x in (kept.numel(), kept.sum(), (tokens.lengths > 0).sum(), alive.sum())),
                *(x.sum() for x in (weights, weights * weights)),
                (weights - ratio).abs().where(finite, 0.0).sum(),
                ratio.where(finite, 0.0).sum(),
            ]
        ).double()

    def outcomes(self) -> list[tuple[Setting, Outcome]]:
        """Every setting with what it makes of the dump."""
        total, sequences = self._sums.tolist()
        mean = total / sequences if sequences else 0.0
        found = []
        for setting, tally in zip(self.settings, self._tallies, strict=True):
            note = ""
            if setting.products and mean > NEAR_CLAMP * setting.spec.clamp:
                note = f"T x KL: mean |sum D| is {mean:.1f} nats, near the clamp of {setting.spec.clamp:g}"
            elif setting.products and mean > 1.0:
                note = f"T x KL: mean |sum D| is {mean:.1f} nats; products differ by as many powers of e"
            found.append((setting, tally.outcome(note)))
        return found


def try_all(dump: Dump, each: Callable[[], Any] = lambda: None) -> WhatIf:
    """Try every setting on a dump.

    Args:
        dump: The dump.
        each: Called after every block.
    """
    found: WhatIf | None = None
    for block in dump.blocks():
        if found is None:
            found = WhatIf("advantages" in block.columns)
        found.add(_with_advantages(block, found))
        each()
    assert found is not None  # a dump without sequences raises
    return found


def _with_advantages(block: Block, what_if: WhatIf) -> Block:
    """Records may lack advantages that others have; a 0 selects nothing."""
    if "advantages" in block.columns:
        block.columns["advantages"] = block.columns["advantages"].nan_to_num(0.0)
    elif any(c.when != "any" for setting in what_if.settings for c in setting.spec.criteria):
        block.columns["advantages"] = torch.zeros_like(block.train, dtype=torch.float32)
    return block


def pareto(outcomes: Iterable[tuple[Setting, Outcome]]) -> list[str]:
    """Names of the settings that no other beats in both bias and variance."""
    best, found = math.inf, []
    for setting, outcome in sorted(outcomes, key=lambda pair: (pair[1].bias, pair[1].variance)):
        if outcome.variance < best:
            best = outcome.variance
            found.append(setting.name)
    return found
