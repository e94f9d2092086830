"""The thread of `rc.dump`: a hung disk, threads, forks and exits cost the training loop nothing."""

from __future__ import annotations

import builtins
import gc
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

from builders.dump_calls import Disk, call, forked, plain_numbers
from rollout_corr.api import dump as dumping
from rollout_corr.api import dump_thread

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


def test_so_many_calls_wait_for_a_hung_disk(disk, tmp_path):
    """Neither memory nor threads pile up: one thread, and a further call is left out."""
    before = threading.active_count()
    hung = [call(tmp_path / "hung.jsonl")]
    assert disk.begun.wait(60)
    hung += [call(tmp_path / f"hung{step}", first=3 * step) for step in range(50)]
    assert [future.done() for future in hung] == [False] * (1 + dump_thread.MOST_WAITING) + [True] * 42
    assert [future.result() for future in hung[-42:]] == [0] * 42 and threading.active_count() <= before + 1
    disk.free.set()
    assert [future.result(60) for future in hung[:-42]] == [3] * 9
    assert call(tmp_path / "hung.jsonl", first=3).result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(6))


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


def test_a_canceled_call_writes_nothing(disk, tmp_path):
    first, second, third = (call(tmp_path / "hung.jsonl", first=3 * i) for i in range(3))
    assert disk.begun.wait(60)
    assert second.cancel() and not first.cancel()
    disk.free.set()
    assert third.result(60) == 3
    assert plain_numbers(tmp_path / "hung.jsonl") == [0, 1, 2, 6, 7, 8]


def test_offsets_that_nobody_has_looked_at(tmp_path):
    """Those of a device are read by the thread; wrong ones are an error and not a wrong file."""
    fields = dumping._Fields({"train_logp": torch.zeros(5)}, {}, torch.tensor([0, 9, 2]), 2, {})
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


# --- forks and exits ---


def test_a_fork_while_writes_wait(disk, tmp_path):
    """The parent writes what waits; the child has a thread of its own, and its end says nothing."""
    hung = [call(tmp_path / "hung.jsonl", first=3 * i) for i in range(4)]
    assert disk.begun.wait(60)

    def run():
        for i in range(5):
            assert call(tmp_path / "x.jsonl", first=100 + i, count=1).result(60) == 1

    assert forked(run) == 0
    assert forked(lambda: forked(run)) == 0
    disk.free.set()
    assert [future.result(60) for future in hung] == [3] * 4
    assert plain_numbers(tmp_path / "hung.jsonl") == list(range(12))
    assert plain_numbers(tmp_path / "x.jsonl") == [100, 101, 102, 103, 104] * 2


def script(tmp_path, text, *arguments):
    """Run a script in a process of its own, with `call` in it; return how it went."""
    header = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nimport torch; torch.set_num_threads(1)\n"
    )
    file = tmp_path / "script.py"
    file.write_text(header + "from builders.dump_calls import call\n" + textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *arguments, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def test_a_process_ends_although_its_disk_hangs(tmp_path):
    done = script(
        tmp_path,
        """
        import os, time
        from rollout_corr.api import dump_thread
        dump_thread.EXIT_SECONDS = 1.0
        write = os.write
        def slow(file, data):
            time.sleep(1000 if "hung" in os.readlink(f"/proc/self/fd/{file}") else 0)
            return write(file, data)
        os.write = slow
        call("x.jsonl")
        for i in range(2):
            call("hung.jsonl", first=3 * i)
        """,
    )
    assert done.returncode == 0
    assert "the process ends, and after 1 s 2 calls still wait for the disk" in done.stderr
    assert "Traceback" not in done.stderr
    assert plain_numbers(tmp_path / "x.jsonl") == [0, 1, 2]


def test_nothing_waits_or_is_said_at_the_end_of_a_good_run(tmp_path):
    done = script(
        tmp_path,
        """
        import os, time
        write = os.write
        def slow(file, data):
            time.sleep(0.2)
            return write(file, data)
        os.write = slow
        for i in range(3):
            call("x.jsonl", first=3 * i)
            call("d", first=3 * i)
        if os.fork() == 0:
            sys.exit()
        os.wait()
        """,
        "-Werror",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert plain_numbers(tmp_path / "x.jsonl") == plain_numbers(tmp_path / "d") == list(range(9))
