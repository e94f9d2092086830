"""`install(dump="folder", every=100)` of every drop-in."""

from __future__ import annotations

import logging
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from rollout_corr.diagnose.doctor.diagnosis import diagnose
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.frameworks.shared.dumping import Dumps

ROLLOUT = -torch.rand(4, 60, generator=torch.Generator().manual_seed(0)) - 0.1
TRAIN = ROLLOUT.roll(1, 1)  # the bug that the doctor is to find in what was dumped
MASK = torch.ones(4, 60)


def by_verl(dropin):
    dropin.compute_rollout_correction_and_rejection_mask(TRAIN, ROLLOUT, MASK)


def by_verl_metrics(dropin):
    dropin.compute_rollout_corr_metrics_from_logprobs(TRAIN, ROLLOUT, MASK)


def by_trl(dropin):
    dropin.importance_sampling_ratio(TRAIN, ROLLOUT, MASK)


def by_async_trl(dropin):
    segments = torch.arange(4).repeat_interleave(60)
    packed = TRAIN.reshape(-1), ROLLOUT.reshape(-1), torch.ones(240), segments, MASK.reshape(-1)
    import_module("rollout_corr.frameworks.trl.asynchronous").packed_policy_loss(*packed, tokens=240.0)


def by_skyrl(dropin):
    config = SimpleNamespace(tis_ratio_type="token", token_tis_ratio_clip_high=2.0, sequence_mask_metric=None)
    dropin.compute_off_policy_correction(TRAIN, ROLLOUT, MASK, config)


def by_xtuner(dropin):
    packed = [x.reshape(1, -1) for x in (TRAIN, ROLLOUT)]
    dropin.compute_rollout_importance_weights_and_metrics(
        SimpleNamespace(), *packed, [60] * 4, MASK.reshape(1, -1).long()
    )


CALLS = {
    "verl": by_verl,
    "verl, metrics": by_verl_metrics,
    "trl": by_trl,
    "trl, asynchronous": by_async_trl,
    "skyrl": by_skyrl,
    "xtuner": by_xtuner,
}


def written(folder, count):
    """Wait until the thread has written so many files."""
    for _ in range(500):
        files = sorted(path.name for path in folder.glob("*.pt"))
        if len(files) >= count:
            return files
        time.sleep(0.02)
    raise AssertionError(files)


@pytest.mark.parametrize("name", CALLS)
def test_every_so_many_corrections_are_written(name, tmp_path):
    framework = name.partition(",")[0]
    dropin = import_module(f"rollout_corr.frameworks.{framework}.dropin")
    folder = tmp_path / "dumps"
    dropin.DROP_IN.dumps = Dumps(folder, 2)
    try:
        for _ in range(4):
            try:
                CALLS[name](dropin)
            except ImportError:
                # The result is an object of the framework, which is not installed here; the dump comes before it.
                assert framework == "verl"
    finally:
        dropin.DROP_IN.dumps = None
    files = written(folder, 2)
    assert len(files) == 2 and "0" in files[0] and "2" in files[1]
    CALLS["trl"](import_module("rollout_corr.frameworks.trl.dropin"))  # off: nothing more is written
    measured = measure(Dump(folder))
    assert measured.metrics()["sequences"] == 8
    assert [finding.name for finding in diagnose(measured)] == ["shifted"]


def test_install_turns_them_on_and_off(made, tmp_path):
    fake, drop_in = made()
    drop_in.install(fake.targets, tmp_path / "dumps", 1)
    drop_in.seen(TRAIN, ROLLOUT, MASK)
    written(tmp_path / "dumps", 1)
    drop_in.install(fake.targets)
    drop_in.seen(TRAIN, ROLLOUT, MASK)
    drop_in.install(fake.targets, tmp_path / "dumps", 1)
    drop_in.uninstall()
    drop_in.seen(TRAIN, ROLLOUT, MASK)
    time.sleep(0.05)
    assert len(written(tmp_path / "dumps", 1)) == 1
    for path, every in (("x.csv", 1), ("x", 0), ("x", 1.5), ("x", True)):
        with pytest.raises(ValueError, match=r"dump: expected a name|every: expected a whole number >= 1"):
            drop_in.install(fake.targets, path, every)
    assert drop_in.installed().switches == {} and not drop_in.installed().waiting


def test_a_dump_that_cannot_be_made_ends_and_nothing_else(tmp_path, caplog):
    dumps = Dumps(tmp_path / "x", 1)
    with caplog.at_level(logging.WARNING, "rollout_corr"):
        dumps.seen(TRAIN, ROLLOUT[:2], MASK)
        dumps.seen(TRAIN, ROLLOUT[:2], MASK)
    assert len(caplog.records) == 1 and "is off: " in caplog.text and not (tmp_path / "x").exists()
