"""Reading dumps: every kind and layout gives the same sequences, in bounded memory; fields are found by their names."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from builders.dumps import NAMES, WRITERS, packed, padded, sequences_of, wanted_of, write, write_jsonl
from rollout_corr.diagnose.read import chunk
from rollout_corr.diagnose.read.columns import described
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.fields import ChosenFields, choose
from rollout_corr.diagnose.read.problems import DumpError


@pytest.fixture(params=[None, 40], ids=["one block", "small blocks"])
def blocks_of(request, monkeypatch):
    """Change the size of a chunk, which must not change any result."""
    if request.param is not None:
        monkeypatch.setattr(chunk, "CHUNK_SLOTS", request.param)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_sequences(kind, tmp_path, blocks_of, monkeypatch):
    """Under `python -W error`; with a limit the rest of a file stays unread, and the file is closed."""
    # A file that is left open complains when it is collected, where nobody can catch it.
    columns, unraised = packed(), []
    path = write(kind, tmp_path, columns)
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump, few = Dump(path), Dump(path, limit=2)
        assert sequences_of(dump) == wanted_of(columns) and sequences_of(few) == wanted_of(columns)[:2]
    assert dump.problems.count == 0 and dump.progress == 1.0 and unraised == []
    assert set(NAMES) <= set(dump.fields)


@pytest.mark.parametrize("kind", ["pt packed", "jsonl"])
def test_a_limit_reads_the_first_sequences_of_a_stream(kind, tmp_path, monkeypatch):
    """The first chunk is returned before most of the file was read."""
    monkeypatch.setattr(chunk, "CHUNK_SLOTS", 40)
    columns = packed(60)
    path = write(kind, tmp_path, columns)
    dump = Dump(path)
    assert next(dump.chunks()).sequences < 10 and 0.0 < dump.progress < 0.2
    few = Dump(path, limit=5)
    assert sequences_of(few) == wanted_of(columns)[:5] and few.progress == 1.0


def test_a_folder_is_read_file_by_file(tmp_path):
    """A folder may be called as a file is; what is no dump, such as a configuration next to dumps, is left alone."""
    one, two = packed(seed=1), packed(seed=2)
    write("pt packed", tmp_path, one, "1")
    (tmp_path / "2.pt").mkdir()
    write("jsonl", tmp_path / "2.pt", two)
    (tmp_path / "notes.txt").write_text("not a dump")
    (tmp_path / "config.json").write_text('{"lr": 1e-6}')
    dump = Dump(tmp_path)
    assert sequences_of(dump) == wanted_of(one) + wanted_of(two)
    assert dump.problems.count == 0


def test_low_precision_stays_as_it_is(tmp_path):
    columns = packed()
    columns["rollout_logp"] = columns["rollout_logp"].bfloat16()
    block = next(Dump(write("pt padded", tmp_path, columns)).chunks())
    assert block.rollout.dtype == torch.bfloat16 and block.train.dtype == torch.float32


def test_lengths_are_the_mask_of_padded_rows(tmp_path):
    rows = padded(packed())
    mask = rows.pop("mask")
    lengths = mask.long().sum(1)
    torch.save({name: rows[name] for name in ("train_logp", "rollout_logp")} | {"lengths": lengths}, tmp_path / "x.pt")
    block = next(Dump(tmp_path / "x.pt").chunks())
    assert block.mask.view(mask.shape).sum(1).tolist() == lengths.tolist()
    for wrong in (-1, mask.shape[1] + 1):
        lengths[3] = wrong
        torch.save({"train_logp": mask.float(), "rollout_logp": mask.float(), "lengths": lengths}, tmp_path / "x.pt")
        with pytest.raises(DumpError, match=rf"record 3, field 'lengths': expected lengths within .*\[3\]={wrong}"):
            list(Dump(tmp_path / "x.pt").chunks())


def test_null_is_nan_and_a_missing_column_is_unknown(tmp_path):
    """Strict JSON writers turn NaN into null, see TRL#6166. Records may have different fields."""
    rows = [
        {"train_logp": [-1.0, None], "rollout_logp": [-1.0, -2.0], "version": 4},
        {"train_logp": [-1.0], "rollout_logp": [-3.0], "texts": ["a"]},
    ]
    write_jsonl(tmp_path / "x.jsonl", rows)
    block = next(Dump(tmp_path / "x.jsonl").chunks())
    assert block.train[:1].tolist() == [-1.0] and block.train[1].isnan()
    assert block.columns["versions"].tolist() == [4, 4, -1]
    assert block.texts == [None, ["a"]]
    write_jsonl(tmp_path / "x.jsonl", [rows[0] | {"version": [None, 4]}])
    assert next(Dump(tmp_path / "x.jsonl").chunks()).columns["versions"].tolist() == [-1, 4]


