"""Broken dumps: file, record and field are named in one line, and everything that is complete is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
import zipfile

import pytest
import torch

from builders.dumps import packed, plain, records, sequences_of, wanted_of, write, write_gzip
from builders.dumps import write_jsonl as write_lines
from rollout_corr.diagnose.read import chunk, formats, json_files, problems, record_files
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.fields import ChosenFields
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.read.record_files import MOST_FIELDS, flat

X = torch.zeros(3)


def failing(path, **arguments):
    """Read a dump that cannot be read, and return the line without the path at its beginning."""
    with pytest.raises(DumpError) as caught:
        list(Dump(path, **arguments).chunks())
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000
    return line.removeprefix(str(path))


def pickled(value, **options):
    data = io.BytesIO()
    torch.save(value, data, **options)
    return data.getvalue()


def repacked(data, change=lambda name, member: member, **options):
    """An archive with its members changed, and written by zipfile."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return made.getvalue()


def injected(instructions):
    """A pickle that begins with other instructions."""
    return repacked(pickled(GOOD), lambda name, x: x[:2] + instructions + x[2:] if name.endswith("data.pkl") else x)


class Calls:
    """Pickles as a call of os.system."""

    def __reduce__(self):
        return os.system, ("true",)


PACKED = {"train_logp": X, "rollout_logp": X}
GOOD = PACKED | {"lengths": torch.tensor([3])}
ITSELF = dict(GOOD)
ITSELF["more"] = ITSELF

# What is saved in place of good columns, or among them, and what is said.
COLUMNS = [
    ({"train_logp": X, "some": X}, "--field rollout_logp=NAME, in Python"),
    (PACKED, "field 'train_logp': 1-D log-probs of shape [3] need a field cu_seqlens"),
    (PACKED | {"cu_seqlens": torch.tensor([5, 8])}, "expected offsets within [0, "),
    (PACKED | {"cu_seqlens": X - 0.5}, "field 'cu_seqlens': expected "),
    (X, ": expected a dict of tensors or a list of records, got Tensor"),
    ([3], ", record 0: expected a mapping, got int"),
    (ITSELF, "nested too deeply, or holds itself"),
    (GOOD | {"rollout_logp": X[:2]}, "'rollout_logp': as rollout_logp: expected shape [3]"),
    (GOOD | {"train_logp": X.long()}, "as train_logp: expected floating log-probs"),
    (GOOD | {"train_logp": X[None, None]}, "expected shape [N] or [B, T], got [1, 1, 3]"),
    (GOOD | {"x": Calls()}, ": not a complete .pt file: it holds posix.system. Expected"),
    (GOOD | {"x": ChosenFields()}, "it holds rollout_corr.diagnose.read.fields.ChosenF"),
    (GOOD | {"rollout_logp": torch.zeros(1).expand(10**9)}, "values that repeat"),
    (GOOD | {"train_logp": X.to_sparse()}, "'train_logp': as train_logp: a tensor of torch"),
    (GOOD | {"train_logp": X.to("meta")}, "torch.strided, on meta"),
    (GOOD | {"train_logp": X.to(torch.float8_e5m2)}, "a tensor of torch.float8_e5m2"),
    (GOOD | {"rollout_logp": [1.0]}, "as rollout_logp: expected a tensor, as the others are"),
    (GOOD | {"step": torch.full((3,), -1).view(torch.uint64)}, "below 2**63, got la"),
    (GOOD | {"lengths": torch.tensor([1, -1])}, "record 1, field 'lengths': expected length"),
    (GOOD | {"lengths": torch.tensor([2**62] * 4)}, "record 0, field 'lengths': expect"),
    (GOOD | {"cu_seqlens": torch.tensor([0, 2, 1])}, "record 1, field 'cu_seqlens': expec"),
    (GOOD | {"mask": X[:2]}, "field 'mask': as mask: expected shape [3], got [2]"),
    (GOOD | {"mask": 1}, "field 'mask': as mask: expected a tensor, as the others are, got int"),
    (GOOD | {"mask": {"a": X}}, "field 'mask.a': as mask: expected values, got a mapping"),
]
# The bytes of a .pt file, or of a file of another name.
FILES = [
    (pickled(GOOD)[:500], "; one that is cut off cannot be read"),
    (b"", ": not a complete .pt file: it is empty"),
    (b"hello", ": not a complete .pt file: it is no zip archive"),
    (pickled(GOOD, _use_new_zipfile_serialization=False), "torch.save writes since torch 1.6"),
    (b"PK\x05\x06" + bytes(18), ": not a complete .pt file: its bytes are damaged"),
    (repacked(pickled(GOOD), compression=zipfile.ZIP_DEFLATED), "a record is compressed"),
    # Pickles that ask for 256 TiB, and for a table of 2^31 entries.
    (injected(b"c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R0"), "its bytes are damaged, or of something else"),
    (injected(b"]r\xff\xff\xff\x7f0"), "its bytes are damaged, or of something else"),
    # These are no problem in a folder.
    (pickled(dict.fromkeys(PACKED, torch.zeros(0, 4))), ": contains no sequences"),
    (b"\n", ": contains no sequences", "x.jsonl"),
    (b"", ": expected a name that ends in .pt", "x.csv"),
]
REFUSED = [*((pickled(columns), message) for columns, message in COLUMNS), *FILES]


