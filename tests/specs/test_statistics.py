"""A statistic is one row: nothing but its row, its Triton branch and whoever uses it names it."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import rollout_corr as rc
from builders.sources import ROOT, nodes, paths
from rollout_corr.specs import statistics
from rollout_corr.specs.choices import STATS
from rollout_corr.specs.criterion import Threshold, threshold_of
from rollout_corr.specs.statistics import STATISTICS, Statistic

CORE = "kernels/", *(f"rollout_corr/{room}/" for room in ("specs", "definition", "metrics", "backends", "api"))
# The row, and the branch of the kernels.
# The names of papers are calls with a statistic each.
MAY_NAME_ONE = {"rollout_corr/specs/statistics.py", "rollout_corr/specs/published.py", "kernels/correct/criteria.py"}
# Words that mean something else too: kinds of KL penalty, divergences of DPPO, names of sums and of a metric.
OTHER = {"ratio", "k1", "k2", "k3", "abs", "tv", "age", "entropy", "external", "ratio_error"}
OWN = set(STATISTICS) - OTHER


def strings(path: Path) -> set[str]:
    """The string literals of a module that name a statistic and nothing else."""
    return {node.value for node in nodes(path) if isinstance(node, ast.Constant) and node.value in OWN}


def test_nothing_else_names_a_statistic():
    core = {name: path for name, path in paths().items() if name.startswith(CORE)}
    assert len(core) > 40
    named = {name: strings(path) for name, path in core.items()}
    assert {name for name, some in named.items() if some} == MAY_NAME_ONE
    assert named["rollout_corr/specs/statistics.py"] == OWN


def test_a_row_is_all_that_the_definition_needs(monkeypatch):
    """A cubed log-ratio, added here alone, is checked, computed, cut, reported and explained."""
    cube = Statistic(
        cast("Any", "cube"),
        "the cubed log-ratio D^3",
        lambda x: x.d * x.d * x.d,
        "$D^3$",
        "nothing",
        signed=True,
        compared="d",
        inverse=lambda bound: math.copysign(abs(bound) ** (1 / 3), bound),
    )
    monkeypatch.setitem(STATISTICS, "cube", cube)
    train, rollout = torch.tensor([[0.5, -2.0, 1.0], [0.5, 0.5, 3.0]]), torch.zeros(2, 3)
    token = rc.Criterion(cast("Any", "cube"), lower=-8.5, upper=8.5)
    mean = rc.Criterion(cast("Any", "cube"), over="sequence", reduce="mean", upper=8.0)
    low = rc.Criterion(cast("Any", "cube"), over="sequence", reduce="min", lower=-1.0)
    assert threshold_of(token) == Threshold("d", pytest.approx(-(8.5 ** (1 / 3))), pytest.approx(8.5 ** (1 / 3)))
    assert threshold_of(mean) == Threshold("value", None, 8.0)
    spec = rc.Spec(criteria=(token, mean, low))
    out = rc.correct(train, rollout, spec=spec, backend="torch")
    assert out.mask.tolist() == [[False] * 3] * 2 and out.keep.tolist() == [False, False]
    metrics = out.metrics()
    assert metrics["token_cube/max"] == 27.0
    assert metrics["token_cube/tokens_rejected_fraction"] == pytest.approx(1 / 6)
    assert metrics["sequence_mean_cube/mean"] == pytest.approx(((0.125 - 8 + 1) / 3 + (0.25 + 27) / 3) / 2)
    assert "the cubed log-ratio D^3 must be between -8.5 and 8.5" in spec.explain()
    assert '"cube"' in statistics.table()


@pytest.mark.parametrize("stat", STATS)
def test_rows_are_consistent(stat):
    row = STATISTICS[stat]
    assert row.inverse is None or row.branches is None
    assert (row.compared == "value") == (row.inverse is None and row.branches is None)
    assert not row.log_space or (row.one_limb and row.compared == "d")
    assert row.source == "d" or not row.one_limb


def test_the_page_has_the_table():
    assert statistics.table() in (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