def test_offsets_may_leave_tokens_out(tmp_path, blocks_of):
    """Tokens before the first sequence and after the last one are left out."""
    columns = packed()
    columns["cu_seqlens"] = columns["cu_seqlens"][2:-1]
    columns["advantages"] = columns["advantages"][2:-1]
    assert sequences_of(Dump(write("pt packed", tmp_path, columns))) == wanted_of(columns)


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
    found = choose(names, ChosenFields(), "x.pt")
    assert found["train_logp"] == train and found["rollout_logp"] == rollout
    for role, name in more.items():
        assert found[role] == name
    assert len(set(found.values())) == len(found)


def test_the_user_has_the_last_word(tmp_path):
    columns = packed()
    columns["pi"] = columns["train_logp"] - 1.0
    dump = Dump(write("pt packed", tmp_path, columns), {"train_logp": "pi"})
    train = torch.cat([block.train for block in dump.chunks()])
    assert torch.equal(train, columns["pi"])
    assert dump.fields["train_logp"] == "pi"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_logp": "pi"}, "field 'pi': as train_logp: there is no such field; there are train_logp ["),
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
        list(Dump(write("pt packed", tmp_path, packed()), fields).chunks())
    assert message in str(caught.value)


MEMORY = """
import sys, torch
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.measure.measurement import Measurement

def anonymous():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) / 1024

torch.set_num_threads(1)
measured, dump = Measurement(), Dump(sys.argv[1])
blocks = dump.chunks()
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
@pytest.mark.parametrize("kind", ["pt packed", "jsonl"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    """Of 16 million tokens (4 million as text), 290 MB as tensors, only a few chunks are in memory at once."""
    tokens = (1 << 22) if kind == "jsonl" else (1 << 24)
    rows, train = tokens // 4096, -torch.rand(tokens)
    made = {"train_logp": train, "rollout_logp": train + 0.01, "token_ids": torch.arange(tokens)}
    path = tmp_path / f"x.{kind.partition(' ')[0]}"
    if kind == "jsonl":
        write_jsonl(path, plain_rows(made, rows))
    else:
        torch.save(made | {"cu_seqlens": torch.arange(rows + 1) * 4096}, path)
    # One arena, and large blocks that go back to the system when freed: otherwise the figure varies by 40 MB.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)],
        env=os.environ | allocator,
        capture_output=True,
        text=True,
        check=True,
    )
    most, slots = map(float, done.stdout.split())
    assert slots > 0.9 * tokens
    assert most < 70.0, f"{most:.0f} MB"


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_is_not_called_a_mask(step, tmp_path):
    """A folder has a file for each step, and the columns that a message lists are those of the first."""
    logp, environments = -torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
    columns = {"train_logp": logp, "rollout_logp": logp, "mask": torch.ones(4, 3), "environment": environments}
    torch.save(columns | {"step": torch.full((4,), step)}, tmp_path / "a.pt")
    torch.save(columns | {"step": torch.full((4,), step + 1)}, tmp_path / "b.pt")
    with pytest.raises(DumpError) as caught:
        list(Dump(tmp_path, by=["nope"]).chunks())
    assert f"mask [4 x 3] (always 1), environment [4] (0/1), step [4] (always {step})" in str(caught.value)


def test_a_number_of_each_sequence_is_described_as_no_mask():
    """A step of 0 or 1, as the first files of a run have it, next to the mask of the tokens."""
    said = described({"scores": [[-0.5, -1.5], [-2.5, -0.25]], "picked": [[1, 0], [1, 1]], "step": [0, 0]})
    assert said.startswith("scores [2 x 2] (log-probs?), picked [2 x 2] (0/1, a mask?), step [2] (")
    assert said.count("a mask?") == 1


@pytest.mark.parametrize("suffix", [".pt", ".jsonl"])
def test_columns_of_unknown_names_are_described(suffix, tmp_path):
    """What may be log-probs comes first, and the mask next; --field takes the names."""
    columns = {
        "reward": torch.tensor([0.5, -1.5]),
        "scores": torch.tensor([[-0.5, -1.5], [-2.5, -0.25]]),
        "picked": torch.tensor([[1, 0], [1, 1]]),
        "ids": torch.tensor([[15, 700], [21, 3]]),
    }
    path = tmp_path / f"x{suffix}"
    if suffix == ".pt":
        torch.save(columns, path)
    else:
        write_jsonl(path, ({name: x[i].tolist() for name, x in columns.items()} for i in range(2)))
    with pytest.raises(DumpError) as caught:
        list(Dump(path, {"mask": "picked"}).chunks())
    shape = "2 x 2" if suffix == ".pt" else "2"
    assert f"There are scores [{shape}] (log-probs?), picked [{shape}] (0/1, a mask?), " in caught.value.args[0]
    assert "ids or lengths?" in caught.value.args[0]
    with pytest.raises(DumpError, match="there is no such field; there are scores"):
        list(Dump(path, {"train_logp": "score"}).chunks())
