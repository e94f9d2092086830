"""Metrics: named floats from merged statistics, on the host, in float64. One table says what each is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from rollout_corr.definition.histogram import percentile
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.metrics import peers
from rollout_corr.metrics.metric import Metric, Values, correlation_of, ess_of, extremum_of, ratio_of, std_of
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import KL, Objective, SquaredLogRatio

PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99)

TOKENS, SEQUENCES = "measured tokens", "measured sequences"


def table(spec: Spec) -> list[Metric]:
    """The native metrics under a Spec, in the order in which they are reported."""
    rows = [*_counts(), *_log_ratio(), *_perplexity()]
    if spec.weight is not None:
        rows += _weights(spec)
    for criterion in spec.criteria:
        rows += _criterion(criterion.label, 1.0 if criterion.statistic.log_space else 0.0, criterion.over)
    if spec.detail == "full":
        rows += _full()
    return rows


def _counts() -> list[Metric]:
    def plain(key: str, formula: str, unit: str, healthy: str, name: str) -> Metric:
        return Metric(key, formula, unit, "-", healthy, lambda v: v[name])

    return [
        plain("tokens", "valid tokens inside sequences", "tokens", "-", "tokens"),
        plain("tokens_outside", "valid tokens that belong to no sequence", "tokens", "0", "tokens_outside"),
        plain("tokens_nonfinite", "valid tokens whose D is NaN or infinite", "tokens", "0", "tokens_nonfinite"),
        plain("tokens_clamped", "measured tokens with |D| > clamp", "tokens", "near 0", "tokens_clamped"),
        plain("tokens_kept", "valid tokens that train after rejection", "tokens", "-", "tokens_kept"),
        Metric(
            "tokens_kept_fraction",
            "tokens_kept / tokens",
            "fraction",
            "valid tokens",
            "> 0.5",
            lambda v: ratio_of(v["tokens_kept"], v["tokens"]),
        ),
        plain("sequences", "sequences with a valid token", "sequences", "-", "sequences"),
        plain("sequences_clamped", "sequences with |sum D| > clamp", "sequences", "near 0", "sequences_clamped"),
        plain("sequences_kept", "non-empty sequences whose keep is True", "sequences", "-", "sequences_kept"),
        Metric(
            "sequences_kept_fraction",
            "sequences_kept / sequences",
            "fraction",
            "non-empty sequences",
            "> 0.5",
            lambda v: ratio_of(v["sequences_kept"], v["sequences"]),
        ),
        plain(
            "sequences_without_survivors",
            "kept sequences that lost every token one by one",
            "sequences",
            "near 0",
            "sequences_without_survivors",
        ),
    ]


def _log_ratio() -> list[Metric]:
    def mean(key: str, formula: str, unit: str, healthy: str, of: Callable[[Values], float]) -> Metric:
        return Metric(key, formula, unit, TOKENS, healthy, lambda v: ratio_of(of(v), v["tokens_measured"]))

    def sequences(name: str) -> Callable[[Values], float]:
        return lambda v: ratio_of(v[name], v["sequences_measured"])

    def largest(v: Values) -> float:
        return extremum_of(max(v["max_d"], v["-min_d"]), v["tokens_measured"])

    return [
        mean("d_mean", "mean D, each saturated at +-1024", "nats", "near 0", lambda v: v["d"]),
        mean("d_abs_mean", "mean |D|, each saturated at 1024", "nats", "< 0.05", lambda v: v["abs_d"]),
        Metric(
            "d_std",
            "population standard deviation of D",
            "nats",
            TOKENS,
            "< 0.1",
            lambda v: std_of(v["d"], v["d2"], v["tokens_measured"]),
        ),
        Metric("d_abs_max", "max |D|", "nats", TOKENS, "< 5", largest),
        Metric("d_min", "min D", "nats", TOKENS, "> -5", lambda v: extremum_of(-v["-min_d"], v["tokens_measured"])),
        Metric("d_max", "max D", "nats", TOKENS, "< 5", lambda v: extremum_of(v["max_d"], v["tokens_measured"])),
        mean("kl_k1", "mean -D: estimates KL(rollout || train)", "nats", "near 0", lambda v: 0.0 - v["d"]),
        mean("kl_k2", "mean D^2 / 2", "nats", "< 0.01", lambda v: 0.5 * v["d2"]),
        mean("kl_k3", "mean e^D - 1 - D, D clamped", "nats", "< 0.01", lambda v: v["k3"]),
        mean("ratio_mean", "mean e^D, D clamped", "ratio", "near 1", lambda v: v["ratio"] + v["tokens_measured"]),
        Metric(
            "ratio_std",
            "population standard deviation of e^D",
            "ratio",
            TOKENS,
            "< 0.1",
            lambda v: std_of(v["ratio"], v["ratio2"], v["tokens_measured"]),
        ),
        mean(
            "chi2_token",
            "mean e^(2D) - 1, D clamped",
            "ratio",
            "near 0, below 1",
            lambda v: v["ratio2"] + 2.0 * v["ratio"],
        ),
        Metric(
            "chi2_sequence",
            "mean e^(2 clamp(sum D)) - 1",
            "ratio",
            SEQUENCES,
            "below 10",
            sequences("chi2_sequence"),
        ),
        Metric("sum_d_abs_mean", "mean |sum D|: T x KL", "nats", SEQUENCES, "< clamp / 2", sequences("abs_sum_d")),
        Metric(
            "sum_d_abs_max",
            "max |sum D|",
            "nats",
            SEQUENCES,
            "< clamp",
            lambda v: extremum_of(v["max_abs_sum_d"], v["sequences_measured"]),
        ),
    ]


def _perplexity() -> list[Metric]:
    def mean(key: str, formula: str, unit: str, healthy: str, of: Callable[[Values], float]) -> Metric:
        return Metric(key, formula, unit, SEQUENCES, healthy, lambda v: ratio_of(of(v), v["sequences_measured"]))

    def extremum(key: str, formula: str, sign: float, name: str) -> Metric:
        return Metric(
            key, formula, "nats", SEQUENCES, "near 0", lambda v: extremum_of(sign * v[name], v["sequences_measured"])
        )

    return [
        mean("train_ppl", "mean exp(-mean train_logp)", "perplexity", "like rollout_ppl", lambda v: v["train_ppl"]),
        mean("rollout_ppl", "mean exp(-mean rollout_logp)", "perplexity", "-", lambda v: v["rollout_ppl"]),
        mean("train_log_ppl", "mean of -mean train_logp", "nats", "like rollout's", lambda v: v["train_log_ppl"]),
        mean("rollout_log_ppl", "mean of -mean rollout_logp", "nats", "-", lambda v: v["rollout_log_ppl"]),
        mean(
            "log_ppl_diff",
            "mean of -mean D: mean rollout_logp - mean train_logp, with D saturated at +-1024",
            "nats",
            "near 0",
            lambda v: v["log_ppl_diff"],
        ),
        mean("log_ppl_abs_diff", "mean of its magnitude", "nats", "< 0.02", lambda v: v["log_ppl_abs_diff"]),
        extremum("log_ppl_diff_max", "its maximum", 1.0, "max_log_ppl_diff"),
        extremum("log_ppl_diff_min", "its minimum", -1.0, "-min_log_ppl_diff"),
        mean("ppl_ratio", "mean exp(-mean D)", "ratio", "near 1", lambda v: v["ppl_ratio"]),
    ]


def _weights(spec: Spec) -> list[Metric]:
    rows: list[Metric] = []
    levels = (("", "tokens_measured", TOKENS), ("sequence_", "sequences_measured", SEQUENCES))
    for level, units, denominator in levels:
        for kind, name, words in (("weight", "weight", "after the bounds"), ("weight_raw", "raw", "before the bounds")):
            rows += _moments(f"{level}{kind}", f"{level}{name}", units, denominator, f"weight {words}")
        counted = "tokens" if not level else "sequences"
        for side in ("above", "below"):
            rows.append(
                Metric(
                    f"{level}weight_{side}_fraction",
                    f"units whose raw weight lies {side} the bound",
                    "fraction",
                    denominator,
                    "< 0.1",
                    _fraction(f"{counted}_{side}", units),
                )
            )
    if spec.weight is not None and spec.weight.normalize == "batch":
        level = "" if spec.weight.level == "token" else "sequence_"
        units = "tokens_measured" if not level else "sequences_measured"
        rows.append(
            Metric(
                "weight_batch_mean",
                "what weights were divided by (not where it is <= 1e-8)",
                "ratio",
                units.replace("_", " "),
                "near 1",
                lambda v: ratio_of(v[f"{level}weight"] + v[units], v[units]),
            )
        )
    return rows


def _fraction(name: str, units: str) -> Callable[[Values], float]:
    return lambda v: ratio_of(v[name], v[units])


def _moments(key: str, name: str, units: str, denominator: str, words: str) -> list[Metric]:
    squares = f"{name}2"
    ess = f"(sum w)^2 / (n sum w^2) of the {words}"
    return [
        Metric(
            f"{key}_mean",
            f"mean {words}",
            "ratio",
            denominator,
            "near 1",
            lambda v: ratio_of(v[name] + v[units], v[units]),
        ),
        Metric(
            f"{key}_std",
            f"population standard deviation of the {words}",
            "ratio",
            denominator,
            "< 1",
            lambda v: std_of(v[name], v[squares], v[units]),
        ),
        Metric(
            f"{key}_min",
            f"min {words}",
            "ratio",
            denominator,
            "-",
            lambda v: extremum_of(-v[f"-min_{name}"], v[units], 1.0),
        ),
        Metric(
            f"{key}_max",
            f"max {words}",
            "ratio",
            denominator,
            "-",
            lambda v: extremum_of(v[f"max_{name}"], v[units], 1.0),
        ),
        Metric(f"{key}_ess", ess, "fraction", denominator, "> 0.3", lambda v: ess_of(v, name, units)),
    ]


def _criterion(label: str, centre: float, over: str) -> list[Metric]:
    units, denominator = f"{label}/units", TOKENS if over == "token" else "sequences with a token to sum over"

    def count(what: str) -> Metric:
        return Metric(
            f"{label}/rejected_{what}_fraction",
            f"{what} that it rejected" if what == "tokens" else "non-empty sequences that lost a token to it",
            "fraction",
            "valid tokens" if what == "tokens" else "non-empty sequences",
            "< 0.1",
            lambda v: ratio_of(v[f"{label}/{what}"], v[what]),
        )

    return [
        count("tokens"),
        count("sequences"),
        Metric(
            f"{label}/mean",
            "mean of its statistic, each saturated at +-2^37",
            "its own",
            denominator,
            "inside the bounds",
            lambda v: ratio_of(v[f"{label}/value"] + centre * v[units], v[units]),
        ),
        Metric(
            f"{label}/std",
            "population standard deviation of the same",
            "its own",
            denominator,
            "-",
            lambda v: std_of(v[f"{label}/value"], v[f"{label}/value2"], v[units]),
        ),
        Metric(
            f"{label}/min",
            "minimum of its statistic",
            "its own",
            denominator,
            "-",
            lambda v: extremum_of(-v[f"-min_{label}/value"], v[units], centre),
        ),
        Metric(
            f"{label}/max",
            "maximum of its statistic",
            "its own",
            denominator,
            "-",
            lambda v: extremum_of(v[f"max_{label}/value"], v[units], centre),
        ),
    ]


def _full() -> list[Metric]:
    def mean(key: str, formula: str, healthy: str, name: str, centre: float = 1.0) -> Metric:
        return Metric(
            key,
            formula,
            "probability",
            TOKENS,
            healthy,
            lambda v: ratio_of(v[name] + centre * v["tokens_measured"], v["tokens_measured"]),
        )

    rows = [
        Metric(
            f"d_p{percent:g}",
            f"percentile {percent:g} of D, from the histogram (within 1/8 of its value)",
            "nats",
            TOKENS,
            "-",
            partial(percentile, percent=percent),
        )
        for percent in PERCENTILES
    ]
    return [
        *rows,
        mean("train_prob_mean", "mean exp(train_logp)", "like rollout's", "q"),
        mean("rollout_prob_mean", "mean exp(rollout_logp)", "-", "p"),
        mean("prob_abs_diff_mean", "mean |exp(train_logp) - exp(rollout_logp)|", "< 0.02", "abs_prob_diff", 0.0),
        Metric(
            "prob_abs_diff_max",
            "max |exp(train_logp) - exp(rollout_logp)|",
            "probability",
            TOKENS,
            "< 0.5",
            lambda v: extremum_of(v["max_abs_prob_diff"], v["tokens_measured"]),
        ),
        Metric(
            "prob_correlation",
            "Pearson correlation of the two probabilities (0 where either is constant)",
            "-",
            TOKENS,
            "> 0.99",
            correlation_of,
        ),
    ]


def native(values: Values, spec: Spec) -> dict[str, float]:
    """The native metrics from raw statistics."""
    return {metric.key: metric.value(values) for metric in table(spec)}


def finish(values: Values, spec: Spec | None, objective: Objective | None, names: str) -> dict[str, float]:
    """The metrics of one naming scheme from raw statistics; those of a loss go by their native names."""
    schemes = ("native",) if spec is None else spec.report
    if names not in schemes:
        raise ValueError(f"names: expected one of {list(schemes)} (Spec.report), got {names!r}")
    if names != "native" and spec is not None:
        return peers.finish(values, spec, names)
    found = {} if spec is None else native(values, spec)
    if objective is not None:
        found |= {metric.key: metric.value(values) for metric in loss_metrics.table(objective)}
    return found


def markdown() -> str:
    """The table as docs/metrics.md shows it."""
    from rollout_corr.spec.correction import Criterion, Weight

    weighted = Spec(weight=Weight("token", normalize="batch"), criteria=(Criterion("k3", upper=1.0, label="LABEL"),))
    objective = Objective(kl=KL("k3", 0.001), regulariser=SquaredLogRatio(0.001))
    parts = [
        ("Always", table(Spec())),
        ("With a `Weight`", _weights(weighted)),
        ("For every `Criterion`, under its label", _criterion("LABEL", 0.0, "sequence")),
        ('With `detail="full"`', _full()),
        ("From `policy_loss`", loss_metrics.table(objective)),
    ]
    lines = [
        "# Native metrics",
        "",
        "Made from the tables in `rollout_corr/metrics/` by `python -m rollout_corr.metrics.native`; do not edit.",
        "",
        "*Measured* tokens are the valid tokens whose D is finite (all valid tokens unless `nonfinite` is `reject`); a",
        "measured sequence has one. Empty sequences count in nothing; 0 of 0 is reported as 0. Minima and maxima of",
        "nothing are 0. All are population statistics, merged over any split of the batch before they are finished.",
    ]
    for title, rows in parts:
        lines += ["", f"## {title}", "", "| key | formula | unit | over | healthy |", "|---|---|---|---|---|"]
        for row in rows:
            cells = (f"`{row.key}`", row.formula, row.unit, row.denominator, row.healthy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
