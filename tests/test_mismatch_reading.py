"""Reading dumps: every format and layout gives the same sequences; what is broken is named and the rest is read."""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dumps import (
    NAMES,
    WRITERS,
    packed,
    padded,
    plain,
    ragged,
    records,
    with_lengths,
    write,
    write_jsonl,
    write_parquet,
)
from rollout_corr.mismatch import arrays, problems
from rollout_corr.mismatch import records as record_files
from rollout_corr.mismatch.fields import ALIASES, Wanted, choose
from rollout_corr.mismatch.problems import DumpError
from rollout_corr.mismatch.reading import Dump

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[None, 40], ids=["one block", "small blocks"])
def blocks_of(request, monkeypatch):
    """The size of a block, which must not show."""
    if request.param is not None:
        monkeypatch.setattr(arrays, "BLOCK", request.param)
        monkeypatch.setattr(record_files, "BLOCK", request.param)
    return request.param


def sequences_of(dump):
    """Every sequence's valid tokens as plain data: (record, {name: values})."""
    found = []
    for block in dump.blocks():
        per_token = {"train_logp": block.train, "rollout_logp": block.rollout, **block.columns}
        bounds = block.offsets.tolist()
        assert bounds[0] == 0 and bounds[-1] == block.train.numel()
        for s in range(block.sequences):
            piece = slice(bounds[s], bounds[s + 1])
            valid = slice(None) if block.mask is None else block.mask[piece]
            values = {name: x[piece][valid].tolist() for name, x in per_token.items()}
            found.append((int(block.records[s]), values))
    return found


def wanted_of(columns):
    bounds = columns["cu_seqlens"].tolist()
    found = []
    for s, (start, stop) in enumerate(pairwise(bounds)):
        valid = columns["mask"][start:stop]
        values = {name: columns[name][start:stop][valid].tolist() for name in ("train_logp", "rollout_logp")}
        values["token_ids"] = columns["token_ids"][start:stop][valid].tolist()
        values["advantages"] = [float(columns["advantages"][s])] * len(values["token_ids"])
        found.append((s, values))
    return found


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_sequences(kind, tmp_path, blocks_of):
    columns = packed()
    dump = Dump(write(kind, tmp_path, columns))
    assert sequences_of(dump) == wanted_of(columns)
    assert dump.problems.count == 0 and dump.progress == 1.0
    assert set(NAMES) <= set(dump.fields)


@pytest.mark.parametrize("kind", ["pt packed", "npz packed", "safetensors padded", "jsonl", "parquet"])
def test_a_limit_reads_the_first_sequences(kind, tmp_path, blocks_of):
    columns = packed()
    dump = Dump(write(kind, tmp_path, columns), limit=5)
    assert sequences_of(dump) == wanted_of(columns)[:5]
    assert dump.progress == 1.0


@pytest.mark.parametrize("kind", ["pt packed", "npz packed", "safetensors padded", "jsonl", "parquet"])
def test_a_file_is_streamed(kind, tmp_path, monkeypatch):
    """The first block is there before most of the file was looked at."""
    monkeypatch.setattr(arrays, "BLOCK", 40)
    monkeypatch.setattr(record_files, "BLOCK", 40)
    dump = Dump(write(kind, tmp_path, packed(60)))
    first = next(dump.blocks())
    assert first.sequences < 10 and 0.0 < dump.progress < 0.2


def test_a_folder_is_read_file_by_file(tmp_path):
    one, two = packed(seed=1), packed(seed=2)
    write("pt packed", tmp_path, one, "1")
    write("jsonl", tmp_path, two, "2")
    (tmp_path / "notes.txt").write_text("not a dump")
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(one) + wanted_of(two)
    assert dump.problems.count == 0


def test_a_broken_file_in_a_folder_does_not_hide_the_others(tmp_path):
    columns = packed()
    (tmp_path / "1.pt").write_bytes(b"nothing")
    write("jsonl", tmp_path, columns, "2")
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(columns)
    assert dump.problems.count == 1
    assert str(dump.problems.shown[0]).startswith(f"{tmp_path / '1.pt'}: torch cannot load it")


