"""docs/metrics.md, made from the rows: `PYTHONPATH=tests python -m builders.metrics_page`."""

from __future__ import annotations

import re
import sys
from itertools import groupby

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
from rollout_corr.metrics.rows import Metric
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.ratio_losses import DEFAULT_SURROGATE
from rollout_corr.specs.terms import KL, Objective, SquaredLogRatio

WEIGHTS, TURNS, FULL = "With a `Weight`", "Where turns are measured", 'With `detail="full"`'
HEAD = """\
# Native metrics

What does a key of `out.metrics()` mean? Look it up here, or call `out.explain(key)`: it shows the formula, the sums
behind the value, its unit and its healthy range. Log the ten of [dashboard.md](dashboard.md) first. For an alarm, go
to [What `warnings()` reports](#what-warnings-reports).

**How to read a key.** A key is unit, quantity, statistic:

| part | example | rule |
|---|---|---|
| unit | `sequence_logratio_abs_max` | a key without a unit is over tokens |
| count | `tokens_kept` | the unit in the plural, then what is counted |
| divergence | `kl_rollout_train_k3` | the two policies in the order of the formula, then the estimator |
| ratio, difference | `ratio_mean` | train to rollout, unless the key names others |
| `old` | `kl_old_new_k3` | what `policy_loss` divides by: `old_logp`, in bypass mode `rollout_logp` |

**Words.** D is the log-ratio of a token, `train_logp - rollout_logp`. A token is *measured* if it is valid and its D
is finite; a sequence or turn is measured if it has a measured token. (With `nonfinite` other than `reject`, all valid
tokens are measured.) Empty sequences count in nothing. 0 of 0 is 0, and so is the minimum or maximum of nothing.
Statistics of micro-batches and ranks are added up before a metric is computed.

## Which fraction counts what

| fraction | counts | over |
|---|---|---|
| `tokens_kept_fraction` | trained tokens | valid tokens |
| `sequences_kept_fraction` | sequences not rejected whole, even if they lost every token one by one \
(`sequences_without_survivors`) | sequences with a token |
| verl's `rollout_is_ratio_fraction_high`, `_low`, token weights \
| tokens whose ratio, before truncation, is above `rollout_is_threshold`, or below the lower bound \
(1 / threshold if none is set) | measured tokens |
| the same, sequence weights | rows whose product of ratios is | all rows, empty ones too |
| verl's `rollout_is_seq_fraction_high`, `_low` \
| rows whose mean weight before truncation is | all rows, empty ones too |
| verl's `rollout_rs_masked_fraction` | 1 - `tokens_kept_fraction` | valid tokens |
| verl's `rollout_rs_seq_masked_fraction` | rows that lost *any* token, even one of 4,000 | all rows, empty ones too |
| verl's fraction of one option, such as `rollout_rs_seq_mean_k1_seq_masked_fraction` \
| rows that lost a token to that option | rows with a token |
"""

WATCHED = f"""\
## What `warnings()` reports

`warnings()`, `doctor`, `report` and what-if compare metrics with the table at the end. Beyond the alarm they warn;
between healthy range and alarm the sentence begins with "watch:". `warnings()` skips rows with a star, which grow with
sequence length in healthy runs; reports show them. It reports a `logratio_abs_max` between 5 and 10 only if that one
token makes up a tenth of k3.

A sentence names likely causes from what the call knows: ages from `versions`, and with `detail="full"` the correlation
of the two probabilities (high: a temperature or precision; low: a shift or other weights) and placeholders of 0 or -1
(at least {FILLED_TOKENS} tokens, {100 * FILLED:g} % of all and {FILLED_TIMES:g} times as many as on the other side).
It advises thresholds only if the policies agree.

Without a threshold, `warnings()` also names:

- a batch without a valid token, or rejected whole;
- two identical arguments, log-probs above 0 (negative log-likelihoods, probabilities, a mask), placeholders everywhere;
- a padded batch without a mask, if a fifth of the rows begin or end with exact zeros on both sides;
- with `Batch.entropy`, a mean entropy that differs from the mean negative log-prob. Nothing else reveals an engine
  that samples with a temperature and returns raw log-probs;
- product ratios near the clamp, ages below 0, ids that name no label;
- for a policy loss, NaN or infinity in what it needs.

`warnings()` sees sums only. It misses a temperature within 5 % of the right one, padding under a mask of ones, and,
without `detail="full"`, placeholders. `doctor` reads tokens and sees them.

`tests/metrics/test_warnings.py` runs 1,000 healthy batches of lognormal lengths (8 to 32,768 tokens, k3 of 1e-5 to
5e-3) without a warning.
"""