@pytest.mark.parametrize("row", REFUSED, ids=[row[1] for row in REFUSED])
def test_a_file_that_is_refused(row, tmp_path):
    data, message, *name = row
    path = tmp_path / "".join(name or ["x.pt"])
    path.write_bytes(data)
    assert message in failing(path)


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
    **{f"{i}.pt": lambda path, data=data: path.write_bytes(data) for i, (data, *_) in enumerate(REFUSED[:-3])},
    # A link to nothing, a pipe, and bytes that are not compressed, under names of dumps.
    "1.jsonl": lambda path: path.symlink_to("nowhere"),
    "2.jsonl": os.mkfifo,
    "3.jsonl.gz": lambda path: path.write_bytes(b"not compressed"),
}


def test_bad_files_are_named_and_the_rest_of_the_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "SHOWN", 99)
    columns = packed()
    for name in ("!", "z"):
        write("jsonl", tmp_path, columns, name)
    for name, make in BAD.items():
        make(tmp_path / name)
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(columns) * 2
    assert sorted(problem.file for problem in dump.problems.shown) == sorted(str(tmp_path / name) for name in BAD)


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


# --- lines -----------------------------------------------------------------------------------------------------------

LINE = '{"train_logp": [-1.0, -2.0], "rollout_logp": [-1.5, -2.5]}'


def beside_a_good_line(folder, line):
    """Write a line and a good one after it, which is read whatever the first one is; return the problem."""
    path = folder / "x.jsonl"
    path.write_bytes((line if isinstance(line, bytes) else line.encode()) + b"\n" + LINE.encode() + b"\n")
    dump = Dump(path)
    assert [record for record, _ in sequences_of(dump)] == [1]
    assert dump.problems.count == 1 and len(str(dump.problems.shown[0])) < 1000
    return str(dump.problems.shown[0]).removeprefix(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 50_000, "line 1 is nested too deeply"),
        # Python 3.12 reads it, and the record is refused.
        ('{"a":' * 3000 + "1" + "}" * 3000, "line 1 is nested too deeply|32 mappings inside of one another"),
        ('{"a":' * 200 + "1" + "}" * 200, "32 mappings inside of one another"),
        (LINE.replace("-1.0", "1" + "0" * 400), "got a list of float and int (int too large to convert to float)"),
        (LINE.replace("-1.0", "1" + "0" * 9000), "line 1 is not JSON (Exceeds the limit"),
        (LINE + LINE, "line 1 is not JSON (Extra data"),
        (f"[{LINE}, {LINE}]", "expected an object, got list"),
        (LINE[:-1] + ', "train_logp": [1, 2]}', "line 1: the field 'train_logp' occurs twice"),
        (LINE[:-1] + ', "a": {"b": 1}, "a.b": 2}', "the field 'a.b' occurs twice"),
        (LINE.replace("[-1.0, -2.0]", '"' + "x" * 5000 + '"'), "'train_logp': expected a list of numbers, got str 'xx"),
        (json.dumps({f"field {i}": 1 for i in range(500)}), "and 490 more"),
        ('{"' + "a" * 100_000 + '": 1}', "expected names of at most 1000 letters"),
        (LINE.encode("utf-16"), "line 1 is not JSON ('utf-8' codec can't decode"),
    ],
)
def test_a_line_that_is_refused(line, message, tmp_path):
    found = beside_a_good_line(tmp_path, line)
    assert any(one in found for one in message.split("|")), found


@pytest.mark.parametrize(
    ("line", "train"),
    [
        (LINE.replace("-1.0", "NaN"), [torch.nan, -2.0]),
        (LINE.replace("-1.0", "-Infinity"), [-torch.inf, -2.0]),
        (LINE.replace("-1.0", "null"), [torch.nan, -2.0]),
        (LINE.replace("-1.0", "-1e999"), [-torch.inf, -2.0]),
        ("\ufeff" + LINE, [-1.0, -2.0]),
        (LINE[:-1] + ', "step": 1e300, "texts": ["\\ud800", "' + "y" * 9000 + '"]}', [-1.0, -2.0]),
    ],
)
def test_a_line_that_is_read(line, train, tmp_path):
    (tmp_path / "x.jsonl").write_text(line, encoding="utf-8")
    block = next(Dump(tmp_path / "x.jsonl").chunks())
    assert torch.equal(block.train.nan_to_num(7.0), torch.tensor(train).nan_to_num(7.0))
    assert block.texts is None or [len(text) for text in block.texts[0]] == [1, record_files.LONGEST_TEXT]


