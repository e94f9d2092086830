"""Tables and phrases that the terminal and the page share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...metrics.limits import BY_KEY, HEALTHY_K3, ratio_room
from ...metrics.native import weight_of_sequence
from ..doctor.cause import counted
from ..doctor.diagnosis import Diagnosed
from ..measure.measurement import UPPER, WEIGHTED, Measurement
from ..measure.worst_tokens import WorstToken
from ..read.dump import Source
from ..read.fields import listing

# Measurements by the name of what was read.
Named = Sequence[tuple[str, Measurement]]

MEANING_D = "the log-ratio train_logp - rollout_logp of a token"
ABOUT_D = f"D is {MEANING_D}."
HEALTHY = "no known sign of a bug, and the policies agree"
# Without entropies.
UNSEEN = (
    "Cannot be seen here: if both sides report log-probs from before temperature or top-p, they agree even if the "
    "tokens were sampled from another distribution; add `entropy`, or let the engine return processed log-probs"
)

# Columns without a role that are named.
MOST_UNUSED = 6

# Metrics of the first table.
KEYS = (
    *("tokens", "sequences", "tokens_nonfinite"),
    *("logratio_mean", "logratio_abs_mean", "logratio_abs_p50", "logratio_abs_p99", "logratio_abs_p99.9"),
    *("logratio_abs_max", "kl_rollout_train_k1", "kl_rollout_train_k3", "ratio_mean", "chi2_train_rollout"),
    *("sequence_logratio_abs_mean", "sequence_train_ppl_mean", "sequence_rollout_ppl_mean"),
    *("prob_diff_abs_mean", "prob_correlation"),
)
# Of each kind of weights, the ends of the keys of its metrics.
WEIGHT_KEYS = ("before_bounds_mean", "before_bounds_max", "before_bounds_ess", "ess", "above_upper_fraction")
AXES = {
    "position": "position in the sequence",
    "probability": "rollout probability",
    "length": "sequence length (|mean D| of a sequence)",
    "turn": "turn",
    "versions": "weight version",
    "steps": "step",
}


class Table(NamedTuple):
    """A table."""

    heads: Sequence[str]  # names of the columns
    rows: Sequence[Sequence[Any]]  # cells, texts; on a page they may be elements
    text: int = 1  # number of columns, from the left, that are text and no numbers


def number(value: float) -> str:
    """Format a number."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def named(diagnoses: Sequence[Diagnosed]) -> Named:
    """Return the measurements by the file names of their dumps, or by their paths if the names are equal."""
    names = [each.source.name for each in diagnoses]
    if len(set(names)) < len(names):
        names = [each.source.where for each in diagnoses]
    if len(set(names)) < len(names):
        names = [f"{name} ({i})" for i, name in enumerate(names, 1)]
    return [(name, each.measured) for name, each in zip(names, diagnoses, strict=True)]


def around(tokens: Iterable[WorstToken]) -> str:
    """Name what is shown of the neighbors of the worst tokens."""
    return "tokens around it" if any(token.tokens for token in tokens) else "D of neighboring tokens"


def metrics_table(dumps: Named, keys: Iterable[str]) -> Table:
    """Return some metrics of one dump, or of two and their change."""
    metrics, rows = [measured.metrics() for _, measured in dumps], []
    for key in keys:
        if all(key in each for each in metrics):
            values = [each[key] for each in metrics]
            change = [values[1] - values[0]] if len(values) > 1 else []
            rows.append((key, *map(number, (*values, *change)), healthy_range(key, metrics)))
    heads = (*(name for name, _ in dumps), "change") if len(dumps) > 1 else ("value",)
    return Table(("metric", *heads, "healthy"), rows)


def healthy_range(key: str, metrics: Sequence[Mapping[str, float]]) -> str:
    """Return the healthy range of a metric; empty if none is known."""
    if key == "ratio_mean":
        # The spread counts as far as a healthy one goes.
        spread = math.sqrt(2.0 * HEALTHY_K3)
        room = max(
            ratio_room(min(each["ratio_std"], spread), each["tokens"] - each["tokens_nonfinite"]) for each in metrics
        )
        return f"{1.0 - room:.4g} to {1.0 + room:.4g}"
    # The metrics of each kind of weights have its name before theirs.
    limit = BY_KEY.get(key.rpartition("/")[2])
    return limit.range if limit is not None else ""


def weights_table(dumps: Named) -> Table:
    """Return weights and effective sample size of each kind of weights, in its own units: tokens, or sequences."""
    rows = []
    for name, measured in dumps:
        metrics = measured.metrics()
        for kind in WEIGHTED:
            weight = "weight" if kind == "token" else weight_of_sequence(WEIGHTED[kind])
            values = (number(metrics[f"{kind}/{weight}_{end}"]) for end in WEIGHT_KEYS)
            rows.append([f"{kind}, {name}" if len(dumps) > 1 else kind, *values])
    return Table(("ratio", "mean weight", "largest", "ESS", f"ESS, truncated at {UPPER:g}", f"above {UPPER:g}"), rows)


def fields_of(source: Source) -> str:
    """List the fields that were read, with their roles where the names differ."""
    return ", ".join(role if role == name else f"{role} = {name}" for role, name in source.fields.items())


def unused_of(source: Source) -> str:
    """List the columns that have no role, those first that may be the mask."""
    each = sorted(source.unused.items(), key=lambda one: "--field" not in one[1])
    return listing([f"{name} [{what}]" for name, what in each[:MOST_UNUSED]]) + (
        ", ..." if len(each) > MOST_UNUSED else ""
    )


def more_of(source: Source) -> list[tuple[str, str]]:
    """Say what was found in folders, and which columns were not used."""
    found = [("found", source.about)] if source.about else []
    return found + ([("not used", unused_of(source))] if source.unused else [])


def problems_title(source: Source) -> str:
    """Say how many problems there were."""
    return f"{counted(source.problems.count, 'problem')} while reading; everything else was read"
