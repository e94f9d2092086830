"""docs/metrics.md, made from the rows: `PYTHONPATH=tests python -m builders.metrics_page`."""

from __future__ import annotations

import sys

from rollout_corr.api import routes
from rollout_corr.metrics import extra, loss, native, turns
from rollout_corr.metrics.labels import LabelSet
from rollout_corr.metrics.limits import (
    FILLED,
    FILLED_TIMES,
    FILLED_TOKENS,
    LIMITS,
    MOST_OF_NOISE,
    NOT_WARNED,
    RATIO_ERRORS,
    RATIO_MARGIN,
)
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.ratio_losses import DEFAULT_SURROGATE
from rollout_corr.specs.terms import KL, Objective, SquaredLogRatio

HEAD = """\
# Native metrics

Every key that `out.metrics()` can return: look one up here. [dashboard.md](dashboard.md) has the ten to log, and
[What `warnings()` reports](#what-warnings-reports) the thresholds and what to do. `out.explain(key)` shows the
formula of a value, the sums behind it, its unit and its healthy range.
(`PYTHONPATH=tests python -m builders.metrics_page` makes this page from the rows in `rollout_corr/metrics/`.)

**How to read a key.** A key reads unit_quantity_statistic: `sequence_logratio_abs_max` is over sequences,
`logratio_abs_max` without a unit over tokens; a count is the unit in the plural and what is counted (`tokens_kept`).
A divergence names its two policies in the order of its formula and ends with its estimator (`kl_rollout_train_k3`).
Ratios and differences are train to rollout unless the key names others. `old` is the policy that the ratio of
`policy_loss` divides by: `old_logp`, or `rollout_logp` in bypass mode.

**Words.** D is the log-ratio of a token, `train_logp - rollout_logp`. *Measured* tokens are the valid tokens whose D
is finite (all valid tokens unless `nonfinite` is `reject`); a measured sequence has one. Empty sequences count in
nothing, 0 of 0 is 0, and minima and maxima of nothing are 0. Statistics are of the population, merged over any split
of the batch before metrics are computed.

**Which fraction counts what.**

| fraction | counts | over |
|---|---|---|
| `tokens_kept_fraction` | tokens that are kept | valid tokens |
| `sequences_kept_fraction` | sequences that are kept: those that lost tokens one by one too, \
even all of them (`sequences_without_survivors`) | sequences with a token |
| verl's `rollout_rs_masked_fraction` | 1 - `tokens_kept_fraction` | valid tokens |
| verl's `rollout_rs_seq_masked_fraction` | rows that lost *any* token: one of 4,000 counts as much as all \
| all rows, empty ones too |
| of each option, `rollout_rs_seq_mean_k1_seq_masked_fraction` | rows that lost a token to that option \
| rows with a token |
"""

WATCHED = f"""\
## What `warnings()` reports

Metrics beyond the thresholds of the table below; `doctor`, `report` and what-if use the same ones. Between the
healthy range and the alarm a sentence begins with "watch:". `warnings()` skips rows with a star, which grow with
the length of healthy sequences; reports show them. A `logratio_abs_max` between 5 and 10 is reported if that one token
makes up a tenth of k3.

If the policies differ, the sentences use what the call knows: the age of tokens, if the Batch has `versions`; with
`detail="full"` whether the two probabilities correlate (a temperature, precision) or not (a shift, other weights),
and placeholders of 0 or -1 (at {100 * FILLED:g} % of the tokens, at least {FILLED_TOKENS}, and {FILLED_TIMES:g} times
as many as on the other side). Thresholds are advised only if the policies agree.

`warnings()` also names:

- a batch without a valid token, and one that is rejected whole;
- log-probs above 0 (negative log-likelihoods, probabilities, a mask), placeholders at every token, two identical
  arguments;
- a padded batch without a mask, if a fifth of the rows begin or end with tokens that are exactly 0 on both sides;
- with `Batch.entropy`, tokens that were not sampled from these log-probs: mean entropy and mean negative log-prob
  differ. Only this shows raw log-probs of an engine that samples with a temperature;
- product ratios near the clamp, ages below 0, ids that name no label;
- for a policy loss, tokens with NaN or infinity in what it needs.

`warnings()` sees sums only and misses a temperature within 5 % of the right one, padding under a mask of ones, and,
without `detail="full"`, placeholders. `doctor` looks at tokens and sees them.

It was silent on all of 1,000 healthy batches of lognormal lengths (8 to 32,768 tokens, k3 of 1e-5 to 5e-3;
`tests/metrics/test_warnings.py`).
"""


