"""Files that once broke the readers, or would have: each is refused in one line, or read right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builders.dumps import packed, write
from lab.attack.files import judge, run

CORPUS = sorted((Path(__file__).parent / "corpus" / "files").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_a_file_that_once_broke_it(path, one_thread):
    outcome = judge(path, None)
    assert outcome.verdict == "refused", outcome.detail


def test_all_of_them_in_one_folder(tmp_path, one_thread):
    """None of them ends the reading: every one is named, and the good one behind them is read."""
    for path in CORPUS:
        (tmp_path / path.name).symlink_to(path)
    good = packed()
    write("jsonl", tmp_path, good, "zzz")
    code, out, err = run(["report", str(tmp_path), "--json"])
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["problems"]["count"] >= len(CORPUS)
    assert found["metrics"]["tokens"] >= int(good["mask"].sum())
