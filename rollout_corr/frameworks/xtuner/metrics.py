"""xtuner's metrics: the keys of xtuner b934f46 (2026-08-21), by its formulas.

xtuner calls its correction once a pack, so one call is one pack here. The perplexities of the mismatch and their
differences xtuner takes over a whole pack, as if it were one sequence; merged statistics give their mean over the calls
that held a valid token, and their extrema, as xtuner's own merging does. All others are made of sums and extrema over
tokens or sequences, and merged statistics give them pooled, where xtuner averages the packs' averages.

Without a valid token `valid` is 0, and the rest is what xtuner computes from nothing: infinite token extrema and an
infinite effective sample size, perplexities of 1, else 0.

The criterion labeled "mask" is xtuner's rejection, those whose labels begin with "veto" are its veto. In mode "mask"
the weight has no bounds: then those of the criterion stand for `rollout_is_threshold`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...definition.bounds import outside
from ...definition.facts import Named
from ...definition.findings import Findings
from ...definition.tokens import extrema, select
from ...metrics.collect import totals
from ...metrics.peers import Columns, Interval
from ...specs.caches import cached
from ...specs.correction import Criterion, Spec, Weight
from ...specs.statistics import log_bound
from ..shared.metrics import (
    EPSILON,
    SIDES,
    beyond_one,
    count,
    k3_beyond_clamp,
    log_difference,
    perplexity,
    prefixed,
    sides,
    weight_sides,
    with_empty,
)

PREFIX = "mismatch/"

LOCAL_SUMS: tuple[str, ...] = ()

OF_PACKS = (
    "packs",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
)


def columns(spec: Spec, names: Sequence[str]) -> Columns:
    """Names of the statistics."""
    of_tokens, of_sequences, maxima = ["k3_beyond", "abs_d"], ["log_difference", "train", "rollout"], []
    if spec.weight is not None:
        of_tokens += ["catastrophic"]
        of_sequences += ["means_above", "means_below", "vetoed"]
        units = of_tokens if spec.weight.per_token else of_sequences
        units += ["weight", "weight2", "weight_around_one2", "tokens_above", "tokens_below"]
        if not spec.weight.per_token:
            of_sequences += ["rows_above", "rows_below"]
            maxima += ["max_log_weight", "-min_log_weight"]
    found = Columns(
        token_sums=tuple(of_tokens),
        sequence_sums=tuple(of_sequences),
        call_sums=("rows", *OF_PACKS),
        sequence_maxima=tuple(maxima),
        call_maxima=("max_log_ppl_diff", "-min_log_ppl_diff"),
    )
    return found.prefixed("xtuner")


def role(criterion: Criterion) -> str | None:
    """Return "veto" for a criterion of the veto, else None."""
    return "veto" if criterion.label.startswith("veto") and criterion.drops_sequences else None


def intervals(spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
    """The bounds of the weight, of its logarithm, and of the tokens that each veto looks for."""
    if spec.weight is None:
        return {}
    low, high = _bounds(spec, spec.weight)
    found: dict[str, Interval] = {"xtuner/ratio": (low, high), "xtuner/log": (log_bound(low), log_bound(high))}
    for own, criterion in zip(names, spec.criteria, strict=True):
        if _looks_for_tokens(criterion):
            found[f"xtuner/{own}"] = log_bound(criterion.low), log_bound(criterion.high)
    return found


def _looks_for_tokens(criterion: Criterion) -> bool:
    """Return whether a veto looks at tokens, each alone or by their extremum, and not at a mean."""
    return role(criterion) == "veto" and criterion.stat == "ratio" and criterion.reduce in (None, "min", "max")


def _bounds(spec: Spec, weight: Weight) -> tuple[float | None, float | None]:
    """`rollout_is_threshold`, lower first."""
    mask = _mask(spec)
    if not weight.bounded and mask is not None:
        return mask.low, mask.high
    return weight.low, weight.high


def _mask(spec: Spec) -> Criterion | None:
    """xtuner's rejection among the criteria."""
    masks = (criterion for criterion in spec.criteria if criterion.label == "mask" and criterion.stat == "ratio")
    return next(masks, None)


# --- on the device ---


