"""Doctor and report by label: the environment that is ill is named, healthy ones and broken samples are not."""

from __future__ import annotations

import json

import pytest
import torch

import rollout_corr as rc
from builders.planted_dumps import Model
from rollout_corr.cli.main import main
from rollout_corr.diagnose.doctor.diagnosis import diagnose
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES = 24


def planted(ill, labels=3, seed=0, noise=0.4):
    """Healthy log-probs of a model; sequences whose label is ill have those of a noisy engine."""
    model, noisy = Model(seed, SEQUENCES), Model(seed, SEQUENCES, noise=noise)
    columns = model.healthy()
    ids = torch.arange(SEQUENCES) % labels
    off = torch.isin(ids, torch.tensor(ill, dtype=torch.int64))[model.owner]
    columns["rollout_logp"] = torch.where(off, noisy.healthy()["rollout_logp"], columns["rollout_logp"])
    return columns, ids, model


def found(tmp_path, columns, per_token=False, suffix=".jsonl", **by):
    made = {name: x for name, x in columns.items() if name in ("train_logp", "rollout_logp", "mask")}
    path = tmp_path / ("x" + suffix)
    rc.dump(path, **made, cu_seqlens=columns["cu_seqlens"], sequences=None, **by).result()
    return path, diagnose(measure(Dump(path, by=by)))


@pytest.mark.parametrize("suffix", [".jsonl", ""])
@pytest.mark.parametrize("ill", [[1], [0, 2]])
def test_ill_labels_are_named(tmp_path, ill, suffix):
    columns, ids, _ = planted(ill)
    _, findings = found(tmp_path, columns, suffix=suffix, environment=ids)
    (label,) = [finding for finding in findings if finding.name == "label"]
    named = {int(line.split()[1].rstrip(":")) for line in label.evidence}
    assert named == set(ill)
    assert label.title.endswith("far more than the others")
    # Staleness or low precision would not choose an environment.
    assert "different_policies" not in {finding.name for finding in findings}


@pytest.mark.parametrize("seed", range(3))
def test_labels_of_a_healthy_dump_are_well(tmp_path, seed):
    columns, ids, _ = planted([], 6, seed)
    assert found(tmp_path, columns, environment=ids)[1] == []


def test_one_broken_sequence_is_no_ill_label(tmp_path):
    columns, ids, model = planted([])
    columns["rollout_logp"][model.owner == 4] -= 3.0
    names = {finding.name for finding in found(tmp_path, columns, environment=ids)[1]}
    assert "outliers" in names and "label" not in names


def test_a_label_whose_sequences_do_not_agree_is_not_ill(tmp_path):
    """Four times the others in every second sequence: 2.5 times in the mean, and less than 4 standard errors."""
    columns, ids, model = planted([])
    off = (ids == 1) & (torch.arange(SEQUENCES) % 2 == 0)
    columns["rollout_logp"] = columns["train_logp"] - torch.where(off, 0.4, 0.1)[model.owner]
    assert "label" not in {finding.name for finding in found(tmp_path, columns, environment=ids)[1]}


def test_the_label_of_what_is_not_finite_is_named(tmp_path):
    columns, ids, model = planted([])
    columns["train_logp"][(model.owner == 2).nonzero()[:7]] = torch.nan
    _, findings = found(tmp_path, columns, environment=ids)
    (label,) = [finding for finding in findings if finding.name == "label"]
    assert label.title == "environment 2 has all the non-finite values"
    assert label.evidence == ("environment 2: 7 tokens not finite, 100 % of all such",)
    assert "nonfinite" in {finding.name for finding in findings}


def test_numbers_that_are_no_labels_are_left_out(tmp_path):
    columns, _, _ = planted([1])
    reward = torch.linspace(0, 1, SEQUENCES)
    assert "label" not in {finding.name for finding in found(tmp_path, columns, reward=reward)[1]}


def test_the_commands(tmp_path, capsys):
    columns, ids, _ = planted([1], 4)
    path, _ = found(tmp_path, columns, environment=ids)
    assert main(["doctor", str(path), "--by", "environment", "--fail-if", "label > 0", "--json"]) == 1
    assert "label" in {finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    # Nothing in the dump says that this column is one of labels.
    assert main(["doctor", str(path), "--fail-if", "label > 0"]) == 0
    capsys.readouterr()
    assert main(["report", str(path), "--by", "environment", "--no-page", "--json"]) == 0
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
