"""docs/dashboard.md with the real trackers, offline."""

from __future__ import annotations

import math
import re
import sqlite3
import time
from pathlib import Path

import pytest

import rollout_corr as rc
from rollout_corr.metrics import loss, native
from rollout_corr.testing import example_batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dashboard.md"
METRICS = PAGE.with_name("metrics.md")
BLOCKS = dict(
    re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
)
BATCH = example_batch(sequences=16)
OUT = rc.correct(BATCH.train_logp, BATCH.rollout_logp, mask=BATCH.mask, cu_seqlens=BATCH.cu_seqlens)
WANTED = OUT.metrics("dashboard", prefix="mismatch/")


def test_the_ten_are_metrics_with_the_ranges_of_the_limits():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE)
    assert [key for key, _ in rows] == list(native.DASHBOARD) and len(rows) == 10
    of_loss = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE)
    assert [key for key, _ in of_loss] == [*loss.DASHBOARD, loss.kl_key(rc.KL("k3", 0.1))]
    page = METRICS.read_text(encoding="utf-8").partition("## What `warnings()` reports")[0]
    # The healthy range stands before the formula.
    by_metrics = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \| `[^`]*` \|$", page, re.MULTILINE))
    assert all(healthy == by_metrics[key] for key, healthy in (*rows, *of_loss))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a tracker's block in an empty folder, with nothing sent anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return lambda name: exec(compile(BLOCKS[name], f"dashboard.md, {name}", "exec"), {"__name__": "docs"})


def near(found):
    """Return whether the last step's values are those of the metrics, in float32 at least."""
    return all(math.isclose(found[key], value, rel_tol=1e-6, abs_tol=1e-12) for key, value in WANTED.items())


@pytest.mark.peers
def test_tensorboard(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("TensorBoard")
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert {*events.Tags()["scalars"]} == {*WANTED}
    assert [event.step for event in events.Scalars("mismatch/kl_rollout_train_k3")] == [0, 1, 2]
    assert near({key: events.Scalars(key)[-1].value for key in WANTED})


@pytest.mark.peers
def test_mlflow(run):
    import mlflow

    run("MLflow")
    (found,) = mlflow.search_runs(output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "mismatch/kl_rollout_train_k3")
    assert [one.step for one in history] == [0, 1, 2] and near(found.data.metrics)


@pytest.mark.peers
def test_weights_and_biases(run, tmp_path):
    run("Weights & Biases")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # Its service writes the file behind run.finish().
    for _ in range(200):
        logged = file.read_bytes()
        missing = [key for key in WANTED if key.encode() not in logged]
        if not missing:
            return
        time.sleep(0.1)
    raise AssertionError(missing)


@pytest.mark.peers
def test_trackio(run, tmp_path):
    run("trackio")
    (database,) = (tmp_path / "trackio").glob("my-run*.db")
    with sqlite3.connect(database) as connection:
        steps = [step for (step,) in connection.execute("SELECT step FROM metrics ORDER BY step")]
    assert steps == [0, 1, 2]
