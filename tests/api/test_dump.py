"""`rc.dump`: what it writes is read back, it holds nothing up, and its errors are kept."""

from __future__ import annotations

import json
import re
from threading import Event

import pytest
import torch

import rollout_corr as rc
from builders.dump_calls import read_numbers
from builders.dumps import packed, padded, records
from rollout_corr.api import dump as dumping
from rollout_corr.cli.main import main
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.testing import example_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def dumped(path, columns, **arguments):
    given = {name: columns[name] for name in ("train_logp", "rollout_logp", "mask", "cu_seqlens")}
    future = rc.dump(path, **given, **arguments)
    return future.result(timeout=60)


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_a_dump_is_read_back(name, tmp_path):
    columns = packed()
    more = {key: columns[key] for key in ("token_ids", "advantages")}
    assert dumped(tmp_path / name, columns, sequences=None, step=3, **more) == 12
    dump = Dump(tmp_path / name)
    block = next(dump.chunks())
    for key, x in (("train_logp", block.train), ("rollout_logp", block.rollout), ("mask", block.mask)):
        assert torch.equal(x, columns[key]), key
    assert torch.equal(block.offsets, columns["cu_seqlens"])
    assert torch.equal(block.columns["token_ids"], columns["token_ids"])
    assert set(block.columns["steps"].tolist()) == {3}
    assert block.columns["advantages"].unique().tolist() == columns["advantages"].tolist()


def test_a_trainer_over_the_kept_set_is_written_over_the_whole_vocabulary(tmp_path):
    """So D of the file is D of the call, and the file needs no mass."""
    train, rollout, log_mass = -torch.rand(2, 5), -torch.rand(2, 5) - 0.5, -torch.rand(2, 5)
    batch = rc.Batch(kept_mass=rc.KeptMass(log_mass, of="train"))
    assert rc.dump(tmp_path / "x.jsonl", train, rollout, batch, sequences=None).result(timeout=60) == 2
    block = next(Dump(tmp_path / "x.jsonl").chunks())
    d, wanted = (block.train - block.rollout).view(2, 5), train - (rollout - log_mass)
    assert "log_mass" not in block.columns and torch.allclose(d, wanted, atol=1e-6)
    assert rc.correct(train, rollout, batch).metrics()["logratio_mean"] == pytest.approx(wanted.mean().item(), abs=1e-6)


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_names_of_labels_are_kept_and_shown(name, tmp_path, capsys):
    batch = example_batch(sequences=60)
    count = batch.cu_seqlens.shape[0] - 1
    ids = torch.arange(count) % 3
    rollout = batch.rollout_logp - 0.7 * (ids == 2).repeat_interleave(batch.cu_seqlens.diff()) * torch.rand(
        batch.train_logp.shape, generator=torch.Generator().manual_seed(0)
    )
    labels = {"environment": rc.Labels(ids, ["math", "code\x1b[2J", "<b>tools"]), "source": rc.Labels(ids, 3)}
    given = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens, labels=labels)
    path = tmp_path / name
    assert rc.dump(path, batch.train_logp, rollout, given, sequences=None).result(timeout=60)
    dump = Dump(path, by=("environment", "source"))
    measured = measure(dump)
    assert dump.label_names == {"environment": ("math", "code[2J", "<b>tools")}
    profiles = measured.profiles()
    assert [row.label for row in profiles["environment"]] == ["math", "code[2J", "<b>tools"]
    assert [row.label for row in profiles["source"]] == ["0", "1", "2"]
    assert main(["doctor", str(path), "--by", "environment"]) in (0, 1)
    shown = capsys.readouterr().out
    assert "environment <b>tools" in shown
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--by", "environment", "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<b>tools" not in text and "tools" in text and "math" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_turns_are_written_in_every_form(name, tmp_path):
    logp, mask = torch.full((2, 4), -1.0), torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    numbers = [0, 0, 1, 1, 2, 3, 3, 3]
    offsets, flat = torch.tensor([0, 2, 4, 5, 8]), mask.view(-1)
    forms = {
        "offsets": rc.Batch(mask=mask, turns=offsets),
        "ids": rc.Batch(mask=mask, turns=torch.tensor(numbers).view(2, 4)),
        "packed": rc.Batch(mask=flat, turns=offsets.int(), cu_seqlens=torch.tensor([0, 4, 8])),
    }
    for form, batch in forms.items():
        x, path = logp.view(batch.mask.shape), tmp_path / form / name
        assert rc.dump(path, x, x - 0.1, batch, sequences=None).result(timeout=60) == 2
        assert next(Dump(path).chunks()).columns["turns"].tolist() == numbers, form
    path = tmp_path / "runs" / name
    assert rc.dump(path, logp, logp, rc.Batch(mask=mask, turns="runs"), sequences=None).result(timeout=60) == 2
    assert "turns" not in next(Dump(path).chunks()).columns
    with pytest.raises(ValueError, match="turns: expected every sequence to begin with a turn, got none at 4"):
        rc.dump(tmp_path / name, logp, logp, rc.Batch(mask=mask, turns=torch.tensor([0, 3, 5, 8])))


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
@pytest.mark.parametrize("layout", ["packed", "gaps", "padded", "list", "jagged"])
def test_some_sequences_are_drawn(name, layout, tmp_path):
    """Five of forty in each call, in their order, whole, and not the same ones again."""
    numbers, offsets = torch.arange(40), None
    train = -(numbers / 8.0 + 0.125)[:, None].expand(40, 3)
    if layout in ("packed", "gaps"):
        outside = torch.full((2 * (layout == "gaps"),), 7.0)  # tokens of no sequence
        train, offsets = torch.cat([outside, train.flatten(), outside]), torch.arange(41) * 3 + len(outside)
    elif layout != "padded":
        rows = list(train)
        train = rows if layout == "list" else torch.nested.nested_tensor(rows, layout=torch.jagged)
    drawn = []
    for step in range(3):
        path = tmp_path / f"{step}" / name
        assert rc.dump(path, train, train, cu_seqlens=offsets, sequences=5, which=numbers).result(60) == 5
        found, problems = read_numbers(path)
        assert found == sorted(set(found)) and len(found) == 5 and problems == []
        drawn.append(found)
    assert len({*map(tuple, drawn)}) > 1