def test_low_precision_stays_as_it_is(tmp_path):
    columns = packed()
    columns["rollout_logp"] = columns["rollout_logp"].bfloat16()
    for kind in ("pt padded", "safetensors packed"):
        block = next(Dump(write(kind, tmp_path, columns)).blocks())
        assert block.rollout.dtype == torch.bfloat16 and block.train.dtype == torch.float32


def test_lengths_are_the_mask_of_padded_rows(tmp_path):
    rows = padded(packed())
    mask = rows.pop("mask")
    lengths = mask.long().sum(1)
    torch.save({name: rows[name] for name in ("train_logp", "rollout_logp")} | {"lengths": lengths}, tmp_path / "x.pt")
    block = next(Dump(tmp_path / "x.pt").blocks())
    assert block.mask.view(mask.shape).sum(1).tolist() == lengths.tolist()


def test_null_is_nan_and_a_missing_column_is_unknown(tmp_path):
    """A strict JSON writer makes null of NaN; TRL#6166. Records may have different fields."""
    rows = [
        {"train_logp": [-1.0, None], "rollout_logp": [-1.0, -2.0], "version": 4},
        {"train_logp": [-1.0], "rollout_logp": [-3.0], "texts": ["a"]},
    ]
    write_jsonl(tmp_path / "x.jsonl", rows)
    block = next(Dump(tmp_path / "x.jsonl").blocks())
    assert block.train[:1].tolist() == [-1.0] and block.train[1].isnan()
    assert block.columns["versions"].tolist() == [4, 4, -1]
    assert block.texts == [None, ["a"]]
    write_jsonl(tmp_path / "x.jsonl", [rows[0] | {"version": [None, 4]}])
    assert next(Dump(tmp_path / "x.jsonl").blocks()).columns["versions"].tolist() == [-1, 4]


@pytest.mark.parametrize("kind", ["pt packed", "npz packed", "safetensors packed"])
def test_offsets_may_leave_tokens_out(kind, tmp_path, blocks_of):
    """Before the first sequence and after the last one."""
    columns = packed()
    columns["cu_seqlens"] = columns["cu_seqlens"][2:-1]
    columns["advantages"] = columns["advantages"][2:-1]
    assert sequences_of(Dump(write(kind, tmp_path, columns))) == wanted_of(columns)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "train", "rollout", "more"),
    [
        # verl's batch, TRL's inputs, NeMo RL's, slime's and prime-rl's samples, OpenRLHF's experience.
        (
            ["responses", "old_log_probs", "log_probs", "rollout_log_probs", "response_mask", "advantages"],
            "old_log_probs",
            "rollout_log_probs",
            {"mask": "response_mask", "token_ids": "responses", "new_logp": "log_probs"},
        ),
        (
            ["completion_ids", "old_per_token_logps", "sampling_per_token_logps", "completion_mask"],
            "old_per_token_logps",
            "sampling_per_token_logps",
            {"mask": "completion_mask", "token_ids": "completion_ids"},
        ),
        (["prev_logprobs", "generation_logprobs", "token_mask"], "prev_logprobs", "generation_logprobs", {}),
        (["log_probs", "rollout_log_probs", "loss_masks"], "log_probs", "rollout_log_probs", {"mask": "loss_masks"}),
        (["logprobs", "inference_logprobs", "loss_mask"], "logprobs", "inference_logprobs", {"mask": "loss_mask"}),
        (["action_log_probs", "rollout_log_probs"], "action_log_probs", "rollout_log_probs", {}),
    ],
)
def test_names_of_frameworks_are_known(names, train, rollout, more):
    found = choose(names, Wanted(), "x.pt")
    assert found["train_logp"] == train and found["rollout_logp"] == rollout
    for role, name in more.items():
        assert found[role] == name
    assert len(set(found.values())) == len(found)


def test_every_alias_belongs_to_one_role_alone():
    """Except for the current log-probs, which are the trainer's where there are no older ones."""
    required = [name for role, names in ALIASES.items() if role != "new_logp" for name in names]
    assert len(required) == len(set(required))
    assert all(name == name.lower() for names in ALIASES.values() for name in names)