def test_a_long_line_is_skipped_and_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MOST_LINE", 1 << 20)
    monkeypatch.setattr(json_files, "BLOCK", 1000)
    message = beside_a_good_line(tmp_path, '{"train_logp": [' + "-1.5," * 300_000)
    assert message == ", record 0: line 1 has more than 1 MiB"
    for length in ((1 << 20) - 1, 1 << 20):
        (tmp_path / "x.jsonl").write_text(LINE + "\n" + LINE.ljust(length) + "\n" + LINE)
        assert len(sequences_of(Dump(tmp_path / "x.jsonl"))) == 3 - (length == 1 << 20)


@pytest.mark.parametrize("unit", ["[],", '"a",', '"\U0001f600",'])
def test_a_line_of_small_items_takes_bounded_memory(unit, tmp_path, monkeypatch):
    """28 MiB of `[],` are 1 GB of lists. What is estimated is more than Python really takes, and not parsed."""
    monkeypatch.setattr(json_files, "MOST_MEMORY", 4 << 20)
    text = b'{"a": [' + (unit * ((1 << 20) // len(unit.encode()))).encode() + b"1]}"
    tracemalloc.start()
    json.loads(text, object_pairs_hook=json_files._object)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 10 times is where short strings, which Python has once, are counted as new ones.
    assert taken < json_files._memory(text) - len(text) < 12 * taken
    monkeypatch.setattr(json_files.json, "loads", None)
    (tmp_path / "x.jsonl").write_bytes(text)
    assert "MiB of memory; a record may take 4 MiB" in failing(tmp_path / "x.jsonl")


def test_mappings_that_contain_themselves():
    """Written by pickle, which torch.load reads: shared mappings have 2^n fields, and a cycle has no end."""
    cycle = {}
    cycle["a"] = cycle
    shared = {}
    for _ in range(30):
        shared = {"a": shared, "b": shared}
    for record in (cycle, shared, dict.fromkeys(range(MOST_FIELDS + 1), 1), {(1, 2): 3}, {None: None}):
        with pytest.raises(DumpError, match="expected"):
            flat(record)
    assert flat({"a": {"b": 1, "c": {}}, 5: None}) == {"a.b": 1, "a.c": {}, "5": None}


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_file_of_records_that_breaks_in_the_middle(at, tmp_path, monkeypatch):
    """A parser may raise anything: all records before are read, and the break has its number."""
    columns = packed(5)
    rows = [plain(record) for record in records(columns)]
    write_lines(tmp_path / "a.jsonl", rows)
    write_lines(tmp_path / "b.jsonl", rows)
    loads, calls = json.loads, iter(range(99))

    def failing(line, **arguments):
        if next(calls) == at:
            raise MemoryError
        return loads(line, **arguments)

    monkeypatch.setattr(json_files.json, "loads", failing)
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(columns)[:at] + wanted_of(columns)
    (problem,) = dump.problems.shown
    assert problem.file == str(tmp_path / "a.jsonl") and problem.record == (at or None)
    assert problem.what.endswith("it asks for more memory than there is")


def test_a_record_of_too_many_values(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MOST_VALUES", 100)
    rows = [{"train_logp": [-0.5] * n, "rollout_logp": [-1.0] * n} for n in (100, 101, 5)]
    torch.save([{name: torch.tensor(x) for name, x in row.items()} for row in rows], tmp_path / "x.pt")
    write_lines(tmp_path / "x.jsonl", rows)
    for suffix in ("pt", "jsonl"):
        dump = Dump(tmp_path / f"x.{suffix}")
        assert [number for number, _ in sequences_of(dump)] == [0, 2]
        assert "101" in str(dump.problems.shown[0]) and dump.problems.shown[0].record == 1


# --- .jsonl.gz --------------------------------------------------------------------------------------------------------

ROW = json.loads(LINE)


def test_lines_before_the_end_of_a_cut_gzip_file_are_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_gzip(path, [ROW | {"id": str(i)} for i in range(2000)])
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    dump = Dump(path)
    read = len(sequences_of(dump))
    assert 1000 < read <= 2000 and dump.problems.count == 1
    assert f"record {read}: the compressed data are cut off or damaged from here on" in str(dump.problems.shown[0])


def test_a_hundred_million_blank_lines(tmp_path):
    """100 kB that stand for 100 MB; in a folder the file after it is read."""
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 100_000_000, 6))
    assert "the compressed data stand for more than 200 times themselves from here on" in failing(path)
    write_lines(tmp_path / "y.jsonl", [ROW])
    assert len(sequences_of(Dump(tmp_path))) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blank_lines_are_counted(suffix, tmp_path):
    """Blocks of blank lines, with a record and a broken one between them, whose numbers are those of their lines."""
    path = tmp_path / f"x{suffix}"
    blank = b" \t\n\r\n" * 100_000
    data = blank + LINE.encode() + b"\n" + blank + b"{\n" + blank + LINE.encode()
    path.write_bytes(gzip.compress(data) if suffix == ".jsonl.gz" else data)
    dump = Dump(path)
    assert [number for number, _ in sequences_of(dump)] == [200_000, 600_002]
    assert [problem.record for problem in dump.problems.shown] == [400_001]


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