def collect(block: Findings, spec: Spec) -> tuple[Named, Named]:
    """Sums and maxima of some whole sequences. Only of those with a measured token: `metrics` adds the others."""
    tokens = block.tokens
    sums: Named = {"k3_beyond": k3_beyond_clamp(tokens), "abs_d": tokens.d.abs().sum()}
    maxima: Named = {}
    rows = {"log_difference": log_difference(block), "train": block.facts.train, "rollout": block.facts.rollout}
    if spec.weight is not None:
        _collect_weight(block, spec, spec.weight, sums, maxima, rows)
        _collect_veto(block, sums, rows)
    sums.update(totals(rows, None))
    return prefixed("xtuner", sums), prefixed("xtuner", maxima)


def _collect_weight(block: Findings, spec: Spec, weight: Weight, sums: Named, maxima: Named, rows: Named) -> None:
    weighing, measured, n = block.weighing, block.tokens.measured, block.n_measured
    if weighing is None:
        return
    lower, upper = _bounds(spec, weight)
    low, high = log_bound(lower), log_bound(upper)
    clamped = weighing.excess
    bounded = weighing.log_ratio.exp() if weight.outside == "zero" else weighing.weight
    if lower is not None or upper is not None:
        clamped = clamped.clamp(None if lower is None else lower - 1.0, None if upper is None else upper - 1.0)
        bounded = bounded.clamp(lower, upper)
    weight_sides(block, spec, low, high, rows, maxima)
    if weight.per_token:
        clamped, bounded = select(measured, clamped), select(measured, bounded)
        sums.update(
            weight=bounded.sum(), weight2=(bounded * bounded).sum(), weight_around_one2=(clamped * clamped).sum()
        )
        beyond = sides("tokens", weighing.log_ratio, low, high)
        sums.update({name: count(which, measured) for name, which in beyond.items()})
        return
    rows.update(weight=n * bounded, weight2=n * bounded * bounded, weight_around_one2=n * clamped * clamped)
    rows.update({"tokens_above": n * rows["rows_above"], "tokens_below": n * rows["rows_below"]})


def _collect_veto(block: Findings, sums: Named, rows: Named) -> None:
    """Count the vetoed sequences, and the tokens that the veto looks for (none if it tests a mean)."""
    vetoed = torch.zeros_like(block.decision.keep)
    catastrophic = torch.zeros((), dtype=torch.int64, device=vetoed.device)
    for outcome in block.decision.outcomes:
        criterion = outcome.criterion
        if role(criterion) != "veto" or outcome.failed is None:
            continue
        vetoed = vetoed | outcome.failed
        if _looks_for_tokens(criterion):
            for which in outside(block.tokens.d, log_bound(criterion.low), log_bound(criterion.high)):
                catastrophic = catastrophic + count(which, block.tokens.measured)
    rows["vetoed"] = vetoed
    sums["catastrophic"] = catastrophic