def test_the_user_has_the_last_word(tmp_path):
    columns = packed()
    columns["pi"] = columns["train_logp"] - 1.0
    dump = Dump(write("pt packed", tmp_path, columns), {"train_logp": "pi"})
    train = torch.cat([block.train for block in dump.blocks()])
    assert torch.equal(train, columns["pi"])
    assert dump.fields["train_logp"] == "pi"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_logp": "pi"}, "field 'pi': as train_logp: it is not there; there is train_logp, rollout_logp"),
        ({"policy": "pi"}, "field 'policy': expected one of ['train_logp', "),
        ({"mask": "advantages"}, "field 'advantages': as mask: expected shape ["),
        (
            {"rollout_logp": "token_ids"},
            "field 'token_ids': as rollout_logp: expected floating log-probs, got torch.int64",
        ),
    ],
)
def test_wrong_fields_are_named(fields, message, tmp_path):
    with pytest.raises(DumpError) as caught:
        list(Dump(write("pt packed", tmp_path, packed()), fields).blocks())
    assert message in str(caught.value)


# --- broken files -----------------------------------------------------------------------------------------------------


def failing(path, **arguments):
    """The message that reading a dump ends with."""
    with pytest.raises(DumpError) as caught:
        list(Dump(path, **arguments).blocks())
    return str(caught.value)


def without(columns, *names):
    return {name: x for name, x in columns.items() if name not in names}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_field_is_named(kind, tmp_path):
    columns = packed()
    columns["something"] = columns.pop("rollout_logp")
    message = failing(write(kind, tmp_path, columns))
    assert str(tmp_path) in message and "field 'rollout_logp': none of its fields is known as rollout_logp" in message
    assert "something" in message and "--field rollout_logp=NAME" in message


@pytest.mark.parametrize("kind", ["pt packed", "npz packed", "parquet", "safetensors packed"])
def test_an_empty_file_is_named(kind, tmp_path):
    path = write(kind, tmp_path, packed())
    path.write_bytes(b"")
    assert str(path) in failing(path)


def test_a_dump_without_sequences(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    assert failing(tmp_path / "x.jsonl") == f"{tmp_path / 'x.jsonl'}: it holds no sequence"
    torch.save({"train_logp": torch.zeros(0, 4), "rollout_logp": torch.zeros(0, 4)}, tmp_path / "x.pt")
    assert failing(tmp_path / "x.pt").endswith("it holds no sequence")
    (tmp_path / "empty").mkdir()
    assert "expected files that end in .pt" in failing(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["pt padded", "pt old format", "npz packed", "parquet"])
def test_a_file_with_its_directory_cut_off(kind, tmp_path):
    path = write(kind, tmp_path, packed())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = failing(path)
    assert message.startswith(f"{path}: ") and "nothing can be read" in message


@pytest.mark.parametrize("kind", ["safetensors padded", "safetensors packed"])
def test_a_cut_off_safetensors_file_gives_what_is_whole(kind, tmp_path):
    """Tensors lie one after another, so the last field decides what is whole."""
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
    assert "cut off: 0 of" in failing(path)
    path.write_bytes(data[:20])
    assert "it has no whole header (20 bytes in all)" in failing(path)
    path.write_bytes(struct.pack("<Q", 4) + b"none and more")
    assert "its header is no JSON" in failing(path)


def test_a_cut_off_jsonl_file_gives_all_but_its_last_line(tmp_path):
    columns = packed()
    path = write("jsonl", tmp_path, columns)
    path.write_bytes(path.read_bytes()[:-40])
    dump = Dump(path)
    assert sequences_of(dump) == wanted_of(columns)[:-1]
    assert dump.problems.count == 1
    assert dump.problems.shown[0].record == 11
    assert "the file ends inside of it" in str(dump.problems.shown[0])


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"rollout_logp": [-1.0]}, "rollout_logp", "values, as many as train log-probs, got 1"),
        ({"mask": [1, 0]}, "mask", "values, as many as train log-probs, got 2"),
        ({"train_logp": "-1.0"}, "train_logp", "expected a list of numbers, got str '-1.0'"),
        ({"train_logp": ["-1.0"]}, "train_logp", "expected a list of numbers, got a list of str"),
        ({"train_logp": [[-1.0]]}, "train_logp", "expected a flat list, got a list of list"),
        ({"train_logp": [-1.0, [-1.0]]}, "train_logp", "expected a list of numbers, got a list of float and list"),
        ({"train_logp": -1.0}, "train_logp", "expected a flat list, got float -1.0"),
        ({"train_logp": None}, "train_logp", "none of its fields is known as train_logp"),
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
        list(dump.blocks())
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
        (lambda c: c | {"cu_seqlens": c["cu_seqlens"] + 5}, "field 'cu_seqlens': expected offsets within [0, "),
        (lambda c: without(c, "cu_seqlens"), "field 'train_logp': 1-D log-probs of shape ["),
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
    assert "field 'train_logp': expected numbers, got dtype <U1" in failing(tmp_path / "x.npz")
    (tmp_path / "x.csv").write_text("")
    assert "expected a name that ends in .pt" in failing(tmp_path / "x.csv")
    assert "there is no such file" in failing(tmp_path / "y.pt")


