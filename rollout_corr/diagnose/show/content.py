"""Tables and phrases that the terminal and the pages share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple

import torch

from ..._version import __version__
from ...frameworks.shared.nearest import lines_of
from ...metrics.limits import BY_KEY, HEALTHY_K3, ratio_room
from ...metrics.native import weight_of_sequence
from ..doctor.cause import counted
from ..doctor.diagnosis import Diagnosed
from ..measure.measurement import UPPER, WEIGHTED, Measurement
from ..measure.profiles import Row
from ..measure.worst_tokens import WorstToken
from ..read.dump import Dump, Source
from ..read.fields import listing
from ..what_if import Setting

# Measurements by the name of what was read.
Named = Sequence[tuple[str, Measurement]]

Unit = Literal["tokens", "sequences"]
# The mean of a bin of fewer is chance.
FEWEST: dict[Unit, int] = {"tokens": 50, "sequences": 5}

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
# Above the bounds of `suggest`.
ABOUT_SUGGESTION = "Bounds that keep 99 % of such sequences (rc.suggest), from their lengths and their mismatch"
ABOUT_TOO_LONG = "long: products over these sequences are chance: the mean |sum of D| is above 1 nat"


def about_best(sequences: float) -> str:
    """Say what the settings are ranked by."""
    return (
        f"The best setting of each kind, by what a batch of {counted(sequences, 'sequence')} is worth under it: "
        "1 / (1 + variance + N bias^2)"
    )


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


def summary(diagnosis: Diagnosed) -> str:
    """Say how much was measured, and how large the mismatch is."""
    metrics = diagnosis.measured.metrics()
    return (
        f"{counted(metrics['tokens'], 'token')} in {counted(metrics['sequences'], 'sequence')}: mean |D| "
        f"{metrics['logratio_abs_mean']:.3g}, 99th percentile of |D| {metrics['logratio_abs_p99']:.3g}, k3 "
        f"{metrics['kl_rollout_train_k3']:.3g} nats per token. {ABOUT_D}"
    )


def unit_of(axis: str) -> Unit:
    """Return what the bins of an axis count."""
    return "sequences" if axis == "length" else "tokens"


def enough(rows: Sequence[Row], unit: Unit) -> Sequence[Row]:
    """Return the bins that have enough tokens or sequences for a mean; all, if none has enough."""
    return [row for row in rows if row.count >= FEWEST[unit]] or rows


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


def pasted_lines(setting: Setting, framework: str | None) -> list[str]:
    """Return the lines to paste into a framework's configuration for a setting."""
    if framework is None:
        return []
    if setting.config is None:
        return [f"# cannot be said in {framework}"]
    return lines_of(setting.config, framework)


def fields_of(source: Source) -> str:
    """List the fields that were read, with their roles where the names differ."""
    return ", ".join(role if role == name else f"{role} = {name}" for role, name in source.fields.items())


def unused_of(source: Source) -> str:
    """List the columns that have no role, those first that may be the mask."""
    each = sorted(source.unused.items(), key=lambda one: "--field" not in one[1])
    return listing([f"{name} [{what}]" for name, what in each[:MOST_UNUSED]]) + (
        ", ..." if len(each) > MOST_UNUSED else ""
    )


def problems_title(source: Source) -> str:
    """Say how many problems there were."""
    return f"{counted(source.problems.count, 'problem')} while reading; everything else was read"


# --- where a page comes from


def command_of(diagnoses: Sequence[Diagnosed]) -> str:
    """Return the command that makes a report again."""
    source = diagnoses[0].source
    if not isinstance(source, Dump):
        return "rc.report(train_logp, rollout_logp, ...)"
    words = ["rollout-corr", "report", *map(str, source.paths)]
    words += [word for other in diagnoses[1:] for word in ("--compare", other.source.where)]
    words += [word for name in source.wanted.by for word in ("--by", name)]
    words += [word for pair in source.wanted.roles.items() for word in ("--field", "=".join(pair))]
    return shlex.join(words + ([] if source.limit is None else ["--limit", str(source.limit)]))


def provenance(diagnosis: Diagnosed) -> list[tuple[str, str]]:
    """Say where numbers come from: what was read, when it was written, which steps and versions are in it."""
    source, measured = diagnosis.source, diagnosis.measured
    metrics = measured.metrics()
    said = [("read", f"{source.where} ({fields_of(source)})")]
    said += [("found", source.about)] if source.about else []
    said += [("not used", unused_of(source))] if source.unused else []
    with suppress(OSError):
        written = [file.stat().st_mtime for file in source.files]
        if written:
            said.append(("written", f"{datetime.fromtimestamp(max(written), timezone.utc):%Y-%m-%d %H:%M} UTC"))
    tokens, sequences = counted(metrics["tokens"], "token"), counted(metrics["sequences"], "sequence")
    said.append(("size", f"{tokens} in {sequences}"))
    for name in ("steps", "versions"):
        values = sorted(measured.columns[name].values)
        if values:
            more = f" to {values[-1]:.10g} ({len(values)} of them)" if len(values) > 1 else ""
            said.append((AXES[name] + "s" * (len(values) > 1), f"{values[0]:.10g}{more}"))
    return said


def made_by(command: str) -> list[tuple[str, str]]:
    """Say what made a page."""
    return [
        ("made by", f"rollout-corr {__version__}, torch {torch.__version__}"),
        ("command", command),
        ("D", MEANING_D),
    ]
