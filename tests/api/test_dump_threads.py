"""The threads of `rc.dump`: a hung disk, threads, forks and exits cost the training loop nothing."""

from __future__ import annotations

import builtins
import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import wait
from pathlib import Path
from unittest import mock

import pytest
import torch

from builders.dump_calls import call, forked, plain_numbers
from rollout_corr.api import dump as dumping
from rollout_corr.api import dump_threads

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Python 3.12 warns of every fork beside threads; what happens then is the subject here.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


class Disk:
    """A disk on which files whose path has a name that starts with "hung" cannot be written until it is freed."""

    def __init__(self, monkeypatch):
        self.free, self.begun, self._write = threading.Event(), threading.Event(), os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file, data):
        if "/hung" in os.readlink(f"/proc/self/fd/{file}"):
            self.begun.set()
            assert self.free.wait(120)
        return self._write(file, data)


@pytest.fixture
def disk(monkeypatch):
    found = Disk(monkeypatch)
    yield found
    found.free.set()


def test_a_hung_path_blocks_no_other(disk, tmp_path):
    hung = [call(tmp_path / "hung.jsonl", first=3 * i) for i in range(6)]
    assert [future.done() for future in hung] == [False] * 4 + [True] * 2
    assert [future.result() for future in hung[4:]] == [0, 0]
    for i in range(10):
        assert call(tmp_path / "x.jsonl", first=3 * i).result(60) == 3
        assert call(tmp_path / "folder", first=3 * i).result(60) == 3
    disk.free.set()
    assert [future.result(60) for future in hung[:4]] == [3] * 4
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(12))
    assert plain_numbers(tmp_path / "x.jsonl") == plain_numbers(tmp_path / "folder") == list(range(30))
    assert call(tmp_path / "hung.jsonl").result(60) == 3


def test_a_hung_disk_holds_so_many_paths(disk, tmp_path):
    """A path a step on a hung disk: neither memory nor threads pile up."""
    before = threading.active_count()
    hung = [call(tmp_path / f"hung{step}", first=3 * step) for step in range(50)]
    assert [future.done() for future in hung] == [False] * dump_threads.MOST_PATHS + [True] * 42
    assert threading.active_count() <= before + dump_threads.MOST_PATHS
    disk.free.set()
    assert [future.result(60) for future in hung] == [3] * dump_threads.MOST_PATHS + [0] * 42
    assert call(tmp_path / "later.jsonl").result(60) == 3


