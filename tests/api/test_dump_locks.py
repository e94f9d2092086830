"""Several processes that write one path of `rc.dump`: one at a time, and none waits for ever."""

from __future__ import annotations

import errno
import fcntl
import os
from threading import Event

import pytest

from builders.dump_calls import call, failure, plain_numbers, read_numbers
from rollout_corr.api import dump_files

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # The tests look at the future's error.
    pytest.mark.filterwarnings("ignore:rollout_corr.dump:RuntimeWarning"),
]


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_a_file_that_goes_just_before_it_is_locked(name, tmp_path, monkeypatch):
    """A write to it would then be lost, though it was acknowledged."""
    lock, gone = dump_files._lock, []

    def late(file):
        if not gone:
            gone.append(os.readlink(f"/proc/self/fd/{file}"))
            os.unlink(gone[0])
        return lock(file)

    monkeypatch.setattr(dump_files, "_lock", late)
    assert call(tmp_path / name).result(60) == 3
    assert plain_numbers(tmp_path / name) == [0, 1, 2] and len(gone) == 1


def test_a_lock_that_is_never_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_files, "LOCK_SECONDS", 0.05)
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process has held its lock for 0 s; 0 of the 3 sequences" in failure(call(path))
    assert call(path).result(60) == 3


def test_a_process_that_was_forked_during_a_write_holds_no_lock(tmp_path, monkeypatch):
    path, write, go, begun = tmp_path / "x.jsonl", os.write, Event(), Event()

    def slow(file, data):
        begun.set()
        assert go.wait(60)
        return write(file, data)

    end, other = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow)
        future = call(path)
        assert begun.wait(60)
        pid = os.fork()
        if pid == 0:
            os.read(end, 1)
            os._exit(0)
        go.set()
        assert future.result(60) == 3
    monkeypatch.setattr(dump_files, "LOCK_SECONDS", 1.0)
    assert call(path, first=5).result(60) == 3
    os.write(other, b"x")
    os.waitpid(pid, 0)
    os.close(end)
    os.close(other)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "folder").mkdir()
    part = tmp_path / "folder" / "00000000-1-0000.pt.part"
    part.write_text("perhaps of a process that lives")
    for path in (tmp_path / "x.jsonl", tmp_path / "folder"):
        assert call(path).result(60) == 3
        assert plain_numbers(path) == [0, 1, 2]
    assert part.exists()


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_processes_write_to_one_path(name, tmp_path):
    def run(process):
        for i in range(15):
            assert call(tmp_path / name, first=1000 * process + 5 * i, count=5).result(60) == 5

    children = []
    for process in range(4):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                run(process)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    wanted = [1000 * process + i for process in range(4) for i in range(75)]
    assert sorted(plain_numbers(tmp_path / name)) == wanted
    found, problems = read_numbers(tmp_path / name)
    assert sorted(found) == wanted and problems == []
