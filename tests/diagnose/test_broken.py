"""Broken dumps: file, record and field are named in one line, and everything that is complete is read."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
import torch

from builders.dumps import WRITERS, packed, plain, records, sequences_of, wanted_of, write
from builders.dumps import write_jsonl as write_lines
from rollout_corr.diagnose.read import chunk, formats, problems
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.fields import ChosenFields
from rollout_corr.diagnose.read.problems import DumpError

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.zeros(3)


def failing(path, **arguments):
    """Read a dump that cannot be read, and return the line without the path at its beginning."""
    with pytest.raises(DumpError) as caught:
        list(Dump(path, **arguments).chunks())
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000
    return line.removeprefix(str(path))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_field_is_named(kind, tmp_path):
    columns = packed()
    columns["something"] = columns.pop("rollout_logp")
    message = failing(write(kind, tmp_path, columns))
    assert "field 'rollout_logp': no field has a known name for rollout_logp" in message
    assert "something" in message and "--field rollout_logp=NAME" in message


def test_a_file_that_is_cut_off_or_empty(tmp_path):
    path = write("pt padded", tmp_path, packed())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = failing(path)
    assert ": not a complete .pt file" in message and "that is cut off cannot be read" in message
    path.write_bytes(b"")
    assert ": not a complete .pt file: it is empty" in failing(path)


def pickled(value, **options):
    data = io.BytesIO()
    torch.save(value, data, **options)
    return data.getvalue()


def repacked(data, **options):
    """An archive with its members written by zipfile."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return made.getvalue()


class Calls:
    """Pickles as a call of os.system."""

    def __reduce__(self):
        return os.system, ("true",)


GOOD = {"train_logp": X, "rollout_logp": X, "lengths": torch.tensor([3])}
ITSELF = {"train_logp": X, "rollout_logp": X}
ITSELF["more"] = ITSELF


