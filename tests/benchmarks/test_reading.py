"""The benchmark of reading writes dumps that are read, and measures them. Nothing here measures a time."""

from __future__ import annotations

import re

import pytest

from benchmarks import reading
from rollout_corr.diagnose.read.dump import Dump

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"mib": 5 * reading.ROW_BYTES / 2**20, "steps": 3}


@pytest.mark.parametrize("name", reading.DUMPS)
def test_what_is_written_is_read(name, tmp_path):
    file, write, size = reading.DUMPS[name]
    write(tmp_path / file, SIZES[size])
    dump = Dump(tmp_path / file)
    sequences, of_steps = sum(chunk.sequences for chunk in dump.chunks()), {"steps"} & {size}
    assert sequences == 3 * reading.STEP_SEQUENCES if of_steps else sequences >= 2
    fields = {"train_logp", "rollout_logp", "mask", "token_ids", "advantages", "versions"}
    assert dump.problems.count == 0 and set(dump.fields) == fields | of_steps


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(reading, "DUMPS", dict(list(reading.DUMPS.items())[:1]))
    monkeypatch.setattr(reading, "COMMANDS", ("report",))
    assert reading.main(["--mib", "0.1"]) == 0
    assert re.fullmatch(r"\| `\.pt` \| report \| 0 \| 0\.0 \| \d+ \| \d+ \|", capsys.readouterr().out.splitlines()[-1])


def test_a_command_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHILD", """print('{"code": 2, "tokens": 0}')""")
    with pytest.raises(RuntimeError, match=r'report x\.jsonl: \{"code": 2'):
        reading.measure(tmp_path / "x.jsonl", "report")
