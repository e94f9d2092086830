"""Files that are written whole: after any failure the old one is there, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys

import pytest

from rollout_corr import whole_files
from rollout_corr.whole_files import write_whole


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    return path


def test_texts_and_bytes(page, tmp_path):
    write_whole(page, "näw\n")
    assert page.read_bytes() == "näw\n".encode()
    write_whole(str(tmp_path / "other"), b"\x00\xff")
    assert (tmp_path / "other").read_bytes() == b"\x00\xff"
    assert len(list(tmp_path.iterdir())) == 2


def test_permissions(page, tmp_path):
    """An old file keeps its own; a new one has those of any other file."""
    page.chmod(0o640)
    write_whole(page, "new")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640 and page.read_text(encoding="utf-8") == "new"
    (tmp_path / "plain").write_text("x", encoding="utf-8")
    write_whole(tmp_path / "made", "x")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_symlink_stays(page, tmp_path):
    (tmp_path / "sub").mkdir()
    link = tmp_path / "sub" / "link.html"
    link.symlink_to("../page.html")
    write_whole(link, "new")
    assert link.is_symlink() and page.read_text(encoding="utf-8") == "new"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "sub" / "made")
    write_whole(dangling, "new")
    assert dangling.is_symlink() and (tmp_path / "sub" / "made").read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_after_a_failure_the_old_file_is_there(failure, page, tmp_path, monkeypatch):
    def fail(descriptor):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(failure)):
        write_whole(page, "new")
    assert page.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [page]


def test_after_a_kill_the_old_file_is_there(page):
    """The process is killed with everything written and nothing renamed. It runs the file alone, without torch."""
    code = (
        "import os, runpy, signal, sys; write_whole = runpy.run_path(sys.argv[1])['write_whole']; "
        "os.fsync = lambda d: os.kill(os.getpid(), signal.SIGKILL); write_whole(sys.argv[2], 'new')"
    )
    command = [sys.executable, "-c", code, whole_files.__file__, str(page)]
    done = subprocess.run(command, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL and page.read_text(encoding="utf-8") == "old"


def test_what_may_not_be_written_stays(page, tmp_path, monkeypatch):
    """A rename could replace a read-only file; a folder without write permission takes no second file."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(PermissionError):
        write_whole(page, "new")
    monkeypatch.undo()

    def denied(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(whole_files, "open", denied, raising=False)
    with pytest.raises(PermissionError):
        write_whole(page, "new")
    assert page.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [page]


def test_what_is_no_regular_file_is_written_to(tmp_path):
    write_whole("/dev/null", "x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match=r"loop|symbolic links"):
        write_whole(tmp_path / "loop", "x")