# Names of files, what is in them, and what is said.
REFUSED = {
    "no line": ("x.jsonl", b"\n", ": contains no sequences"),
    "no row": (
        "x.pt",
        pickled({"train_logp": torch.zeros(0, 4), "rollout_logp": torch.zeros(0, 4)}),
        "contains no sequences",
    ),
    "a tensor": ("x.pt", pickled(X), ": expected a dict of tensors or a list of records, got Tensor"),
    "numbers": ("x.pt", pickled([3]), ", record 0: expected a mapping, got int"),
    "text": ("x.pt", b"hello", ": not a complete .pt file: it is no zip archive"),
    "an old .pt": ("x.pt", pickled(GOOD, _use_new_zipfile_serialization=False), "torch.save writes since torch 1.6"),
    "no pickle": ("x.pt", b"PK\x05\x06" + bytes(18), ": not a complete .pt file: its bytes are damaged"),
    "compressed": ("x.pt", repacked(pickled(GOOD), compression=zipfile.ZIP_DEFLATED), "a record is compressed"),
    "a call": ("x.pt", pickled(GOOD | {"x": Calls()}), ": not a complete .pt file: it holds posix.system. Expected"),
    "a class": ("x.pt", pickled(GOOD | {"x": ChosenFields()}), "it holds rollout_corr.diagnose.read.fields.ChosenF"),
    "a cycle": ("x.pt", pickled(ITSELF), "nested too deeply, or holds itself"),
    "expanded": ("x.pt", pickled(GOOD | {"rollout_logp": torch.zeros(1).expand(10**9)}), "values that repeat"),
    "sparse": ("x.pt", pickled(GOOD | {"train_logp": X.to_sparse()}), "'train_logp': as train_logp: a tensor of torch"),
    "float8": ("x.pt", pickled(GOOD | {"train_logp": X.to(torch.float8_e5m2)}), "a tensor of torch.float8_e5m2"),
    "a list": (
        "x.pt",
        pickled(GOOD | {"rollout_logp": [1.0]}),
        "as rollout_logp: expected a tensor, as the others are",
    ),
    "large numbers": ("x.pt", pickled(GOOD | {"step": torch.full((3,), -1).view(torch.uint64)}), "below 2**63, got la"),
    "another kind": ("x.csv", b"", ": expected a name that ends in .pt"),
    "offsets": (
        "x.pt",
        pickled(GOOD | {"lengths": torch.tensor([1, -1])}),
        "record 1, field 'lengths': expected length",
    ),
    "a long sum": ("x.pt", pickled(GOOD | {"lengths": torch.tensor([2**62] * 4)}), "record 0, field 'lengths': expect"),
    "falling": ("x.pt", pickled(GOOD | {"cu_seqlens": torch.tensor([0, 2, 1])}), "record 1, field 'cu_seqlens': expec"),
    "a mask": ("x.pt", pickled(GOOD | {"mask": X[:2]}), "field 'mask': as mask: expected shape [3], got [2]"),
    "a mapping": (
        "x.pt",
        pickled(GOOD | {"mask": {"a": X}}),
        "field 'mask.a': as mask: expected values, got a mapping",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused(name, tmp_path):
    file, data, message = REFUSED[name]
    (tmp_path / file).write_bytes(data)
    assert message in failing(tmp_path / file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"rollout_logp": c["rollout_logp"][:-1]}, "field 'rollout_logp': as rollout_logp: expected shape"),
        (lambda c: {"cu_seqlens": c["cu_seqlens"] + 5}, "field 'cu_seqlens': expected offsets within [0, "),
        (lambda c: {"cu_seqlens": c["train_logp"].clone()}, "field 'cu_seqlens': expected "),
        (lambda c: {"train_logp": c["train_logp"].long()}, "field 'train_logp': as train_logp: expected floating"),
        (lambda c: {"train_logp": c["train_logp"][None, None]}, "expected shape [N] or [B, T], got [1, 1, "),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message, tmp_path):
    columns = packed()
    text = failing(write("pt packed", tmp_path, columns | change(columns)))
    assert message in text
    del columns["cu_seqlens"]
    assert "field 'train_logp': 1-D log-probs of shape [" in failing(write("pt packed", tmp_path, columns))


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"rollout_logp": [-1.0]}, "rollout_logp", "values, as many as train log-probs, got 1"),
        ({"mask": {}}, "mask", "values, as many as train log-probs, got 0"),
        ({"mask": [1, 0]}, "mask", "values, as many as train log-probs, got 2"),
        ({"train_logp": "-1.0"}, "train_logp", "expected a list of numbers, got str '-1.0'"),
        ({"train_logp": [[-1.0], [-1.0]]}, "train_logp", "expected a flat list, got a list of list"),
        ({"train_logp": [-1.0, [-1.0]]}, "train_logp", "expected a list of numbers, got a list of float and list"),
        ({"train_logp": -1.0}, "train_logp", "expected a flat list, got float -1.0"),
        ({"train_logp": None}, "train_logp", "no field has a known name for train_logp"),
        ({"token_ids": [1, 2]}, "token_ids", "as many as train log-probs, got 2 (left out)"),
        ({"texts": "all of it"}, "texts", "expected a list of strings, got str 'all of it' (left out)"),
    ],
)
@pytest.mark.parametrize("writer", ["jsonl", "pt"])
def test_a_broken_field_of_a_record_is_named(change, field, message, writer, tmp_path):
    """Without the log-probs or the mask the record is left out, without another field it stays."""
    columns = packed()
    rows = [plain(record) for record in records(columns)]
    rows[3] |= change
    path = tmp_path / f"x.{writer}"
    write_lines(path, rows) if writer == "jsonl" else torch.save(rows, path)
    dump = Dump(path)
    found, wanted = sequences_of(dump), wanted_of(columns)
    if message.endswith("(left out)"):
        assert (len(found) == len(wanted) and field != "token_ids") or set(found[3][1]["token_ids"]) == {-1}
        del found[3], wanted[3]
        assert found == wanted
    else:
        assert found == wanted[:3] + wanted[4:]
    (problem,) = dump.problems.shown
    assert (problem.file, problem.record, problem.field) == (str(path), 3, field)
    assert problem.what.endswith(message) or message in problem.what


def test_only_broken_records(tmp_path):
    write_lines(tmp_path / "x.jsonl", [{"train_logp": [-1.0], "rollout_logp": []}] * 30)
    dump = Dump(tmp_path / "x.jsonl")
    with pytest.raises(DumpError, match=r"record 0, field 'rollout_logp': expected 1 values"):
        list(dump.chunks())
    assert dump.problems.count == 30 and len(dump.problems.shown) == problems.SHOWN


