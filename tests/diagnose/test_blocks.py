"""Measurements depend on the sequences alone, not on chunks and files, and take time linear in them."""

from __future__ import annotations

import json
import random

import pytest
import torch

import rollout_corr as rc
from builders.dumps import packed, plain, records, write_jsonl
from rollout_corr.diagnose.measure import evidence
from rollout_corr.diagnose.measure.measurement import Measurement, measure
from rollout_corr.diagnose.measure.profiles import Profile
from rollout_corr.diagnose.read import chunk as chunks
from rollout_corr.diagnose.read.chunk import Chunk, blocks, joined
from rollout_corr.diagnose.read.dump import Dump


def run(sequences=60, seed=5):
    """Make the columns of a run: steps, versions, a column of many values, worst tokens with equal D."""
    columns = packed(sequences, seed=seed, median_length=30)
    count = columns["train_logp"].numel()
    columns["steps"] = torch.arange(count) * 10 // count
    columns["versions"] = columns["steps"] // 2
    columns["entropy"] = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    columns["train_logp"][::50] = columns["rollout_logp"][::50] - 6.0
    return columns


def rows_of(columns, names):
    return [{name: value for name, value in plain(record).items() if name in names} for record in records(columns)]


def reported(path, **arguments):
    """Return everything that the report gives, without paths."""
    found = rc.report(path, by="entropy", **arguments).to_dict()
    for token in found["worst"]:
        del token["file"], token["record"]
    for finding in found["findings"]:
        del finding["evidence"]  # names records
    return {name: found[name] for name in ("metrics", "warnings", "findings", "profiles", "worst")}


def test_numbers_do_not_depend_on_how_sequences_are_spread_over_files(tmp_path, monkeypatch):
    """Some files have columns that others lack, as a run has that was started again with more of them."""
    monkeypatch.setattr(chunks, "CHUNK_SLOTS", 700)
    names = {"train_logp", "rollout_logp", "mask", "entropy", "steps"}
    rows = rows_of(run(), names)
    rows[20:] = [row | {"turns": [i // 4 for i in range(len(row["mask"]))]} for row in rows[20:]]
    rows[40:] = [{name: x for name, x in row.items() if name != "mask"} for row in rows[40:]]
    write_jsonl(tmp_path / "whole.jsonl", rows)
    wanted = reported(tmp_path / "whole.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(0, len(rows), 3):
        write_jsonl(folder / f"{i:03d}.jsonl", rows[i : i + 3])
    assert json.dumps(reported(folder)) == json.dumps(wanted)
    worst = measure(Dump(folder)).worst
    assert all(f"{token.record}" in "012" for token in worst) and len({token.file for token in worst}) > 5


def pieces(seed):
    """Cut sequences into chunks at random; some have a mask, turns or texts."""
    rng = random.Random(seed)
    made = []
    for number in range(rng.randrange(1, 12)):
        lengths = [rng.choice([0, 0, 1, 3, 9, 30]) for _ in range(rng.randrange(1, 9))]
        count = sum(lengths)
        made.append(
            Chunk(
                train=torch.full((count,), float(number)),
                rollout=torch.arange(count).float(),
                mask=torch.rand(count) < 0.5 if rng.random() < 0.5 else None,
                offsets=torch.tensor([0, *lengths]).cumsum(0),
                records=torch.arange(len(lengths)),
                file=f"{number // 3}",
                columns={"turns": torch.arange(count)} if rng.random() < 0.5 else {},
                texts=[["x"] * n for n in lengths] if rng.random() < 0.5 else None,
            )
        )
    return made


def sequences(found):
    """Return every sequence as plain data; NaN and the mask as what they mean."""
    rows = []
    for chunk in found:
        bounds = chunk.offsets.tolist()
        mask = torch.ones_like(chunk.train, dtype=torch.bool) if chunk.mask is None else chunk.mask
        turns = chunk.columns.get("turns", torch.full_like(chunk.train, -1, dtype=torch.int64))
        for s in range(chunk.sequences):
            piece = slice(bounds[s], bounds[s + 1])
            values = [x[piece].tolist() for x in (chunk.train, chunk.rollout, mask, turns)]
            rows.append((chunk.file_of(s), int(chunk.records[s]), values, chunk.texts[s] if chunk.texts else None))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_blocks_hold_the_same_sequences(seed, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_SLOTS", 40)
    monkeypatch.setattr(chunks, "CHUNK_SEQUENCES", 6)
    torch.manual_seed(seed)
    given = pieces(seed)
    found = list(blocks(given))
    assert sequences(found) == sequences(given)
    for block, following in zip(found, [*found[1:], None], strict=True):
        assert block.sequences <= 6 and (block.train.numel() <= 40 or block.offsets[-2] == 0)
        if following is not None:
            more = int(following.offsets[1])
            assert block.sequences == 6 or block.train.numel() + more > 40


def test_precision_is_kept_where_files_differ():
    """Joined, the float32 D of one file would be computed in float64 because another file has float64."""
    given = [
        Chunk(torch.zeros(1, dtype=dtype), torch.zeros(1), None, torch.tensor([0, 1]), torch.tensor([0]), file)
        for file, dtype in (("a", torch.float64), ("b", torch.float32), ("c", torch.float32))
    ]
    assert [block.train.dtype for block in blocks(given)] == [torch.float64, torch.float32]


def step_of(number, tokens=24):
    x = -torch.rand(tokens)
    columns = {"steps": torch.full((tokens,), number)}
    return Chunk(x, x - 0.01, None, torch.tensor([0, tokens]), torch.tensor([0]), f"{number}", columns)


def test_a_profile_takes_memory_for_its_bins_alone():
    """Bins far apart are not counted in a table over all that lie between; sums are those of a loop."""
    profile = Profile()
    profile.add(torch.tensor([99_999]), torch.tensor([1.0]))
    for _ in range(50):
        profile.add(torch.tensor([5, 90_000, 5, 7]), torch.tensor([1.0, -2.0, 0.5, -0.25]))
    assert profile.sums.shape == (100_000, 4)
    assert profile.sums[5].tolist() == [100.0, 75.0, 75.0, 62.5]
    assert profile.sums[90_000].tolist() == [50.0, -100.0, 100.0, 200.0]
    assert [profile.largest[i] for i in (5, 7, 90_000, 99_999, 6)] == [1.0, 0.25, 2.0, 1.0, 0.0]


def test_versions_beyond_a_number_are_not_told_apart(monkeypatch):
    monkeypatch.setattr(evidence, "MOST_GROUPS", 8)
    measured = Measurement()
    for number in range(0, 20, 4):
        measured.add(joined([step_of(number + i) for i in range(4)]))
    found = measured.evidence
    assert list(found.values["steps"]) == list(range(8)) and found.columns["steps"].tokens_of_each() == [24] * 8
    assert found.finite == 20 * 24
