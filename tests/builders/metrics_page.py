"""The tables of docs/metrics.md, made from the rows: `PYTHONPATH=tests python -m builders.metrics_page`."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from rollout_corr.api import routes
from rollout_corr.metrics import extra, loss, native, turns
from rollout_corr.metrics.labels import LabelSet
from rollout_corr.metrics.limits import LIMITS, MOST_OF_NOISE, NOT_WARNED, RATIO_ERRORS, RATIO_MARGIN
from rollout_corr.metrics.rows import Metric
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogates import DEFAULT_SURROGATE
from rollout_corr.specs.terms import KL, Objective, SquaredLogRatio

WEIGHTS, TURNS, FULL = "With a `Weight`", "Where turns are measured", 'With `detail="full"`'
LOSS = "From `policy_loss`"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
# A part of the page that is made, by its name.
BEGIN, END = (
    "<!-- {}: made by `python -m builders.metrics_page`; a test compares them -->",
    "<!-- end of what is made -->",
)

# Below the title of a table: what its rows leave out.
NOTES = {
    WEIGHTS: """
The first five rows also exist before the bounds, as `weight_before_bounds_mean` and so on. All rows are over tokens. A
call returns the same statistics over sequences, and over turns if the Weight is over turns; the key then begins with
another word:

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
`turn_weight_before_bounds_pQ`. A Weight over prefixes has none. `logp_ulps_max` is of the log-probs after the kept mass
is taken off.
""",
    LOSS: """
The last two rows are over the tokens of their term's scope: with `scope="kept"` those that train, with "all" the valid
ones that are finite.
""",
}


def watched() -> str:
    """The table of the limits, which the guide shows too."""
    lines = [
        "| metric | healthy | alarm | what it says | what to do |",
        "|---|---|---|---|---|",
        f"| `ratio_mean` | within {RATIO_ERRORS:g} standard errors + {RATIO_MARGIN:g} + s^2 / 2 (at most "
        f"{MOST_OF_NOISE:g}; s: `ratio_std`) of 1 | 3 times as far | its mean "
        "is 1 for any mismatch, where tokens were sampled from the rollout log-probs | look for top-p, a "
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
        LOSS: loss.metrics_of(objective),
        "From a surrogate that looks at the whole batch": list(loss.OF_BATCH.values()),
        "From `route_agreement`": [*routes.METRICS, *routes.METRICS_OF_WEIGHTS],
    }


def rows() -> list[Metric]:
    """Every metric."""
    return [row for found in parts().values() for row in found]


# A row that the note of its table stands for.
NOTED = re.compile(
    r"(sequence|sequence_mean|turn)_weight_(?!divisor)|weight_before_bounds_(?!p\d)|(middle|last)_turn_token_"
)
PERCENTILE = re.compile(r"(.*_p)([\d.]+)")


def lines_of(found: list[Metric]) -> list[str]:
    """A table; the percentiles of a quantity are one row."""
    lines = ["| key | meaning | healthy | formula |", "|---|---|---|---|"]
    shown = [row for row in found if not NOTED.match(row.key)]
    for name, same in groupby(shown, lambda row: PERCENTILE.sub(r"\1", row.key)):
        row, *others = same
        # The count of a row's units by its name.
        counted = re.sub(r"\bn\b(?!')", f"'{row.over.units}'", row.formula)
        key, words, formula = f"`{row.key}`", row.words, f"`{counted}`"
        if others:
            percents = [PERCENTILE.sub(r"\2", each.key) for each in (row, *others)]
            key = f"`{name}Q`, Q of {', '.join(percents)}"
            words = words.replace(f"percentile {percents[0]}", "percentile Q")
            formula = formula.replace(f", {percents[0]})", ", Q)")
        cells = (key, words, row.healthy, formula)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def tables() -> str:
    """A table for each group of metrics."""
    lines = []
    for title, found in parts().items():
        lines += ["", f"## {title}", *NOTES.get(title, "").rstrip().splitlines(), "", *lines_of(found)]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables made again."""
    for name, made in (("metrics", tables()), ("limits", watched())):
        before, begin, rest = text.partition(BEGIN.format(name))
        assert begin, f"{PAGE}: no {BEGIN.format(name)}"
        text = before + begin + "\n\n" + made.strip("\n") + "\n\n" + END + rest.partition(END)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
