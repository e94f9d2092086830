"""Processes and `rc.dump`: forks, processes of multiprocessing, and exits, also while the disk hangs."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from builders.dump_calls import Disk, call, forked, plain_numbers
from rollout_corr.api import dump_threads

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Python 3.12 warns of every fork with threads; what happens then is the subject here.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


@pytest.fixture
def disk(monkeypatch):
    found = Disk(monkeypatch)
    yield found
    found.free.set()


def test_a_fork_while_writes_wait(disk, tmp_path):
    hung = [call(tmp_path / "hung.jsonl", first=3 * i) for i in range(4)]
    shard = call(tmp_path / "hung", first=50)
    assert disk.begun.wait(60)

    def run():
        for future in (*hung, shard):
            with pytest.raises(RuntimeError, match="the parent of this forked process made this call"):
                future.result(10)
        for i in range(5):
            assert call(tmp_path / "x.jsonl", first=100 + i, count=1).result(60) == 1
        disk.free.set()
        # The parent holds the lock of this one.
        assert not wait([call(tmp_path / "hung.jsonl", first=200)], 0.1).done

    # A thread that the child lacks is looking at a future.
    looks, seen = threading.Event(), threading.Event()

    def look():
        with hung[1]._condition:
            looks.set()
            assert seen.wait(120)

    looking = threading.Thread(target=look)
    looking.start()
    assert looks.wait(60)
    assert forked(run) == 0
    seen.set()
    looking.join(60)
    assert forked(lambda: forked(run)) == 0
    disk.free.set()
    assert [future.result(60) for future in hung] == [3] * 4
    assert shard.result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(12))
    assert plain_numbers(tmp_path / "hung") == [50, 51, 52]
    assert plain_numbers(tmp_path / "x.jsonl") == [100, 101, 102, 103, 104] * 2


def test_a_fork_while_a_result_is_given(tmp_path, monkeypatch):
    """No moment of the thread leaves a future that the child waits for without an end."""
    threads, paused, go = dump_threads.threads, threading.Event(), threading.Event()
    give_back = threads.give_back

    def slow(path):
        give_back(path)
        paused.set()
        assert go.wait(60)

    monkeypatch.setattr(threads, "give_back", slow)
    future = call(tmp_path / "x.jsonl")
    assert paused.wait(60)

    def run():
        with pytest.raises(RuntimeError, match="the parent of this forked process"):
            future.result(10)

    assert forked(run) == 0
    go.set()
    assert future.result(60) == 3


def _dump_and_end(path, first):
    """A process of multiprocessing dumps without waiting; its end waits."""
    for i in range(4):
        call(path, first=first + 3 * i)


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_processes_of_multiprocessing_write_what_waits_when_they_end(name, tmp_path):
    assert call(tmp_path / name).result(60) == 3
    children = [
        multiprocessing.get_context("fork").Process(target=_dump_and_end, args=(tmp_path / name, first))
        for first in (100, 200)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    wanted = [0, 1, 2, *range(100, 112), *range(200, 212)]
    assert sorted(plain_numbers(tmp_path / name)) == wanted


def script(tmp_path, text, *arguments, timeout=120):
    """Run a script in a process of its own, with `call` in it; return how it went."""
    header = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nimport torch; torch.set_num_threads(1)\n"
    )
    file = tmp_path / "script.py"
    file.write_text(header + "from builders.dump_calls import call\n" + textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *arguments, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout
    )


def test_a_process_ends_although_its_disk_hangs(tmp_path):
    done = script(
        tmp_path,
        """
        import os, time
        from rollout_corr.api import dump_threads
        dump_threads.EXIT_SECONDS = 1.0
        write = os.write
        def slow(file, data):
            name = os.readlink(f"/proc/self/fd/{file}")
            time.sleep(1000 if "hung" in name else 0.2 if "x.jsonl" in name else 0)
            return write(file, data)
        os.write = slow
        for i in range(2):
            call("hung.jsonl", first=3 * i)
            call("x.jsonl", first=3 * i)
        """,
        timeout=60,
    )
    assert done.returncode == 0
    hung = tmp_path / "hung.jsonl"
    assert f"the process ends, and after 1 s these calls still wait for the disk: {hung} (2 calls)" in done.stderr
    assert "Traceback" not in done.stderr
    assert plain_numbers(tmp_path / "x.jsonl") == [0, 1, 2, 3, 4, 5]


def test_nothing_waits_or_is_said_at_the_end_of_a_good_run(tmp_path):
    done = script(
        tmp_path, "for i in range(3):\n    call('x.jsonl', first=3 * i)\n    call('d', first=3 * i)", "-Werror"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert plain_numbers(tmp_path / "x.jsonl") == plain_numbers(tmp_path / "d") == list(range(9))
