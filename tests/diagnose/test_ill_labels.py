"""Doctor and report by label: the environment that is ill is named, healthy ones and broken samples are not."""

from __future__ import annotations

import json

import pytest
import torch

import rollout_corr as rc
from builders.planted_dumps import Model
from rollout_corr.cli.main import main
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump

SEQUENCES = 24


def planted(ill, labels=3, seed=0):
    """Healthy log-probs of a model; sequences whose label is ill have those of a noisy engine."""
    model, noisy = Model(seed, SEQUENCES), Model(seed, SEQUENCES, noise=0.4)
    columns = model.healthy()
    ids = torch.arange(SEQUENCES) % labels
    off = torch.isin(ids, torch.tensor(ill, dtype=torch.int64))[model.owner]
    columns["rollout_logp"] = torch.where(off, noisy.healthy()["rollout_logp"], columns["rollout_logp"])
    return columns, ids, model.owner


def broken_sequence():
    columns, ids, owner = planted([])
    columns["rollout_logp"][owner == 4] -= 3.0
    return columns, ids, owner


def half_of_a_label():
    """Four times the others in every second sequence: 2.5 times in the mean, and less than 4 standard errors."""
    columns, ids, owner = planted([])
    off = (ids == 1) & (torch.arange(SEQUENCES) % 2 == 0)
    return columns | {"rollout_logp": columns["train_logp"] - torch.where(off, 0.4, 0.1)[owner]}, ids, owner


def not_finite():
    columns, ids, owner = planted([])
    columns["train_logp"][(owner == 2).nonzero()[:7]] = torch.nan
    return columns, ids, owner


def rewards():
    columns, _, owner = planted([1])
    return columns, torch.linspace(0, 1, SEQUENCES), owner


@pytest.mark.parametrize(
    ("make", "title", "others"),
    [
        (lambda: planted([1]), "environment 1 differs far more than the others", ()),
        # Staleness or low precision would not choose an environment.
        (lambda: planted([0, 2]), "environment 2, 0 differ far more than the others", ()),
        (lambda: planted([], 6, 2), None, ()),
        (broken_sequence, None, ("outliers",)),
        (half_of_a_label, None, ("not_the_sampler",)),
        (not_finite, "environment 2 has all the non-finite values", ("nonfinite",)),
        (rewards, None, ("outliers", "different_policies")),
    ],
)
def test_ill_labels_are_named(make, title, others):
    columns, labels, _ = make()
    logps, offsets = (columns["train_logp"], columns["rollout_logp"]), columns["cu_seqlens"]
    found = rc.doctor(*logps, cu_seqlens=offsets, by="environment", environment=labels).findings
    findings = {one.name: one for one in found}
    assert {*findings} - {"label"} <= {*others}
    said = findings["label"].title if "label" in findings else None
    assert said == title or {*said.split()} == {*title.split()}
    if make is not_finite:
        assert findings["label"].evidence == ("environment 2: 7 tokens not finite, 100 % of all such",)


def test_the_commands(tmp_path, capsys):
    columns, ids, _ = planted([1], 4)
    path = str(tmp_path / "x.jsonl")
    logps = columns["train_logp"], columns["rollout_logp"]
    rc.dump(path, *logps, cu_seqlens=columns["cu_seqlens"], sequences=None, environment=ids).result()
    assert main(["doctor", path, "--by", "environment", "--fail-if", "label > 0", "--json"]) == 1
    assert "label" in {finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    # Nothing in the dump says that this column is one of labels.
    assert main(["doctor", path, "--fail-if", "label > 0"]) == 0
    capsys.readouterr()
    assert main(["report", path, "--by", "environment", "--no-page", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["profiles"]["environment"]
    assert [row["label"] for row in rows] == [str(value) for value in range(4)]


@pytest.mark.parametrize("name", ["x.jsonl", "x"])
@pytest.mark.parametrize("first", [1_234_567, 2**24, 1_700_000_000_001])
def test_neighbors_among_large_labels_are_two_labels_with_two_names(tmp_path, name, first):
    """Numbers of prompts, and times as versions: float32 has not all whole numbers above 2^24, and 6 digits are few."""
    logp = torch.full((64, 2), -1.0)
    ids = first + torch.arange(64) % 2
    batch = rc.Batch(versions=rc.Versions(ids, int(ids.max())))
    rc.dump(tmp_path / name, logp, logp - 0.01, batch, prompt=ids, sequences=None).result()
    profiles = measure(Dump(tmp_path / name, by=["prompt"])).profiles()
    for rows in (profiles["prompt"], profiles["versions"]):
        assert [(row.label, row.count) for row in rows] == [(str(first), 64), (str(first + 1), 64)]
