"""Records that ask for much memory, or that no reader expects: read right, or refused with one line."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
import torch

from builders.dumps import packed as columns_of
from builders.dumps import plain, records, sequences_of, wanted_of, write_gzip, write_jsonl
from rollout_corr.diagnose.read import json_files, record_files
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.read.record_files import MOST_FIELDS, flat

pytestmark = pytest.mark.usefixtures("one_thread")

GOOD = '{"train_logp": [-1.0, -2.0], "rollout_logp": [-1.5, -2.5]}'


def refusal(path):
    """Read a dump that cannot be read; return the line."""
    with pytest.raises(DumpError) as caught:
        list(Dump(path).chunks())
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000
    return line.removeprefix(str(path))


def beside_a_good_line(folder, line):
    """Write a line and a good one after it, which is read whatever the first one is; return the problem."""
    path = folder / "x.jsonl"
    path.write_bytes((line if isinstance(line, bytes) else line.encode()) + b"\n" + GOOD.encode() + b"\n")
    dump = Dump(path)
    assert [record for record, _ in sequences_of(dump)] == [1]
    assert dump.problems.count == 1 and len(str(dump.problems.shown[0])) < 1000
    return str(dump.problems.shown[0]).removeprefix(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 50_000, "line 1 is nested too deeply"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "line 1 is nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "32 mappings inside of one another"),
        (GOOD.replace("-1.0", "1" + "0" * 400), "got a list of float and int (int too large to convert to float)"),
        (GOOD.replace("-1.0", "1" + "0" * 9000), "line 1 is not JSON (Exceeds the limit"),
        (GOOD + GOOD, "line 1 is not JSON (Extra data"),
        (f"[{GOOD}, {GOOD}]", "expected an object, got list"),
        (GOOD[:-1] + ', "train_logp": [1, 2]}', "line 1: the field 'train_logp' occurs twice"),
        (GOOD[:-1] + ', "a": {"b": 1}, "a.b": 2}', "the field 'a.b' occurs twice"),
        (GOOD.replace("[-1.0, -2.0]", '"' + "x" * 5000 + '"'), "'train_logp': expected a list of numbers, got str 'xx"),
        (json.dumps({f"field {i}": 1 for i in range(500)}), "and 490 more"),
        ('{"' + "a" * 100_000 + '": 1}', "expected names of at most 1000 letters"),
        (GOOD.encode("utf-16"), "line 1 is not JSON ('utf-8' codec can't decode"),
    ],
)
def test_a_line_that_is_refused(line, message, tmp_path):
    assert message in beside_a_good_line(tmp_path, line)


@pytest.mark.parametrize(
    ("line", "train"),
    [
        (GOOD.replace("-1.0", "NaN"), [torch.nan, -2.0]),
        (GOOD.replace("-1.0", "-Infinity"), [-torch.inf, -2.0]),
        (GOOD.replace("-1.0", "null"), [torch.nan, -2.0]),
        (GOOD.replace("-1.0", "-1e999"), [-torch.inf, -2.0]),
        ("\ufeff" + GOOD, [-1.0, -2.0]),
        (GOOD[:-1] + ', "step": 1e300, "texts": ["\\ud800", "' + "y" * 9000 + '"]}', [-1.0, -2.0]),
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
        (tmp_path / "x.jsonl").write_text(GOOD + "\n" + GOOD.ljust(length) + "\n" + GOOD)
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
    assert "MiB of memory; a record may take 4 MiB" in refusal(tmp_path / "x.jsonl")


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
    columns = columns_of(5)
    rows = [plain(record) for record in records(columns)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", rows)
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
    write_jsonl(tmp_path / "x.jsonl", rows)
    for suffix in ("pt", "jsonl"):
        dump = Dump(tmp_path / f"x.{suffix}")
        assert [number for number, _ in sequences_of(dump)] == [0, 2]
        assert "101" in str(dump.problems.shown[0]) and dump.problems.shown[0].record == 1


# --- .jsonl.gz --------------------------------------------------------------------------------------------------------

ROW = {"train_logp": [-1.0, -2.0], "rollout_logp": [-1.5, -2.5]}


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
    assert "the compressed data stand for more than 200 times themselves from here on" in refusal(path)
    write_jsonl(tmp_path / "y.jsonl", [ROW])
    assert len(sequences_of(Dump(tmp_path))) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blank_lines_are_counted(suffix, tmp_path):
    """Blocks of blank lines, with a record and a broken one between them, whose numbers are those of their lines."""
    path = tmp_path / f"x{suffix}"
    blank = b" \t\n\r\n" * 100_000
    data = blank + GOOD.encode() + b"\n" + blank + b"{\n" + blank + GOOD.encode()
    path.write_bytes(gzip.compress(data) if suffix == ".jsonl.gz" else data)
    dump = Dump(path)
    assert [number for number, _ in sequences_of(dump)] == [200_000, 600_002]
    assert [problem.record for problem in dump.problems.shown] == [400_001]
