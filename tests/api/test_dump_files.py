"""The files of `rc.dump`: finished shards and lines are whole, and errors say what is there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time

import pytest
import torch

from builders.dump_calls import call, failure, plain_numbers, read_numbers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # The tests look at the future's error.
    pytest.mark.filterwarnings("ignore:rollout_corr.dump:RuntimeWarning"),
]


@contextlib.contextmanager
def largest_file(size):
    """The kernel writes up to this size and refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_half_line_of_a_killed_process_costs_no_other(tmp_path):
    path = tmp_path / "x.jsonl"
    assert call(path, count=3).result(60) == 3
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert call(path, first=10, count=2).result(60) == 2
        # Without its line break alone the line is whole.
        kept = [0, 1, 2] if cut >= len(whole) - 1 else [0, 1]
        found, problems = read_numbers(path)
        assert found == [*kept, 10, 11] and bool(problems) == (start < cut < len(whole) - 1), cut


def test_a_full_disk(tmp_path):
    """Calls behind one that failed are written whole, and readers skip the half line that it left."""
    path = tmp_path / "x.jsonl"
    assert call(path, count=2).result(60) == 2
    with largest_file(path.stat().st_size + 500):
        said = failure(call(path, first=10, count=20))
    assert f"{path}: File too large; some of the 20 sequences of this call may be in the file" in said
    assert call(path, first=40, count=20).result(60) == 20
    found, problems = read_numbers(path)
    assert found[:2] == [0, 1] and found[-20:] == list(range(40, 60)) and len(problems) == 1
    with largest_file(500):
        said = failure(call(tmp_path / "folder", count=20))
    assert "File too large; 0 of the 20 sequences of this call are in the folder" in said
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_quota_that_is_told_at_closing_counts(tmp_path, monkeypatch):
    close = os.close

    def full(file):
        close(file)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", full)
        said = failure(call(tmp_path / "x.jsonl")), failure(call(tmp_path / "folder"))
    assert "Disk quota exceeded; some of the 3 sequences" in said[0]
    assert "Disk quota exceeded; 0 of the 3 sequences" in said[1]
    assert list((tmp_path / "folder").iterdir()) == []


def test_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "fifo.jsonl")
    for name, reason in {
        "file": "File exists",
        "file/x.jsonl": "File exists",
        "file/deep/x.jsonl": "Not a directory",
        "folder.jsonl": "Is a directory",
        "fifo.jsonl": "expected a regular file",
    }.items():
        said = failure(call(tmp_path / name))
        assert reason in said and str(tmp_path / name) in said and "0 of the 3 sequences" in said


def test_a_file_may_be_removed_or_rotated_between_calls(tmp_path):
    path = tmp_path / "logs" / "x.jsonl"
    assert call(path).result(60) == 3
    path.rename(tmp_path / "logs" / "x.1.jsonl")
    assert call(path, first=5).result(60) == 3
    assert plain_numbers(path) == [5, 6, 7]
    path.unlink()
    (tmp_path / "logs" / "x.1.jsonl").unlink()
    path.parent.rmdir()
    assert call(path, first=8).result(60) == 3
    assert plain_numbers(path) == [8, 9, 10]


def test_half_shards_are_none(tmp_path):
    """Those that a killed process left."""
    (tmp_path / "00000000-1600000000000000000-00ff.pt.part").write_text("half")
    assert call(tmp_path).result(60) == 3
    assert read_numbers(tmp_path) == ([0, 1, 2], [])


def test_names_of_shards_sort_by_step_and_never_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 17)
    for step in (12, 3, None, 3, 2**53):
        assert call(tmp_path, first=step or 0, count=1, step=step).result(60) == 1
    assert plain_numbers(tmp_path) == [0, 3, 3, 12, 2**53]
    assert all(torch.load(file, weights_only=True)["which"].numel() == 1 for file in tmp_path.glob("*.pt"))