def per_call(sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
    """The pack as one sequence; one without a measured token adds nothing."""
    n = sums["tokens_measured"].double()
    some, n = n > 0, n.clamp(min=1.0)
    train, rollout = -sums["xtuner/train"] / n, -sums["xtuner/rollout"] / n
    gap = sums["xtuner/log_difference"] / n
    found: Named = {
        "packs": some,
        "training_ppl": perplexity(train),
        "training_log_ppl": train,
        "rollout_ppl": perplexity(rollout),
        "rollout_log_ppl": rollout,
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": perplexity(gap),
    }
    found = {name: select(some, x.double()) for name, x in found.items()}
    minimum, maximum = extrema(gap[None], some[None])
    more_maxima = {"max_log_ppl_diff": maximum, "-min_log_ppl_diff": minimum}
    return prefixed("xtuner", found | {"rows": sums["rows"]}), prefixed("xtuner", more_maxima)


# --- on the host ---

N, ROWS, SOME, PACKS = "'tokens_measured'", "'xtuner/rows'", "'sequences_measured'", "'xtuner/packs'"
EMPTY, INFINITE = f"({ROWS} - {SOME})", "1e999"


@cached(maxsize=64)
def formulas(spec: Spec) -> Mapping[str, str]:
    """xtuner's keys: of the mismatch, and of the weights where there are any."""
    found = MISMATCH if spec.weight is None else MISMATCH | _importance(spec, spec.weight)
    return {PREFIX + key: formula for key, formula in found.items()}


def _of_packs(name: str) -> str:
    # exp(0): what an empty pack's perplexity is.
    of_nothing = 1.0 if name in ("training_ppl", "rollout_ppl", "ppl_ratio") else 0.0
    return f"'xtuner/{name}' / {PACKS} if {PACKS} else {of_nothing}"


MISMATCH = {
    "valid": "1.0 if 'tokens' > 0 else 0.0",
    "mismatch_kl": f"'xtuner/log_difference' / {N}",
    "mismatch_k3_kl": f"('k3' + 'xtuner/k3_beyond') / {N}",
    "mismatch_logprob_abs_diff": f"'xtuner/abs_d' / {N}",
    **{f"mismatch_{name}": _of_packs(name) for name in OF_PACKS[1:]},
    "mismatch_log_ppl_diff_max": f"'xtuner/max_log_ppl_diff' if {PACKS} else 0.0",
    "mismatch_log_ppl_diff_min": f"-'xtuner/-min_log_ppl_diff' if {PACKS} else 0.0",
}


def _importance(spec: Spec, weight: Weight) -> dict[str, str]:
    lower, upper = _bounds(spec, weight)
    above, below, units = "'xtuner/tokens_above'", "'xtuner/tokens_below'", N
    largest, smallest = f"'max_raw' if {N} else -{INFINITE}", f"-'-min_raw' if {N} else {INFINITE}"
    if not weight.per_token:
        high, low, has_empty = "'xtuner/max_log_weight'", "-'xtuner/-min_log_weight'", f"{EMPTY} or not {ROWS}"
        largest = f"exp(smaller(larger({high}, 0.0) if {has_empty} else {high}, {spec.clamp!r}))"
        smallest = f"exp(smaller({low}, 0.0) if {has_empty} else {low})"
    if weight.is_product:
        beyond = zip(SIDES, beyond_one(lower, upper), strict=True)
        above, below = (with_empty(f"'xtuner/rows_{side}'", EMPTY, counts) for side, counts in beyond)
        units = ROWS
    average, square = f"'xtuner/weight' / {N}", f"'xtuner/weight2' / {N}"
    of_rows = f"'sequence_raw', 'sequence_raw2', 'sequence_raw_around_one2', {SOME}"
    deviation = "larger('max_sequence_raw' - 1.0, '-min_sequence_raw' + 1.0)"
    found = {
        "rollout_is_veto_fraction": "'xtuner/vetoed' / 'sequences'",
        "rollout_is_catastrophic_token_fraction": "'xtuner/catastrophic' / 'tokens'",
        "rollout_is_mean": f"'raw' / {N}",
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_ratio_fraction_high": f"{above} / {units}",
        "rollout_is_ratio_fraction_low": f"{below} / {units}",
        "rollout_is_std": f"std_of_weight('xtuner/weight', 'xtuner/weight2', 'xtuner/weight_around_one2', {N})",
        "rollout_is_eff_sample_size": f"squared({average} + {EPSILON}) / ({square}) if {square} > 0.0 else {INFINITE}",
        "rollout_is_seq_mean": f"'sequence_raw' / {SOME}",
        "rollout_is_seq_std": f"unbiased_std_of_weight({of_rows})",
        "rollout_is_seq_max": f"'max_sequence_raw' if {SOME} else 0.0",
        "rollout_is_seq_min": f"-'-min_sequence_raw' if {SOME} else 0.0",
        "rollout_is_seq_max_deviation": f"{deviation} if {SOME} else 0.0",
        "rollout_is_seq_fraction_high": f"'xtuner/means_above' / {SOME}",
        "rollout_is_seq_fraction_low": f"'xtuner/means_below' / {SOME}",
    }
    mask = _mask(spec)
    if mask is not None:
        # The ratio of an empty row is 1, and it can fail the test like any other.
        fails = mask.over == "sequence" and any(beyond_one(mask.low, mask.high))
        rejected = with_empty("'mask/sequences'", EMPTY, fails)
        found["rollout_is_masked_fraction"] = "'mask/tokens' / 'tokens'"
        found["rollout_is_seq_masked_fraction"] = f"{rejected} / {ROWS}"
    return found