def test_later_changes_do_not_reach_the_dump(tmp_path, monkeypatch):
    """The loop may write over its tensors as soon as the call is back."""
    go, write_now = Event(), dumping._write

    def held(*arguments):
        assert go.wait(60)
        return write_now(*arguments)

    monkeypatch.setattr(dumping, "_write", held)
    columns = packed()
    wanted = columns["train_logp"].clone()
    given = {n: columns[n] for n in ("train_logp", "rollout_logp", "mask", "cu_seqlens")}
    future = rc.dump(tmp_path / "x.jsonl", **given, sequences=None)
    columns["train_logp"].fill_(0.0)
    columns["cu_seqlens"].fill_(0)
    go.set()
    assert future.result(timeout=60) == 12
    assert torch.equal(torch.cat([block.train for block in Dump(tmp_path / "x.jsonl").chunks()]), wanted)


def test_an_error_while_writing_is_kept_and_warned_of(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.jsonl"
    batch = example_batch(3, 20)
    said = re.escape(f"{path}: File exists ({tmp_path / 'file'}); 0 of the 3 sequences of this call are in the file")
    with pytest.warns(RuntimeWarning, match=rf"rollout_corr\.dump: .*{said}"):
        future = rc.dump(path, batch.train_logp, batch.rollout_logp, cu_seqlens=batch.cu_seqlens)
        with pytest.raises(OSError, match=said):
            future.result(timeout=60)


def test_values_that_numbers_can_have(tmp_path):
    """NaN and infinity are the literals of Python's json; whole numbers are whole at any size."""
    inf, nan = float("inf"), float("nan")
    train = torch.tensor([-0.1, nan, -inf, inf, -3.0e38], dtype=torch.bfloat16)
    given = {
        "mask": torch.tensor([True, False, True, True, True]),
        "cu_seqlens": torch.tensor([0, 2, 2, 5]),
        "huge": torch.tensor([2**63 - 1, -(2**63), 2**53 + 1]),
        "token_ids": torch.tensor([1, 2, 3, 4, 2**53]),
        "advantages": torch.tensor([nan, inf, -0.0], dtype=torch.float64),
        'a "name"/with\ud800\n\x00.dots': torch.arange(3, dtype=torch.int32),
        "": torch.ones(5, dtype=torch.float16),
    }
    for name in ("x.jsonl", "folder"):
        assert rc.dump(tmp_path / name, train, train, sequences=None, step=2**53, **given).result(60) == 3
        (chunk,) = Dump(tmp_path / name).chunks()
        torch.testing.assert_close(chunk.train.to(torch.bfloat16), train, rtol=0, atol=0, equal_nan=True)
        assert chunk.mask.tolist() == given["mask"].tolist()
        assert chunk.offsets.tolist() == [0, 2, 2, 5]
        assert chunk.columns["token_ids"].tolist() == [1, 2, 3, 4, 2**53]
        assert set(chunk.columns["steps"].tolist()) == {2**53}
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text("ascii").splitlines()]
    assert [line["huge"] for line in lines] == given["huge"].tolist()
    assert [line['a "name"/with\ud800\n\x00.dots'] for line in lines] == [0, 1, 2]
    assert lines[1]["train_logp"] == [] and lines[1]["step"] == 2**53
    (shard,) = (torch.load(file, weights_only=True) for file in (tmp_path / "folder").iterdir())
    assert shard["huge"].tolist() == given["huge"].tolist()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_dump_from_a_device_waits_for_nothing(layout, device, tmp_path):
    """The copies are started in the order of the stream; on a GPU with offsets on it, all sequences are copied."""
    columns = packed(40)
    names = ("train_logp", "rollout_logp", "mask")
    if layout == "packed":
        tensors, given = (
            {n: columns[n].to(device, copy=True) for n in names},
            {"cu_seqlens": columns["cu_seqlens"].to(device)},
        )
    else:
        made = padded(columns)
        tensors, given = {n: made[n].to(device) for n in names}, {}
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        future = rc.dump(tmp_path / "folder", **tensors, **given, sequences=5, seed=3)
        tensors["train_logp"].fill_(0.0)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert future.result(timeout=60) == 5
    rows = [row["train_logp"] for row in records(columns)]
    for block in Dump(tmp_path / "folder").chunks():
        for s in range(block.sequences):
            train = block.train[int(block.offsets[s]) : int(block.offsets[s + 1])]
            assert any(torch.equal(train[: row.numel()], row) for row in rows)


@pytest.mark.parametrize("name", ["x.jsonl", "x"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_versions_and_labels_have_any_integer_dtype(name, dtype, tmp_path):
    """As in `correct`, so that a job which corrects can dump."""
    ids = torch.arange(12, dtype=dtype).view(3, 4)
    tensors = torch.full((3, 4), -0.5), torch.full((3, 4), -0.25)
    batch = rc.Batch(versions=rc.Versions(ids, 12))
    rc.dump(tmp_path / name, *tensors, batch, environment=ids[:, 0], sequences=None).result(60)
    (chunk,) = Dump(tmp_path / name, by=["environment"]).chunks()
    assert chunk.columns["versions"].tolist() == list(range(12))
    assert chunk.columns["environment"].tolist() == [float(i) for i in (0, 4, 8) for _ in range(4)]