def test_a_changed_byte_of_a_pt_file_is_noticed(tmp_path):
    """torch.load compares no checksums, and takes values from beyond a record that is too short."""
    path = write("pt packed", tmp_path, packed())
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        at = whole.index(archive.read(names[0]))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert f"the checksum of the record {names[0]} does not fit: its bytes have changed" in failing(path)
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(path, "w") as archive:
        for name in old.namelist():
            archive.writestr(name, old.read(name)[: -4 if name == names[0] else None])
    assert "bytes, beyond the record that has its values" in failing(path)


def test_a_pt_file_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = write("pt packed", tmp_path, packed())
    finally:
        torch.serialization.set_crc32_options(before)
    assert sequences_of(Dump(path)) == wanted_of(packed())


def test_files_beyond_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_PICKLE", 100)
    assert "MiB of plain values; save tensors instead of lists" in failing(write("pt packed", tmp_path, packed()))


# --- the boundary: one file never ends the reading of the others ------------------------------------------------------


def changed(path):
    """Flip a byte in the middle of a file."""
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes([data[half] ^ 0xFF]) + data[half + 1 :])


BAD = {
    "pt": lambda folder: changed(write("pt packed", folder, packed(200), "1")),
    "link": lambda folder: (folder / "1.jsonl").symlink_to(folder / "nowhere"),
    "pipe": lambda folder: os.mkfifo(folder / "1.jsonl"),
    "gzip": lambda folder: (folder / "1.jsonl.gz").write_bytes(b"not compressed"),
}


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_file_is_named_and_the_rest_of_the_folder_is_read(bad, tmp_path):
    columns = packed()
    write("pt packed", tmp_path, columns, "0")
    BAD[bad](tmp_path)
    write("jsonl", tmp_path, columns, "2")
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(columns) * 2
    (problem,) = dump.problems.shown
    assert str(problem).startswith(str(tmp_path / "1.")) and "\n" not in str(problem)


def test_the_exception_of_a_parser_stays_the_cause(tmp_path):
    """A mistake of a reader is a line for the user, and must still be found by whoever looks for it."""
    changed(write("pt packed", tmp_path, packed(200)))
    with pytest.raises(DumpError) as caught:
        list(Dump(tmp_path / "dump.pt").chunks())
    assert caught.value.__cause__ is not None


def test_the_consumer_keeps_its_own_exceptions(tmp_path):
    chunks = Dump(write("jsonl", tmp_path, packed())).chunks()
    next(chunks)
    with pytest.raises(KeyError):
        chunks.throw(KeyError("of the consumer"))


# --- files that other processes write while they are read -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "jsonl gz"])
def test_a_file_that_becomes_shorter_keeps_what_was_read(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(chunk, "CHUNK_SLOTS", 40)
    path = write(kind, tmp_path, packed(2000))
    dump = Dump(path)
    read = []
    for block in dump.chunks():
        os.truncate(path, 9)
        read += block.records.tolist()
    assert read == list(range(len(read))) and 0 < len(read) < 2000
    assert dump.problems.count == 1 and str(dump.problems.shown[0]).startswith(str(path))


def test_the_last_line_may_be_half_a_one(tmp_path):
    """A training run is still writing."""
    columns = packed()
    path = write("jsonl", tmp_path, columns)
    path.write_bytes(path.read_bytes()[:-40])
    dump = Dump(path)
    assert sequences_of(dump) == wanted_of(columns)[:-1]
    (problem,) = dump.problems.shown
    assert problem.record == 11 and "the file ends within the line" in str(problem)


def test_files_of_a_folder_that_go_and_come(tmp_path):
    """A file that is gone is named; one that has come after the folder was listed is of the next reading."""
    columns = packed()
    for name in "abc":
        write("pt packed", tmp_path, columns, name)
    dump = Dump(tmp_path)
    (tmp_path / "b.pt").unlink()
    write("pt packed", tmp_path, columns, "d")
    assert sequences_of(dump) == wanted_of(columns) * 2
    assert [str(problem) for problem in dump.problems.shown] == [f"{tmp_path / 'b.pt'}: no such file"]
