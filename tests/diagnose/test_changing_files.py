"""Files that other processes write while they are read: the old file or the new one, and never a mixture of both."""

from __future__ import annotations

import os
import zipfile

import pyarrow.parquet as pq
import pytest

from builders.dumps import WRITERS, packed, sequences_of, wanted_of, write
from rollout_corr.diagnose.read import parquet_files, record_files, tensor_files
from rollout_corr.diagnose.read.dump import Dump

pytestmark = pytest.mark.usefixtures("one_thread")

# To write a jagged tensor imports half of torch, which takes 2 s; its file is read like the other .pt files.
KINDS = [kind for kind in WRITERS if kind != "pt jagged"]


# Kinds that are read chunk by chunk from a file that stays open. A .json file and a pickle of lists are read at once.
IN_PARTS = sorted({"npz packed", "safetensors packed", "safetensors padded", "jsonl", "jsonl gz", "parquet"})


@pytest.fixture
def small_chunks(monkeypatch):
    for module in (tensor_files, record_files):
        monkeypatch.setattr(module, "CHUNK_SLOTS", 40)
    monkeypatch.setattr(parquet_files, "BATCH_ROWS", 2)


def swapped_after(monkeypatch, module, name, swap):
    """Let a file change right after a reader's call of a function of its parser."""
    original = getattr(module, name)

    def called(*arguments, **options):
        found = original(*arguments, **options)
        swap()
        return found

    monkeypatch.setattr(module, name, called)


def beside(kind, folder):
    """Write a dump, and a larger one that may take its place."""
    (folder / "new").mkdir()
    old, new = packed(12, 1), packed(60, 2)
    path, other = write(kind, folder, old), write(kind, folder / "new", new)
    return path, old, lambda: os.replace(other, path) if other.exists() else None


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_replaced_while_it_is_opened(kind, tmp_path, monkeypatch):
    """A writer that renames, as `rc.dump` does, at the worst moment: between two looks at one name."""
    path, old, swap = beside(kind, tmp_path)
    swapped_after(monkeypatch, zipfile, "is_zipfile", swap)
    swapped_after(monkeypatch, pq, "read_metadata", swap)
    dump = Dump(path)
    assert sequences_of(dump) == wanted_of(old)
    assert dump.problems.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_replaced_between_two_chunks(kind, tmp_path, small_chunks):
    path, old, swap = beside(kind, tmp_path)
    dump = Dump(path)
    found = []
    for chunk in dump.chunks():
        swap()
        found += chunk.records.tolist()
    assert found == [record for record, _ in wanted_of(old)]
    assert dump.problems.count == 0


@pytest.mark.parametrize("kind", IN_PARTS)
def test_a_file_that_becomes_shorter_keeps_what_was_read(kind, tmp_path, small_chunks):
    columns = packed(2000)
    path = write(kind, tmp_path, columns)
    dump = Dump(path)
    records = []
    for chunk in dump.chunks():
        os.truncate(path, 9)
        records += chunk.records.tolist()
    assert records == list(range(len(records)))
    assert 0 < len(records) < 2000
    assert dump.problems.count == 1
    line = str(dump.problems.shown[0])
    assert line.startswith(str(path)) and "\n" not in line


def test_a_file_that_grows_is_read_as_far_as_it_is_whole(tmp_path):
    """The last line of a training run that is still writing may be half a one."""
    columns = packed()
    path = write("jsonl", tmp_path, columns)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    dump = Dump(path)
    assert sequences_of(dump) == wanted_of(columns)[:-1]
    assert "the file ends within the line" in str(dump.problems.shown[0])
    path.write_bytes(whole)
    assert sequences_of(Dump(path)) == wanted_of(columns)


def test_files_of_a_folder_that_go_and_come(tmp_path):
    """A file that is gone is named; one that has come after the folder was listed is of the next reading."""
    columns = packed()
    for name in "abc":
        write("npz packed", tmp_path, columns, name)
    dump = Dump(tmp_path)
    (tmp_path / "b.npz").unlink()
    write("npz packed", tmp_path, columns, "d")
    assert sequences_of(dump) == wanted_of(columns) * 2
    assert [str(problem) for problem in dump.problems.shown] == [f"{tmp_path / 'b.npz'}: no such file"]
