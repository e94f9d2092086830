"""A metric is a row, and its sum another: nothing else knows a statistic's name."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders import metrics_page
from builders.peer_metrics_cases import batch, correct, tensors
from builders.rounding import near
from rollout_corr.backends import blocks
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.backends.whole import run_whole
from rollout_corr.metrics import aggregates, loss, native, peers, schema
from rollout_corr.metrics.formulas import compiled, mean
from rollout_corr.metrics.histogram import HISTOGRAM
from rollout_corr.metrics.rows import Metric, over_tokens, total
from rollout_corr.specs.choices import REPORTS

EVERYTHING = rc.Spec(weight=rc.Weight.product(upper=2.0), criteria=(rc.Criterion("k3", upper=1.0),), detail="full")
TOKEN_WEIGHT = rc.Spec(weight=rc.Weight.token(upper=2.0))


@pytest.fixture
def another(monkeypatch):
    """A sum over tokens, a sum over sequences and their metrics, added as rows and nowhere else."""
    rows = [
        over_tokens("d4", "sum", lambda f: f.tokens.saturated**4),
        total("longest", "measured", lambda s: s.facts.measured * s.facts.measured),
    ]
    metrics = [
        Metric("d_fourth", "mean D^4", "nats^4", native.TOKENS, "-", mean("d4")),
        Metric("square_length", "mean n^2", "tokens^2", native.SEQUENCES, "-", mean("longest")),
    ]
    monkeypatch.setattr(aggregates, "AGGREGATES", [*aggregates.AGGREGATES, *rows])
    monkeypatch.setattr(native, "ALWAYS", [*native.ALWAYS, *metrics])
    rc.clear_caches()
    yield metrics
    rc.clear_caches()


def test_a_row_is_all_that_a_metric_needs(another, monkeypatch):
    """It is taken in blocks and at once, merged, kept apart under a sequence group, and documented."""
    rows, spec = batch(3) + batch(4), rc.Spec()
    found = correct(rows, spec)
    d = [[train - rollout for train, rollout, valid in row if valid] for row in rows]
    lengths = [len(row) for row in d if row]
    wanted = {
        "d_fourth": sum(x**4 for row in d for x in row) / sum(lengths),
        "square_length": sum(n * n for n in lengths) / len(lengths),
    }
    monkeypatch.setattr(blocks, "BLOCK", 15)
    parts = [correct(part, spec).statistics for part in (rows[:5], rows[5:])]
    train, rollout, mask = tensors(rows)
    read = read_batch(Given(train, rollout, rc.Batch(mask=mask), spec))
    at_once = rc.Statistics(spec, run_whole(read, spec).statistics)
    for statistics in (found.statistics, correct(rows, spec).statistics, rc.Statistics.sum(parts), at_once):
        metrics = statistics.metrics()
        assert {key: metrics[key] for key in wanted} == near(wanted)
    names, _ = schema.layout(spec)
    of_tokens = dict(zip(names, found.statistics.of_tokens().sums.tolist(), strict=True))
    assert of_tokens["d4"] > 0.0
    assert of_tokens["longest"] == 0.0
    assert_by_label(rows, spec, wanted)
    assert "| `d_fourth` | mean D^4 | - | `'d4' / 'tokens_measured'` |" in metrics_page.tables()


def assert_by_label(rows, spec, wanted):
    """One label for all has the metrics of the batch; a label of tokens has those of tokens."""
    train, rollout, mask = tensors(rows)
    shapes = {"environment": (len(rows),), "kind": mask.shape}
    labels = {name: rc.Labels(torch.zeros(shape, dtype=torch.int64), ["all"]) for name, shape in shapes.items()}
    out = rc.correct(train, rollout, rc.Batch(mask=mask, labels=labels), spec=spec)
    of_sequences, of_tokens = (out.metrics(by=name) for name in labels)
    found = [of_sequences[f"environment/all/{key}"] for key in ("d_fourth", "square_length")]
    assert found == near(list(wanted.values()))
    assert of_tokens["kind/all/d_fourth"] == near(wanted["d_fourth"])
    assert not any("square_length" in key for key in of_tokens)


@pytest.mark.parametrize("report", [(), REPORTS])
@pytest.mark.parametrize("spec", [EVERYTHING, TOKEN_WEIGHT])
def test_names_are_unique_and_each_is_filled(spec, report):
    spec = rc.Spec(weight=spec.weight, criteria=spec.criteria, detail=spec.detail, report=report)
    sums, maxima = schema.layout(spec)
    assert len({*sums, *maxima}) == len(sums) + len(maxima)
    statistics = correct(batch(1), spec).statistics
    assert (len(sums), len(maxima)) == (statistics.sums.shape[0], statistics.maxima.shape[0])


def test_every_metric_reads_what_is_there():
    """Of no statistics each is finite: 0, or what a formula makes of nothing."""
    objective = rc.policy_loss(
        torch.zeros(1, 2, requires_grad=True),
        torch.ones(1),
        loss=rc.Loss(kl=rc.KL("k3", 0.1)),
        ref_logp=torch.zeros(1, 2),
    ).statistics.objective
    nothing = rc.Statistics.nothing(EVERYTHING, objective).metrics()
    assert [*nothing] == [row.key for row in (*native.metrics_of(EVERYTHING), *loss.metrics_of(objective))]
    assert set(nothing.values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "names", "value"),
    [
        ("'x'", ("x",), 6.0),
        ("'x' / n", ("x",), 1.5),
        ("('x' + n) / n", ("x",), 2.5),
        ("'x' / 'none'", ("x", "none"), 0.0),
        ("exp(-'-min_x')", ("-min_x",), math.exp(-2.0)),
        ("fraction(larger('x', '-min_x') * 0.5)", ("x", "-min_x"), 1.0),
    ],
)
def test_a_formula_is_what_its_text_says(text, names, value):
    found, values = compiled(text), {"x": 6.0, "-min_x": 2.0, "none": 0.0}
    assert found.names == names and found.value(values, 4.0) == value
    if found.of_tensors is not None:
        columns = {name: torch.tensor([x, -x], dtype=torch.float64) for name, x in values.items()}
        assert found.of_tensors(columns, torch.tensor([4.0, -4.0], dtype=torch.float64))[0] == value
    assert (found.of_tensors is None) == ("exp" in text)
    assert found.around_one == ("+ n" in text)


def test_percentiles_of_a_rank_that_does_not_count_its_tokens():
    """The first rank of `Ranks.sequence` alone has their count; every rank has a histogram of its own."""
    rows = {row.key: row for row in native.FULL_METRICS}
    values = dict.fromkeys(HISTOGRAM, 0.0) | {"histogram_200": 4.0, "tokens_measured": 0.0, "tokens_differing": 4.0}
    values |= {"tokens_nonfinite": 0.0, "-min_d": -0.25, "max_d": 0.25}
    assert rows["logratio_p50"].read(values) > 0.0 and rows["prob_correlation"].read(values) == 0.0


def test_schemes_are_what_a_spec_may_report():
    assert ("native", *peers.SCHEMES) == REPORTS


def test_repr_reads_no_value():
    """Meta tensors have none. A Spec is short in it, however many criteria there are."""
    statistics = rc.Statistics.nothing(rc.Spec(report=("verl",)), device="meta")
    sums, maxima = statistics.sums.shape[0], statistics.maxima.shape[0]
    assert repr(statistics) == f"Statistics({sums} sums, {maxima} maxima, native/verl, device='meta')"
    loss_alone = rc.policy_loss(torch.zeros(1, 2), torch.ones(1), old_logp=torch.zeros(1, 2)).statistics
    assert repr(loss_alone) == "Statistics(13 sums, 2 maxima, policy_loss, device='cpu')"