def test_the_call_touches_no_disk(tmp_path, monkeypatch):
    caller = threading.current_thread()

    def guarded(function):
        def guard(*arguments, **named):
            assert threading.current_thread() is not caller
            return function(*arguments, **named)

        return guard

    with monkeypatch.context() as patch:
        for name in ("open", "stat", "lstat", "mkdir", "scandir", "listdir", "readlink", "write"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        patch.setattr(builtins, "open", guarded(builtins.open))
        futures = [call(tmp_path / "x.jsonl", step=1), call(tmp_path / "folder", step=1)]
        wait(futures, 60)
    assert [future.result() for future in futures] == [3, 3]


def test_the_folder_of_the_call_is_meant(disk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    futures = [call("hung.jsonl", first=3 * i) for i in range(2)]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    disk.free.set()
    assert [future.result(60) for future in futures] == [3, 3]
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(6))


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.warns(RuntimeWarning, match=r"x\.jsonl: No such file or directory; 0 of the 3 sequences"):
        assert isinstance(call("x.jsonl").exception(60), OSError)


def test_a_path_means_what_the_kernel_makes_of_it(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er")
    assert call(tmp_path / "link" / ".." / "x.jsonl").result(60) == 3
    assert plain_numbers(tmp_path / "deep" / "x.jsonl") == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_may_end_no_thread(disk, tmp_path):
    def leave(future):
        sys.exit()

    call(tmp_path / "hung.jsonl").add_done_callback(leave)
    second = call(tmp_path / "hung.jsonl", first=3)
    disk.free.set()
    assert second.result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(6))


def test_a_disk_that_hangs_where_files_are_opened(tmp_path, monkeypatch):
    free, opened = threading.Event(), os.open

    def slow(path, *arguments, **named):
        if "/hung" in str(path):
            assert free.wait(120)
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", slow)
    hung = [call(tmp_path / "hung.jsonl", first=3 * i) for i in range(5)]
    assert call(tmp_path / "x.jsonl").result(60) == 3
    free.set()
    assert [future.result(60) for future in hung] == [3, 3, 3, 3, 0]


def test_a_step_goes_on_when_there_is_no_memory(tmp_path, monkeypatch, strict):
    """An error behind the checks is the future's, also where warnings are errors."""

    def full(fields, fresh):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(dumping, "_copied", full)
        futures = [call(tmp_path / "x.jsonl") for _ in range(6)]
    for future in futures:
        with pytest.raises(RuntimeError, match=r"x\.jsonl: no memory; 0 sequences of this call are in it"):
            future.result(0)
    (tmp_path / "file").write_text("")
    assert isinstance(call(tmp_path / "file").exception(60), OSError)
    assert call(tmp_path / "x.jsonl").result(60) == 3


def test_an_interrupt_gives_its_place_back(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(dumping, "_copied", mock.Mock(side_effect=KeyboardInterrupt))
        for _ in range(6):
            with pytest.raises(KeyboardInterrupt):
                call(tmp_path / "x.jsonl")
    assert call(tmp_path / "x.jsonl").result(60) == 3


@pytest.mark.filterwarnings("ignore:rollout_corr.dump:RuntimeWarning")
def test_a_machine_without_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_threads, "threads", dump_threads.Threads())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(6):
            assert "can't start new thread" in str(call(tmp_path / "x.jsonl").exception(0))
    assert call(tmp_path / "x.jsonl").result(60) == 3


def test_a_cancelled_call_writes_nothing(disk, tmp_path):
    first, second, third = (call(tmp_path / "hung.jsonl", first=3 * i) for i in range(3))
    assert disk.begun.wait(60)
    assert second.cancel() and not first.cancel()
    disk.free.set()
    assert third.result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == [0, 1, 2, 6, 7, 8]


def test_offsets_that_nobody_has_looked_at(tmp_path):
    """Those of a device are read by the thread; wrong ones are an error and not a wrong file."""
    fields = dumping._Fields({"train_logp": torch.zeros(5)}, {}, torch.tensor([0, 9, 2]), 2)
    with pytest.raises(RuntimeError, match=r"x\.jsonl: cu_seqlens: expected .*; 0 sequences of this call are in it"):
        dumping._write(tmp_path / "x.jsonl", fields, mock.Mock(), None, None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:rollout_corr.dump:RuntimeWarning")
def test_a_failed_call_holds_no_tensors(tmp_path, monkeypatch):
    """Whoever keeps the futures keeps no batches with them."""
    copied, held = dumping._copied, []

    def noted(fields, fresh):
        found, event = copied(fields, fresh)
        held.append(weakref.ref(found.tokens["train_logp"]))
        return found, event

    monkeypatch.setattr(dumping, "_copied", noted)
    (tmp_path / "file").write_text("")
    gc.disable()
    try:
        futures = [call(tmp_path / "file" / name) for name in ("x.jsonl", "folder")]
        assert all(isinstance(future.exception(60), OSError) for future in futures)
        # The thread is out of those calls once it has made another.
        assert call(tmp_path / "y.jsonl").result(60) == 3
        late = time.monotonic() + 60
        while any(tensor() is not None for tensor in held):
            assert time.monotonic() < late
    finally:
        gc.enable()


def test_threads_dump(tmp_path):
    acknowledged, paths = [], [tmp_path / "x.jsonl", tmp_path / "y.jsonl", tmp_path / "folder"]

    def run(thread):
        for i in range(20):
            first = 1000 * thread + 3 * i
            for path in paths:
                if call(path, first=first).result(60):
                    acknowledged.append((path, first))

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(acknowledged) > 100
    for path in paths:
        wanted = sorted(first + i for other, first in acknowledged if other == path for i in range(3))
        assert sorted(plain_numbers(path)) == wanted


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


@pytest.mark.parametrize("others", [0, 3])
def test_a_fork_in_a_callback_writes_nothing_twice(others, disk, tmp_path):
    first = call(tmp_path / "hung.jsonl")
    ended = []

    def fork(future):
        # The child goes on in the thread. How it ends is Python's: 3.11 aborts when the thread does.
        pid = os.fork()
        if pid:
            late = time.monotonic() + 30
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < late:
                time.sleep(0.01)
            ended.append(time.monotonic() < late)

    first.add_done_callback(fork)
    waiting = [call(tmp_path / "hung.jsonl", first=3 * i) for i in range(1, others + 1)]
    disk.free.set()
    assert [future.result(60) for future in waiting] == [3] * others
    assert call(tmp_path / "hung.jsonl", first=50).result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == [*range(3 * others + 3), 50, 51, 52]
    assert ended == [True]


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


class Dumping(torch.utils.data.Dataset):
    """A data set whose workers dump."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return call(self.path, first=100 + i, count=1).result(60)


def _dump_and_end(path, first):
    """What a process of multiprocessing does: it waits for nothing, and the end of the process does."""
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


def test_workers_of_a_data_loader_dump(disk, tmp_path):
    hung = call(tmp_path / "hung.jsonl")
    loader = torch.utils.data.DataLoader(
        Dumping(tmp_path / "x.jsonl"), num_workers=2, multiprocessing_context="fork", batch_size=3
    )
    assert [batch.tolist() for batch in loader] == [[1, 1, 1]] * 4
    disk.free.set()
    assert hung.result(60) == 3
    assert sorted(plain_numbers(tmp_path / "x.jsonl")) == list(range(100, 112))
    assert plain_numbers(tmp_path / "hung.jsonl") == [0, 1, 2]


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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_start_anew(method, tmp_path):
    done = script(
        tmp_path,
        f"""
        import multiprocessing
        def run(first):
            for i in range(4):
                call("x.jsonl", first=first + 3 * i)
        if __name__ == "__main__":
            call("x.jsonl")
            process = multiprocessing.get_context({method!r}).Process(target=run, args=(100,))
            process.start()
            process.join()
            sys.exit(process.exitcode)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(plain_numbers(tmp_path / "x.jsonl")) == [0, 1, 2, *range(100, 112)]


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