def watched() -> str:
    """The table of the limits, which the guide shows too."""
    lines = [
        "| metric | healthy | alarm | what it says | what to do |",
        "|---|---|---|---|---|",
        f"| `ratio_mean` | within {RATIO_ERRORS:g} standard errors + {RATIO_MARGIN:g} + s^2 / 2 (at most "
        f"{MOST_OF_NOISE:g}; s: `ratio_std`) of 1 | 3 times as far | its mean "
        "is 1, whatever the mismatch, where tokens were sampled from the rollout log-probs | look for top-p, a "
        "temperature, a shift, other weights |",
    ]
    for limit in LIMITS:
        key = f"`{limit.key}`{' *' * (limit.key in NOT_WARNED)}"
        cells = key, limit.range, f"{limit.beyond} {limit.alarm:g}", limit.reason, limit.hint
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page: a table for each group of metrics."""
    criterion = Criterion("k3", over="sequence", reduce="mean", upper=1.0, label="LABEL")
    objective = Objective(DEFAULT_SURROGATE, KL("k3", 0.001), SquaredLogRatio(0.001))
    of_sequence = native.weight_metrics(Spec(weight=Weight.product()))
    parts = {
        "Always": native.ALWAYS,
        "With a `Weight`": native.weight_metrics(Spec(weight=Weight.token(normalize="batch"))),
        "With a `Weight` over sequences, in place of `sequence_mean_weight_*`": of_sequence[len(of_sequence) // 2 :],
        "For every `Criterion`, under its label": native.criterion_metrics(criterion),
        'With `detail="full"`': native.FULL_METRICS,
        'With `detail="full"` and a `Weight`, of the unit that it is over': [
            row
            for weight in (Weight.token(), Weight.product(), Weight.product(over="turn"))
            for row in native.percentiles_of_weight(Spec(weight=weight))
        ],
        "Where turns are measured": turns.METRICS,
        "With a `Weight` over turns": native.weight_metrics(Spec(weight=Weight.product(over="turn")))[-12:],
        'With `normalize="group"` or "sequence"': extra.DIVISOR_METRICS,
        "With `Batch.entropy`": [*extra.ENTROPY_METRICS, *extra.ENTROPY_METRICS_OF_D],
        "With `Batch.labels`, under their name": extra.Extra(
            labels=(LabelSet("LABEL", (), "sequences"), LabelSet("LABEL", (), "tokens"))
        ).rows(None),
        "With `Batch.versions`": extra.AGE_METRICS,
        "For every bound that the batch decides, under the label of its criterion or `weight`": extra.bound_metrics(
            "LABEL", "upper", False
        ),
        "From `policy_loss`": loss.metrics_of(objective),
        "From a surrogate that looks at the whole batch": list(loss.OF_BATCH.values()),
        "From `route_agreement`": [*routes.METRICS, *routes.METRICS_OF_WEIGHTS],
    }
    lines = []
    for title, rows in parts.items():
        lines += ["", f"## {title}", "", "| key | formula | unit | over | healthy |", "|---|---|---|---|---|"]
        for row in rows:
            cells = (f"`{row.key}`", row.formula, row.unit, row.over.words, row.healthy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n\n" + WATCHED + "\n" + watched()


if __name__ == "__main__":
    sys.stdout.write(markdown())