NEXT = """
**Next:** [dashboard.md](dashboard.md) to log them, [troubleshooting.md](troubleshooting.md) for a symptom.
"""

# Below the title of a table: what its rows leave out.
NOTES = {
    WEIGHTS: """
These rows are over tokens. A call returns the same statistics over sequences, and over turns if the Weight is over
turns; the key then begins with another word:

| in place of `weight_` | over | when |
|---|---|---|
| `sequence_weight_` | measured sequences | the Weight is over sequences |
| `sequence_mean_weight_` | measured sequences, each with the mean weight of its tokens | any other Weight |
| `turn_weight_` | measured turns | the Weight is over turns |
""",
    TURNS: """
`middle_turn_token_` and `last_turn_token_` in place of `first_turn_token_` are over turns that are neither first nor
last, and over turns that are last but not first.
""",
    FULL: """
Percentiles of the weight are over the unit of the Weight: `sequence_weight_before_bounds_pQ`,
`turn_weight_before_bounds_pQ`.
""",
}


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


def parts() -> dict[str, list[Metric]]:
    """Every metric, by the title of its table."""
    criterion = Criterion("k3", over="sequence", reduce="mean", upper=1.0, label="LABEL")
    objective = Objective(DEFAULT_SURROGATE, KL("k3", 0.001), SquaredLogRatio(0.001))
    sequence, turn = Spec(weight=Weight.product()), Spec(weight=Weight.product(over="turn"))
    return {
        "Always": native.ALWAYS,
        WEIGHTS: [
            *native.weight_metrics(Spec(weight=Weight.token(normalize="batch"))),
            *native.weight_metrics(sequence)[12:],
            *native.weight_metrics(turn)[24:],
        ],
        "For every `Criterion`, under its label": native.criterion_metrics(criterion),
        FULL: [
            *native.FULL_METRICS,
            *(
                row
                for spec in (Spec(weight=Weight.token()), sequence, turn)
                for row in native.percentiles_of_weight(spec)
            ),
        ],
        TURNS: turns.METRICS,
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


def rows() -> list[Metric]:
    """Every metric."""
    return [row for found in parts().values() for row in found]


# A row that the note of its table stands for.
NOTED = re.compile(r"(sequence|sequence_mean|turn)_weight_(?!divisor)|(middle|last)_turn_token_")
PERCENTILE = re.compile(r"(.*_p)([\d.]+)")


def lines_of(found: list[Metric]) -> list[str]:
    """A table; the percentiles of a quantity are one row."""
    lines = ["| key | formula | unit | over | healthy |", "|---|---|---|---|---|"]
    shown = [row for row in found if not NOTED.match(row.key)]
    for name, same in groupby(shown, lambda row: PERCENTILE.sub(r"\1", row.key)):
        row, *others = same
        key, formula = f"`{row.key}`", row.formula
        if others:
            percents = [PERCENTILE.sub(r"\2", each.key) for each in (row, *others)]
            key, formula = (
                f"`{name}Q`, Q of {', '.join(percents)}",
                formula.replace(f"percentile {percents[0]}", "percentile Q"),
            )
        cells = (key, formula, row.unit, row.over.words, row.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def markdown() -> str:
    """The page: a table for each group of metrics."""
    lines = []
    for title, found in parts().items():
        lines += ["", f"## {title}", *NOTES.get(title, "").rstrip().splitlines(), "", *lines_of(found)]
    return HEAD + "\n".join(lines) + "\n\n" + WATCHED + "\n" + watched() + NEXT


if __name__ == "__main__":
    sys.stdout.write(markdown())
