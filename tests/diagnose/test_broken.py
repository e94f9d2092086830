"""Broken dumps: file, record and field are named, and everything that is complete is read."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from builders.dumps import (
    WRITERS,
    packed,
    plain,
    ragged,
    records,
    sequences_of,
    wanted_of,
    with_lengths,
    without,
    write,
    write_jsonl,
)
from rollout_corr.cli.main import main
from rollout_corr.diagnose.read import problems
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.fields import ChosenFields
from rollout_corr.diagnose.read.problems import DumpError

pytestmark = pytest.mark.usefixtures("one_thread")


def of_lengths(columns, lengths):
    """A packed dump whose lengths are these."""
    return with_lengths(columns) | {"lengths": torch.tensor(lengths)}


def failing(path, **arguments):
    """Read a dump that cannot be read, and return the message."""
    with pytest.raises(DumpError) as caught:
        list(Dump(path, **arguments).chunks())
    return str(caught.value)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_field_is_named(kind, tmp_path):
    columns = packed()
    columns["something"] = columns.pop("rollout_logp")
    message = failing(write(kind, tmp_path, columns))
    assert str(tmp_path) in message and "field 'rollout_logp': no field has a known name for rollout_logp" in message
    assert "something" in message and "--field rollout_logp=NAME" in message


@pytest.mark.parametrize("kind", ["pt packed", "npz packed", "parquet", "safetensors packed"])
def test_an_empty_file_is_named(kind, tmp_path):
    path = write(kind, tmp_path, packed())
    path.write_bytes(b"")
    assert str(path) in failing(path)


def test_a_dump_without_sequences(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    assert failing(tmp_path / "x.jsonl") == f"{tmp_path / 'x.jsonl'}: no sequence in it"
    torch.save({"train_logp": torch.zeros(0, 4), "rollout_logp": torch.zeros(0, 4)}, tmp_path / "x.pt")
    assert failing(tmp_path / "x.pt").endswith("no sequence in it")
    (tmp_path / "empty").mkdir()
    assert "expected files that end in .pt" in failing(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["pt padded", "pt old format", "npz packed", "parquet"])
def test_a_file_with_its_directory_cut_off(kind, tmp_path):
    path = write(kind, tmp_path, packed())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = failing(path)
    assert message.startswith(f"{path}: ") and "is cut off cannot be read" in message


@pytest.mark.parametrize("kind", ["safetensors padded", "safetensors packed"])
def test_a_cut_off_safetensors_file_gives_what_is_whole(kind, tmp_path):
    """Tensors follow one another in the file, so a cut shortens only the last field."""
    columns = packed()
    path = write(kind, tmp_path, columns)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    begin, end = header[last]["data_offsets"]
    path.write_bytes(data[: len(data) - (end - begin) // 2])
    dump = Dump(path)
    found = sequences_of(dump)
    assert found == wanted_of(columns)[: len(found)]
    assert 0 < len(found) < len(wanted_of(columns))
    problem = dump.problems.shown[0]
    assert dump.problems.count == 1
    assert (problem.file, problem.record, problem.field) == (str(path), len(found), last)
    assert "cut off" in problem.what


def test_a_safetensors_file_cut_off_before_a_field(tmp_path):
    path = write("safetensors packed", tmp_path, packed())
    data = path.read_bytes()
    path.write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])
    assert "cut off: the file holds 0 of" in failing(path)
    path.write_bytes(data[:20])
    assert "no complete header in its 20 bytes" in failing(path)
    path.write_bytes(struct.pack("<Q", 4) + b"none and more")
    assert "the header is not JSON" in failing(path)


def test_a_cut_off_jsonl_file_gives_all_but_its_last_line(tmp_path):
    columns = packed()
    path = write("jsonl", tmp_path, columns)
    path.write_bytes(path.read_bytes()[:-40])
    dump = Dump(path)
    assert sequences_of(dump) == wanted_of(columns)[:-1]
    assert dump.problems.count == 1
    assert dump.problems.shown[0].record == 11
    assert "the file ends within the line" in str(dump.problems.shown[0])


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"rollout_logp": [-1.0]}, "rollout_logp", "values, as many as train log-probs, got 1"),
        ({"mask": {}}, "mask", "values, as many as train log-probs, got 0"),
        ({"mask": [1, 0]}, "mask", "values, as many as train log-probs, got 2"),
        ({"train_logp": "-1.0"}, "train_logp", "expected a list of numbers, got str '-1.0'"),
        ({"train_logp": ["-1.0"]}, "train_logp", "expected a list of numbers, got a list of str"),
        ({"train_logp": [[-1.0]]}, "train_logp", "expected a flat list, got a list of list"),
        ({"train_logp": [-1.0, [-1.0]]}, "train_logp", "expected a list of numbers, got a list of float and list"),
        ({"train_logp": -1.0}, "train_logp", "expected a flat list, got float -1.0"),
        ({"train_logp": None}, "train_logp", "no field has a known name for train_logp"),
    ],
)
@pytest.mark.parametrize("writer", ["jsonl", "pt"])
def test_a_broken_record_is_named_and_left_out(change, field, message, writer, tmp_path):
    columns = packed()
    rows = [plain(record) for record in records(columns)]
    rows[3] |= change
    path = tmp_path / f"x.{writer}"
    if writer == "jsonl":
        write_jsonl(path, rows)
    else:
        torch.save(rows, path)
    dump = Dump(path)
    wanted = wanted_of(columns)
    assert sequences_of(dump) == wanted[:3] + wanted[4:]
    assert dump.problems.count == 1
    problem = dump.problems.shown[0]
    assert (problem.file, problem.record, problem.field) == (str(path), 3, field)
    assert message in problem.what


def test_a_broken_optional_field_leaves_the_record_in(tmp_path):
    columns = packed()
    rows = [plain(record) for record in records(columns)]
    rows[3]["token_ids"] = [1, 2]
    rows[4]["texts"] = "all of it"
    write_jsonl(tmp_path / "x.jsonl", rows)
    dump = Dump(tmp_path / "x.jsonl")
    found = sequences_of(dump)
    assert len(found) == len(rows)
    assert set(found[3][1]["token_ids"]) == {-1} and found[4][1] == wanted_of(columns)[4][1]
    assert [(p.record, p.field) for p in dump.problems.shown] == [(3, "token_ids"), (4, "texts")]
    assert all(p.what.endswith("(left out)") for p in dump.problems.shown)


def test_only_broken_records(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [{"train_logp": [-1.0], "rollout_logp": []}] * 30)
    dump = Dump(tmp_path / "x.jsonl")
    with pytest.raises(DumpError, match=r"record 0, field 'rollout_logp': expected 1 values"):
        list(dump.chunks())
    assert dump.problems.count == 30 and len(dump.problems.shown) == problems.SHOWN
    write_jsonl(tmp_path / "x.jsonl", [[1.0]])
    assert "record 0: expected an object, got list" in failing(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            lambda c: c | {"rollout_logp": c["rollout_logp"][:-1]},
            "field 'rollout_logp': as rollout_logp: expected shape",
        ),
        (lambda c: c | {"cu_seqlens": c["cu_seqlens"].flip(0)}, "record 0, field 'cu_seqlens': expected offsets that"),
        (
            lambda c: with_lengths(c) | {"lengths": torch.tensor([2**62] * 4)},
            "record 0, field 'lengths': expected lengths within [0, ",
        ),
        (
            lambda c: with_lengths(c) | {"lengths": torch.tensor([3, -1])},
            "record 1, field 'lengths': expected lengths within [0, ",
        ),
        (lambda c: c | {"cu_seqlens": c["cu_seqlens"] + 5}, "field 'cu_seqlens': expected offsets within [0, "),
        (
            lambda c: {name: x for name, x in c.items() if name != "cu_seqlens"},
            "field 'train_logp': 1-D log-probs of shape [",
        ),
        (lambda c: c | {"train_logp": c["train_logp"].long()}, "field 'train_logp': as train_logp: expected floating"),
        (lambda c: c | {"train_logp": c["train_logp"][None, None]}, "expected shape [N] or [B, T], got [1, 1, "),
    ],
)
@pytest.mark.parametrize("kind", ["pt", "safetensors", "npz"])
def test_arrays_that_do_not_fit_are_named(columns, message, kind, tmp_path):
    found = {name: x.contiguous() for name, x in columns(packed()).items()}
    path = tmp_path / f"x.{kind}"
    if kind == "pt":
        torch.save(found, path)
    elif kind == "npz":
        np.savez(path, **{name: x.numpy() for name, x in found.items()})
    else:
        save_file(found, path)
    text = failing(path)
    assert text.startswith(str(path)) and message in text, text


def test_files_of_something_else(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "x.pt")
    assert "expected a dict of tensors or a list of records, got Tensor" in failing(tmp_path / "x.pt")
    torch.save([3], tmp_path / "x.pt")
    assert "record 0: expected a mapping, got int" in failing(tmp_path / "x.pt")
    np.savez(tmp_path / "x.npz", train_logp=np.array([["a"]]), rollout_logp=np.array([[0.0]]))
    assert "field 'train_logp': expected numbers, of at most 64 bits, got dtype <U1" in failing(tmp_path / "x.npz")
    (tmp_path / "x.csv").write_text("")
    assert "expected a name that ends in .pt" in failing(tmp_path / "x.csv")
    assert "no such file" in failing(tmp_path / "y.pt")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"hello", "its bytes are damaged, or of something else"),
        (b"PK\x03\x04 no archive", "its bytes are damaged, or of something else"),
        (b"", "it is empty"),
    ],
)
def test_a_broken_pt_file_is_one_line_of_our_own(data, reason, tmp_path, capsys):
    """No exception of Python's, and no advice of torch's to load it unsafely."""
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert main(["doctor", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"rollout-corr doctor: {path}: not a complete .pt file: {reason}. Expected one written by torch"
    )
    assert said.count("\n") == 1 and "Error" not in said and "weights_only" not in said


@pytest.mark.parametrize("given", [4, 5, 8])
def test_a_tensor_rebuilt_with_other_arguments_than_torch_takes_is_refused(given, tmp_path):
    """torch.load refuses such a file, so its author was not torch.save; 700175 of the area `files` was read."""

    class Rebuilt:
        def __init__(self, x):
            self.arguments = torch.Tensor.__reduce_ex__(x, 2)[1][:given]

        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (*self.arguments, *[None] * (given - len(self.arguments)))

    columns = packed()
    torch.save(columns | {"rollout_logp": Rebuilt(columns["rollout_logp"])}, tmp_path / "x.pt")
    with pytest.raises(DumpError, match=f"_rebuild_tensor_v2 with {given} arguments"):
        list(Dump(tmp_path / "x.pt").chunks())


def test_bytes_of_a_safetensors_file_that_belong_to_no_field_are_refused(tmp_path):
    """The format has no holes: a field whose place was moved is not what its writer meant."""
    path = write("safetensors packed", tmp_path, packed())
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first = min(header, key=lambda name: header[name]["data_offsets"])
    header[first] |= {"shape": [0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(DumpError, match="bytes that belong to no field"):
        list(Dump(path).chunks())


def test_an_object_in_a_pt_file_is_refused(tmp_path):
    """Unpickling an object could run any code."""
    torch.save({"train_logp": ChosenFields(), "rollout_logp": torch.zeros(3)}, tmp_path / "x.pt")
    message = failing(tmp_path / "x.pt")
    assert "field 'train_logp': as train_logp: an object of the class rollout_corr.diagnose" in message
    assert "is read for tensors, lists, dicts and numbers" in message


@pytest.mark.parametrize(
    ("kind", "module", "install"), [("npz packed", "numpy", "numpy"), ("parquet", "pyarrow", "pyarrow")]
)
def test_a_missing_extra_is_named(kind, module, install, tmp_path, monkeypatch):
    path = write(kind, tmp_path, packed())
    without(monkeypatch, module)
    assert f"needs {module}: pip install {install}" in failing(path)


def test_ragged_lists_and_lengths_agree(tmp_path):
    """Ragged lists and lengths are independent ways to write a dump, and give equal sequences."""
    columns = packed()
    assert len(ragged(columns)["train_logp"]) == with_lengths(columns)["lengths"].numel() == 12


# --- the boundary: one file never ends the reading of the others ------------------------------------------------------


def damage(path):
    """Flip a byte behind the middle at which decompression fails, and not the checksum at the end alone."""
    data = path.read_bytes()
    for place in range(len(data) // 2, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            with zipfile.ZipFile(path) as archive:
                archive.testzip()
        except zlib.error:
            return
    raise AssertionError("no byte at which decompression fails")


def bad_npz(folder):
    damage(write("npz compressed", folder, packed(200), "1"))


def bad_parquet(folder):
    path = write("parquet", folder, packed(), "1")
    path.write_bytes(path.read_bytes()[:-9])


def dangling_link(folder):
    (folder / "1.jsonl").symlink_to(folder / "nowhere")


def unreadable_header(folder):
    (folder / "1.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


@pytest.mark.parametrize("break_one", [bad_npz, bad_parquet, dangling_link, unreadable_header])
def test_one_bad_file_is_named_and_the_rest_of_the_folder_is_read(break_one, tmp_path):
    columns = packed()
    write("npz packed", tmp_path, columns, "0")
    break_one(tmp_path)
    write("jsonl", tmp_path, columns, "2")
    dump = Dump(tmp_path)
    found = sequences_of(dump)
    assert found[:12] == wanted_of(columns) and found[-12:] == wanted_of(columns)
    assert dump.problems.count == 1
    assert str(dump.problems.shown[0]).startswith(str(tmp_path / "1."))
    assert "\n" not in str(dump.problems.shown[0])


def test_a_folder_with_a_name_of_a_file_is_a_folder(tmp_path):
    columns = packed()
    (tmp_path / "0.npz").mkdir()
    write("jsonl", tmp_path / "0.npz", columns, "2")
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(columns)
    assert dump.problems.count == 0


def test_damage_in_the_middle_keeps_what_was_read(tmp_path, monkeypatch):
    """Records from the damage to where it is noticed may be wrong; the first fifth lies before."""
    monkeypatch.setattr("rollout_corr.diagnose.read.tensor_files.CHUNK_SLOTS", 40)
    columns = packed(200)
    path = write("npz compressed", tmp_path, columns)
    damage(path)
    dump = Dump(path)
    found = sequences_of(dump)
    assert 40 <= len(found) < 200 and found[:40] == wanted_of(columns)[:40]
    assert dump.problems.count == 1
    assert dump.problems.shown[0].record == len(found)
    assert "cannot be read from here on: " in str(dump.problems.shown[0])


def test_the_exception_of_a_parser_stays_the_cause(tmp_path):
    """A mistake of a reader is a line for the user, and must still be found by whoever looks for it."""
    path = write("npz compressed", tmp_path, packed(200))
    damage(path)
    with pytest.raises(DumpError) as caught:
        list(Dump(path).chunks())
    assert isinstance(caught.value.__cause__, zlib.error)
    assert "\n" not in str(caught.value)


def test_the_consumer_keeps_its_own_exceptions(tmp_path):
    chunks = Dump(write("jsonl", tmp_path, packed())).chunks()
    next(chunks)
    with pytest.raises(KeyError):
        chunks.throw(KeyError("of the consumer"))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    assert failing(tmp_path / "x.jsonl") == f"{tmp_path / 'x.jsonl'}: not a file"