def test_an_object_in_a_pt_file_is_refused(tmp_path):
    """Loading it could run anything."""
    torch.save({"train_logp": Wanted()}, tmp_path / "x.pt")
    assert "of tensors, lists and dicts alone" in failing(tmp_path / "x.pt").replace("\n", " ")


@pytest.mark.parametrize(
    ("kind", "module", "name"), [("npz packed", "numpy", "report"), ("parquet", "pyarrow", "parquet")]
)
def test_a_missing_extra_is_named(kind, module, name, tmp_path, monkeypatch):
    path = write(kind, tmp_path, packed())

    def refuse(wanted):
        if wanted.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return importlib.import_module(wanted)

    monkeypatch.setattr(problems, "import_module", refuse)
    assert f"needs {module}: pip install 'rollout-corr[{name}]'" in failing(path)


def test_ragged_lists_and_lengths_agree(tmp_path):
    """Two more ways to write the same dump: neither is the other's by accident."""
    columns = packed()
    assert len(ragged(columns)["train_logp"]) == with_lengths(columns)["lengths"].numel() == 12


MEMORY = """
import sys, torch
from rollout_corr.mismatch.reading import Dump
from rollout_corr.mismatch.measuring import Measured

def anonymous():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) / 1024

torch.set_num_threads(1)
measured, dump = Measured(), Dump(sys.argv[1])
blocks = dump.blocks()
measured.add(next(blocks))
start, most, slots = anonymous(), 0.0, 0
for i, block in enumerate(blocks):
    slots += block.train.numel()
    if i % 8 == 0:
        measured.add(block)
    most = max(most, anonymous() - start)
print(most, slots)
"""


def plain_rows(made, rows):
    for i in range(rows):
        yield {name: x[i * 4096 : (i + 1) * 4096].tolist() for name, x in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt packed", "safetensors padded", "npz compressed", "jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    """Files of 16 million tokens (4 million as text), 290 MB as tensors: a few blocks' worth is in memory at a time."""
    tokens = (1 << 22) if kind in ("jsonl", "parquet") else (1 << 24)
    rows, train = tokens // 4096, -torch.rand(tokens)
    made = {"train_logp": train, "rollout_logp": train + 0.01, "token_ids": torch.arange(tokens)}
    path = tmp_path / f"x.{kind.partition(' ')[0]}"
    if kind == "jsonl":
        write_jsonl(path, plain_rows(made, rows))
    elif kind == "parquet":
        write_parquet(path, list(plain_rows(made, rows)))
    elif kind == "safetensors padded":
        save_file({name: x.view(rows, 4096) for name, x in made.items()}, path)
    elif kind == "pt packed":
        torch.save(made | {"cu_seqlens": torch.arange(rows + 1) * 4096}, path)
    else:
        np.savez_compressed(path, cu_seqlens=np.arange(rows + 1) * 4096, **{k: x.numpy() for k, x in made.items()})
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    most, slots = map(float, done.stdout.split())
    assert slots > 0.9 * tokens
    assert most < 60.0, f"{most:.0f} MB"
