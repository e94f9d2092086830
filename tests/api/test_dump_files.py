"""The files of `rc.dump`: whole lines only, nothing twice, and errors that say what is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import time

import pytest
import torch

from builders.dump_calls import call, failure, plain_numbers, read_numbers
from rollout_corr.api import dump_files

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


def test_a_half_line_of_a_killed_process_is_removed(tmp_path):
    path = tmp_path / "x.jsonl"
    assert call(path, count=3).result(60) == 3
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert call(path, first=10, count=2).result(60) == 2
        # Without its line break alone the line is whole, and stays.
        kept = [0, 1, 2] if cut >= len(whole) - 1 else [0, 1]
        assert plain_numbers(path) == [*kept, 10, 11], cut
    assert read_numbers(path) == ([0, 1, 2, 10, 11], [])


NESTED = b'{"train_logp": [' + 100_000 * b"["


@pytest.mark.parametrize(
    "left", [b'{"prompt": "half', b'{"which": -1}', b"not json", NESTED, b'{"which": -1}\n{"train']
)
def test_what_others_left_without_a_line_break_stays(left, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(left)
    assert call(path).result(60) == 3
    found = path.read_bytes()
    if left.endswith(b'{"train'):  # may be ours, and is no line
        assert found.startswith(b'{"which": -1}\n{"train_logp": [')
    else:
        assert found.startswith(left + b'\n{"train_logp": [')
    assert found.count(b"\n") == 4


def test_a_full_disk_leaves_nothing_of_the_call(tmp_path):
    path = tmp_path / "x.jsonl"
    assert call(path, count=2).result(60) == 2
    before = path.read_bytes()
    with largest_file(len(before) + 500):
        said = failure(call(path, first=10, count=20))
    assert f"{path}: File too large; 0 of the 20 sequences of this call are in the file" in said
    assert path.read_bytes() == before
    assert call(path, first=10, count=20).result(60) == 20
    assert plain_numbers(path) == [0, 1, *range(10, 30)]


@pytest.mark.parametrize("before", [b"", b"{}"])
def test_an_error_counts_every_whole_line(before, tmp_path, monkeypatch):
    """Wherever the write stops: what the error says is what is found afterwards."""
    lines = [dump_files.json_line({"train_logp": torch.tensor([i]), "which": i}) for i in range(3)]
    path, write = tmp_path / "x.jsonl", os.write

    def broken(file, *size):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "ftruncate", broken)
    for cut in range(sum(map(len, lines)) + bool(before)):
        path.write_bytes(before)
        parts = [cut]

        def short(file, data, parts=parts):
            return write(file, data[: parts.pop()]) if parts and parts[0] else broken(file)

        monkeypatch.setattr(os, "write", short)
        with pytest.raises(OSError, match="of the 3 sequences") as caught:
            dump_files.append(path, lines)
        found = 0
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found += "which" in json.loads(line)
        assert f" {found} of the 3 sequences" in str(caught.value), cut
    assert found == 3


def test_what_somebody_else_wrote_behind_is_not_taken_back(tmp_path, monkeypatch):
    path, write = tmp_path / "x.jsonl", os.write

    def short(file, data):
        if len(data) < 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[: len(data) - 500])
        with path.open("ab") as other:
            other.write(b"theirs\n")
        return done

    monkeypatch.setattr(os, "write", short)
    said = failure(call(path, count=20))
    assert path.read_bytes().endswith(b"theirs\n")
    there = path.read_bytes().count(b'"which"')
    assert f"No space left on device; {there} of the 20 sequences" in said and there > 0


def test_a_quota_that_is_told_at_closing_counts(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    assert call(path).result(60) == 3

    def full(file):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", full)
        assert "Disk quota exceeded; 0 of the 3 sequences" in failure(call(path, first=7))
        assert "Disk quota exceeded; 0 of the 3 sequences" in failure(call(tmp_path / "folder"))
    assert plain_numbers(path) == [0, 1, 2]
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


def test_half_shards_of_dead_processes_are_removed(tmp_path):
    now = time.time_ns()
    dead, young, living, other = (
        tmp_path / name
        for name in (
            "00000000-1600000000000000000-00ff.pt.part",
            f"00000000-{now}-00ff.pt.part",
            "00000000-1600000000000000000-0001.pt.part",
            "mine.pt.part",
        )
    )
    for part in (dead, young, living, other):
        part.write_text("half")
    with living.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert call(tmp_path).result(60) == 3
    assert not dead.exists() and young.exists() and living.exists() and other.exists()
    # Readers never take one for a shard.
    assert read_numbers(tmp_path) == ([0, 1, 2], [])
    # The next call removes the one whose process is dead by now.
    assert call(tmp_path, first=5).result(60) == 3
    assert not living.exists()


def test_names_of_shards_sort_by_step_and_never_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 17)
    for step in (12, 3, None, 3, 2**53):
        assert call(tmp_path, first=step or 0, count=1, step=step).result(60) == 1
    assert plain_numbers(tmp_path) == [0, 3, 3, 12, 2**53]
    assert all(torch.load(file, weights_only=True)["which"].numel() == 1 for file in tmp_path.glob("*.pt"))
