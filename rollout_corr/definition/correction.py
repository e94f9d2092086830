"""The definition, in plain torch. Read this first, beside tokens.py: docs/math.md links every formula to its function.

All of it runs in the dtype of the log-probs promoted to at least float32, so float64 log-probs make it an exact oracle.
Per-sequence quantities are float64. Nothing is multiplied by a mask: what does not count is selected away (`where`),
so that NaN behind a mask stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollout_corr.definition.thresholds import cut_of, float32_at_least, float32_at_most, log_bound
from rollout_corr.definition.tokens import (
    LARGEST_D,
    Tokens,
    binary_kl,
    k3,
    probability,
    select,
    sum_of_d,
    sum_of_statistic,
)
from rollout_corr.spec.correction import Criterion, Spec

# --- one token ---


def statistic(criterion: Criterion, tokens: Tokens, external: Mapping[str, Tensor]) -> Tensor:
    """The per-token value of a criterion's `stat`; for "ratio" it is D, because ratios aggregate in log space."""
    stat, d = criterion.stat, tokens.d
    if criterion.token_clamp is not None:
        d = d.clamp(-criterion.token_clamp, criterion.token_clamp)
    if stat == "ratio":
        return d
    if stat == "k1":
        return -d
    if stat == "k2":
        # The square of more would not be finite in float32.
        d = d.clamp(-(2.0**60), 2.0**60)
        return 0.5 * (d * d)
    if stat == "abs":
        return d.abs()
    if stat == "external":
        return select(tokens.measured, external[criterion.name or ""].to(d.dtype))
    if stat in ("k3", "k3_reverse", "ratio_error", "ratio_deviation"):
        d = tokens.clamped(criterion.token_clamp)
        # Not tokens.k3: what decides must not depend on how large D is elsewhere in the block.
        if stat == "k3":
            return k3(d)
        if stat == "k3_reverse":
            return k3(-d)
        if stat == "ratio_error":
            return d.abs().exp()
        return (d + k3(d)).abs()
    if stat in ("prob_diff", "tv"):
        difference = probability(tokens.train) - probability(tokens.rollout)
        return difference if stat == "prob_diff" else difference.abs()
    forth = (tokens.rollout, tokens.train, tokens.d, criterion.eps)
    back = (tokens.train, tokens.rollout, -tokens.d, criterion.eps)
    if stat == "binary_kl":
        return select(tokens.measured, binary_kl(*forth))
    if stat == "binary_kl_reverse":
        return select(tokens.measured, binary_kl(*back))
    return select(tokens.measured, torch.maximum(binary_kl(*forth), binary_kl(*back)))


# --- one sequence ---


def total_of_d(token_clamp: float | None, tokens: Tokens, among: Tensor | None) -> Tensor:
    """[S] float64: the sum of D, after the token clamp, over some tokens."""
    if token_clamp is None and among is tokens.measured:
        return tokens.sum_d
    d = tokens.d if token_clamp is None else tokens.d.clamp(-token_clamp, token_clamp)
    d = select(among, d)
    return sum_of_d(d.clamp(-LARGEST_D, LARGEST_D), tokens.sequences, tokens.propagate, d)


def value_of(
    criterion: Criterion, tokens: Tokens, among: Tensor | None, n: Tensor, external: Mapping[str, Tensor]
) -> Tensor:
    """[S] float64: a sequence's value, a ratio as its logarithm; 0 where no token counts (n = 0)."""
    sequences = tokens.sequences
    if criterion.reduce in ("sum", "mean"):
        if criterion.stat == "ratio":
            total = total_of_d(criterion.token_clamp, tokens, among)
        else:
            x = select(among, statistic(criterion, tokens, external))
            # A NaN that the caller gave as an external statistic has to fail its sequence, not to vanish.
            propagate = tokens.propagate or criterion.stat == "external"
            if criterion.stat in ("k1", "abs"):
                total = sum_of_d(x.clamp(-LARGEST_D, LARGEST_D), sequences, propagate, x)
            else:
                total = sum_of_statistic(x, sequences, propagate)
        total = torch.where(n > 0, total, 0.0)
        return total if criterion.reduce == "sum" else total / n.clamp(min=1)
    sign = 1.0 if criterion.reduce == "max" else -1.0
    signed = sign * statistic(criterion, tokens, external)
    extremum = sequences.max(signed if among is None else torch.where(among, signed, -torch.inf))
    return torch.where(n > 0, sign * extremum.double(), 0.0)


