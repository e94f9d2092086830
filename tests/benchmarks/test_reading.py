"""The benchmark of reading writes dumps that are read, and measures them. Nothing here measures a time."""

from __future__ import annotations

import re

import pytest

from benchmarks import reading
from rollout_corr.diagnose.read.dump import Dump

pytestmark = pytest.mark.usefixtures("one_thread")


def read(path):
    """Return the number of sequences, the fields and the problems of a dump."""
    dump = Dump(path)
    return sum(chunk.sequences for chunk in dump.chunks()), set(dump.fields), dump.problems.count


@pytest.mark.parametrize("suffix", reading.WRITERS)
def test_every_format_is_written(suffix, tmp_path):
    path = tmp_path / f"dump{suffix}"
    reading.WRITERS[suffix](path, 5 * reading.ROW_BYTES)
    sequences, fields, problems = read(path)
    assert sequences >= 2 and problems == 0
    assert fields == {"train_logp", "rollout_logp", "mask", "token_ids", "advantages", "versions"}


@pytest.mark.parametrize("name", ["steps.jsonl", "steps"])
def test_a_run_of_many_steps_is_written(name, tmp_path):
    reading.write_steps(tmp_path / name, 3)
    sequences, fields, problems = read(tmp_path / name)
    assert sequences == 3 * reading.STEP_SEQUENCES and "steps" in fields and problems == 0


def test_the_command_prints_a_table_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reading, "WRITERS", {".pt": reading.write_pt})
    assert reading.main(["--mib", "0.1", "--steps", "0", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, command in zip(lines, ("report", "doctor"), strict=True):
        assert re.fullmatch(rf"\| `\.pt` \| {command} \| 0 \| 0\.0 \| \d+ \| \d+ \|", line)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHILD", """print('{"code": 2, "tokens": 0}')""")
    with pytest.raises(RuntimeError, match=r'report x\.jsonl: \{"code": 2'):
        reading.measure(tmp_path / "x.jsonl", "report")