def limits(dtype: torch.dtype, lower: float | None, upper: float | None) -> tuple[float | None, float | None]:
    """The bounds that values of a dtype are compared with."""
    if dtype != torch.float32:
        return lower, upper
    return (
        None if lower is None else float32_at_least(lower),
        None if upper is None else float32_at_most(upper),
    )


def within(x: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """lower <= x <= upper, both inclusive, either open. NaN is not within any bound."""
    lower, upper = limits(x.dtype, lower, upper)
    if lower is None:
        return torch.ones_like(x, dtype=torch.bool) if upper is None else x <= upper
    return x >= lower if upper is None else (x >= lower) & (x <= upper)


def passes(criterion: Criterion, x: Tensor, clamp: float) -> Tensor:
    """Whether each value passes, compared where the threshold cuts (see cuts.py)."""
    cut = cut_of(criterion, clamp)
    if cut.on in ("abs_d", "clamped_abs_d"):
        x = x.abs()
    if cut.on.startswith("clamped"):
        x = x.clamp(-clamp, clamp)
    passed = within(x, cut.lower, cut.upper)
    if cut.hole is not None:
        passed = passed & (within(x, None, cut.hole[0]) | within(x, cut.hole[1], None))
    return passed


@dataclass
class Advantages:
    """Advantages per token, [N] or [B, T], and per sequence, [S], when they were given so."""

    token: Tensor
    sequence: Tensor | None


def selected_tokens(when: str, tokens: Tokens, advantages: Tensor) -> Tensor:
    """Bool per token: what `when` asks for. A NaN advantage is not selected, nor is 0."""
    if when == "outward":
        return advantages.sign() * tokens.d.sign() > 0
    wanted = advantages < 0 if when == "negative_advantage" else advantages > 0
    return wanted if tokens.measured is None else wanted & tokens.measured


def selected_sequences(when: str, tokens: Tokens, advantages: Advantages) -> Tensor:
    """[S] bool: the sign of the mean advantage over valid tokens; for "outward", holding an outward token."""
    if when == "outward":
        return tokens.count(selected_tokens(when, tokens, advantages.token)) > 0
    if advantages.sequence is not None:
        mean = advantages.sequence
    else:
        finite = advantages.token.isfinite()
        counted = finite if tokens.valid is None else finite & tokens.valid
        mean = sum_of_statistic(select(counted, advantages.token), tokens.sequences, False)
    return mean < 0 if when == "negative_advantage" else mean > 0


# --- verdicts ---


@dataclass
class Verdict:
    """What one criterion found."""

    criterion: Criterion
    value: Tensor  # the statistic per unit, [S] for sequences; a ratio as its logarithm
    among: Tensor | None  # which units were measured
    dropped: Tensor | None  # bool per token, or None when only whole sequences fall
    failed: Tensor | None  # [S] bool, or None when no sequence falls as a whole
    struck: Tensor | None = None  # [S] bool, where sequences that fail lose the `selected` tokens alone
    selected: Tensor | None = None


@dataclass
class Decision:
    """All verdicts together."""

    keep: Tensor  # [S] bool
    dropped: Tensor | None  # bool per token: dropped one by one, beyond whole sequences
    survivors: Tensor | None  # tokens that sequence sums run over where n > 0; None means all
    n: Tensor  # [S] int64, how many those are; 0 where a token criterion took the whole sequence
    verdicts: list[Verdict] = field(default_factory=list)

    def apply(self, verdict: Verdict) -> None:
        if verdict.failed is not None:
            self.keep = self.keep & ~verdict.failed
        if verdict.dropped is not None:
            self.dropped = verdict.dropped if self.dropped is None else self.dropped | verdict.dropped
        self.verdicts.append(verdict)


def decide(
    tokens: Tokens,
    n_measured: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
    others: Mapping[str, Tokens] | None = None,
) -> Decision:
    """Run every criterion. Token criteria come first, because with sums_over="kept" the others run over survivors.

    Args:
        tokens: train and rollout.
        n_measured: [S] int64, how many of them are measured.
        spec: What to do.
        advantages: For criteria with `when`.
        external: For criteria with stat="external".
        others: The same tokens under other pairs of policies, by `Criterion.of`.
    """
    others = others or {}
    every = [tokens, *others.values()]
    keep = torch.ones(tokens.sequences.count, dtype=torch.bool, device=tokens.d.device)
    decision = Decision(keep, None, tokens.measured, n_measured)
    for criterion in spec.criteria:
        if criterion.over == "token":
            pair = others.get(criterion.of, tokens)
            decision.apply(judge_tokens(criterion, pair, spec, advantages, external))
    standing = dropped = None
    if spec.sums_over == "kept" and decision.verdicts:
        standing, dropped = decision.keep, decision.dropped
        decision.survivors, decision.n = survivors(tokens, dropped, standing)
    for criterion in spec.criteria:
        if criterion.over == "sequence":
            among, n = decision.survivors, decision.n
            pair = others.get(criterion.of, tokens)
            if pair is not tokens:
                among, n = survivors(pair, dropped, standing)
            decision.apply(judge_sequences(criterion, pair, among, n, spec, advantages, external))
    if spec.nonfinite == "reject" and (spec.weight is not None or spec.criteria):
        for pair in every:
            if pair.nonfinite is not None:
                decision.keep = decision.keep & (pair.nonfinite == 0)
    return decision


def survivors(tokens: Tokens, dropped: Tensor | None, standing: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Which measured tokens sequence sums run over, and how many of each sequence; none of one that does not stand.

    Such a sequence is taken out of the counts and not out of the tokens: what is summed must not depend on a verdict,
    so that ranks which hold parts of sequences can sum before they judge (split.py).
    """
    among = tokens.measured
    if dropped is not None:
        among = ~dropped if among is None else among & ~dropped
    n = tokens.count(torch.ones_like(tokens.d, dtype=torch.bool) if among is None else among)
    return among, n if standing is None else torch.where(standing, n, 0)


def judge_tokens(
    criterion: Criterion, tokens: Tokens, spec: Spec, advantages: Advantages | None, external: Mapping[str, Tensor]
) -> Verdict:
    """Test every measured token that `when` selects."""
    value = statistic(criterion, tokens, external)
    tested = value
    if cut_of(criterion, spec.clamp).on != "value":
        tested = statistic(replace(criterion, stat="ratio"), tokens, external)
    fails = ~passes(criterion, tested, spec.clamp)
    if tokens.measured is not None:
        fails = fails & tokens.measured
    if criterion.when != "any" and advantages is not None:
        fails = fails & selected_tokens(criterion.when, tokens, advantages.token)
    if criterion.drop == "sequence":
        return Verdict(criterion, value, tokens.measured, None, tokens.count(fails) > 0)
    return Verdict(criterion, value, tokens.measured, fails, None)


def judge_sequences(
    criterion: Criterion,
    tokens: Tokens,
    among: Tensor | None,
    n: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: Mapping[str, Tensor],
) -> Verdict:
    """Test every sequence that has a token to sum over (`n` of `among`) and that `when` selects."""
    sequences = tokens.sequences
    value = tested = value_of(criterion, tokens, among, n, external)
    if cut_of(criterion, spec.clamp).on in ("abs_d", "clamped_abs_d"):
        # k2 and ratio_error grow with |D|, so the extremum of |D| decides.
        tested = value_of(replace(criterion, stat="abs"), tokens, among, n, external)
    failed = ~passes(criterion, tested, spec.clamp) & (n > 0)
    if criterion.drop == "token":
        selected = torch.ones_like(tokens.d, dtype=torch.bool) if tokens.measured is None else tokens.measured
        if criterion.when != "any" and advantages is not None:
            selected = selected_tokens(criterion.when, tokens, advantages.token)
        return Verdict(criterion, value, n > 0, sequences.spread(failed) & selected, None, failed, selected)
    if criterion.when != "any" and advantages is not None:
        failed = failed & selected_sequences(criterion.when, tokens, advantages)
    return Verdict(criterion, value, n > 0, None, failed)


# --- weights ---


@dataclass
class Weighing:
    """An importance weight, per token at token level and per sequence (float64) otherwise."""

    log_ratio: Tensor  # clamped to +-Spec.clamp
    raw: Tensor  # ratio - 1 before the bounds, without cancellation
    bounded: Tensor  # ratio - 1 after the bounds
    ratio: Tensor | None  # before the bounds; None at token level, where nobody asks for it
    weight: Tensor


def weigh(tokens: Tokens, decision: Decision, spec: Spec) -> Weighing | None:
    """The weight before batch normalisation and before anything is zeroed."""
    weight = spec.weight
    if weight is None:
        return None
    if weight.level == "token":
        log_ratio = tokens.clamped(weight.token_clamp)
        raw = tokens.excess if weight.token_clamp is None else log_ratio + k3(log_ratio)
    else:
        total = total_of_d(weight.token_clamp, tokens, decision.survivors)
        aggregate = torch.where(decision.n > 0, total, 0.0)
        if weight.level == "geometric":
            aggregate = aggregate / decision.n.clamp(min=1)
        log_ratio = aggregate.clamp(-spec.clamp, spec.clamp)
        raw = log_ratio.expm1()
    ratio = log_ratio.exp()
    lower, upper = weight.lower, weight.upper
    if lower is None and upper is None:
        bounded, result = raw, ratio
    elif weight.outside == "clamp":
        bounds = (None if lower is None else lower - 1.0), (None if upper is None else upper - 1.0)
        bounded, result = raw.clamp(*bounds), ratio.clamp(lower, upper)
    else:
        inside = within(log_ratio, log_bound(lower), log_bound(upper))
        bounded, result = torch.where(inside, raw, -1.0), torch.where(inside, ratio, 0.0)
    return Weighing(log_ratio, raw, bounded, None if weight.level == "token" else ratio, result)


def weights_of(tokens: Tokens, decision: Decision, weighing: Weighing | None, spec: Spec) -> Tensor | None:
    """The weights handed back, per token, before batch normalisation; None when the Spec hands none back."""
    if not spec.apply or (weighing is None and spec.rejected == "mask"):
        return None
    if weighing is None:
        weights = torch.ones_like(tokens.d)
    elif spec.weight is not None and spec.weight.level == "token":
        weights = weighing.weight
    else:
        weights = tokens.sequences.spread(weighing.weight.to(tokens.d.dtype)).expand(tokens.d.shape)
    weights = select(tokens.measured, weights)
    zeroed = decision.keep if spec.rejected != "mask" else _without_nonfinite(tokens, decision, spec)
    if zeroed is not None:
        weights = select(tokens.sequences.spread(zeroed), weights)
    if spec.rejected != "mask" and decision.dropped is not None:
        weights = select(~decision.dropped, weights)
    return weights


def _without_nonfinite(tokens: Tokens, decision: Decision, spec: Spec) -> Tensor | None:
    return None if tokens.nonfinite is None or spec.nonfinite != "reject" else tokens.nonfinite == 0


def kept_tokens(tokens: Tokens, decision: Decision) -> Tensor:
    """Bool per token: valid and not rejected."""
    kept = tokens.sequences.spread(decision.keep).expand(tokens.d.shape)
    if tokens.valid is not None:
        kept = kept & tokens.valid
    return kept if decision.dropped is None else kept & ~decision.dropped
