"""The report: numbers equal to those of `correct` and of plain loops, whatever the chunks; the command."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps
from builders.dumps import json_of, packed, plain, records, statistics, write, write_jsonl
from builders.rounding import near
from builders.weights import weight_of
from rollout_corr.cli.main import main
from rollout_corr.diagnose.measure.measurement import UPPER, measure
from rollout_corr.diagnose.measure.profiles import PROBABILITY_EDGES, Row, joined
from rollout_corr.diagnose.measure.worst_tokens import WORST
from rollout_corr.diagnose.read import chunk
from rollout_corr.diagnose.read.dump import Dump


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Change to a temporary folder: pages are written into the current one."""
    monkeypatch.chdir(tmp_path)


def measured(folder, columns, kind="pt packed", **arguments):
    return measure(Dump(write(kind, folder, columns), **arguments))


def turned(sequences=9, seed=3):
    """Make turns of 4 tokens with a masked one between them, with versions and steps."""
    columns = packed(sequences, seed=seed, median_length=60)
    columns["mask"] = torch.cat([torch.arange(n) % 5 < 4 for n in columns["cu_seqlens"].diff().tolist()])
    columns["versions"] = torch.arange(columns["mask"].numel()) % 3 + 7
    columns["steps"] = torch.arange(sequences) // 3
    columns["entropy"] = torch.rand(columns["mask"].shape, generator=torch.Generator().manual_seed(seed))
    return columns


def tokens_of(columns):
    """Return valid tokens as tuples: sequence, position, turn, D, train, rollout, version, step."""
    bounds, found = columns["cu_seqlens"].tolist(), []
    train, rollout, mask = (columns[name].tolist() for name in ("train_logp", "rollout_logp", "mask"))
    for s in range(len(bounds) - 1):
        position, turn, inside = 0, -1, False
        for i in range(bounds[s], bounds[s + 1]):
            turn += mask[i] and not inside
            inside = mask[i]
            if mask[i]:
                d = torch.tensor(train[i]).sub(rollout[i]).item()
                version, step = int(columns["versions"][i]), int(columns["steps"][s])
                found.append((s, position, turn, d, train[i], rollout[i], version, step))
                position += 1
    return found


@pytest.fixture(params=[None, 100], ids=["one block", "small blocks"])
def blocks_of(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(chunk, "CHUNK_SLOTS", request.param)


def test_metrics_are_those_of_correct(tmp_path, blocks_of):
    columns = packed(30)
    found = measured(tmp_path, columns).metrics()
    for key, value in statistics(columns).metrics().items():
        # Sums of fp32 values, rounded once a block: 3e-8 apart with blocks of 100 slots.
        assert found[key] == near(value, torch.float32), key
    for level in ("token", "product", "geometric"):
        spec = rc.Spec(weight=weight_of(level, upper=UPPER))
        of_level = statistics(columns, spec).metrics()
        sequence = "sequence_mean_weight_ess" if level == "token" else "sequence_weight_ess"
        for key in ("weight_ess", "weight_before_bounds_ess", sequence, "weight_before_bounds_max"):
            assert found[f"{level}/{key}"] == near(of_level[key], torch.float32), (level, key)


def check_rows(rows, tokens, key):
    """Compare a profile with plain loops over all tokens."""
    groups = {}
    for token in tokens:
        groups.setdefault(key(token), []).append(token[3])
    assert [row.count for row in rows] == [len(groups[k]) for k in sorted(groups)]
    for row, k in zip(rows, sorted(groups), strict=True):
        d = groups[k]
        mean = math.fsum(d) / len(d)
        assert row.logratio_mean == near(mean)
        assert row.logratio_abs_mean == near(math.fsum(map(abs, d)) / len(d))
        assert row.logratio_std == near(math.sqrt(math.fsum((x - mean) ** 2 for x in d) / len(d)), torch.float32)
        assert row.logratio_abs_max == max(map(abs, d))


def test_profiles_are_those_of_plain_loops(tmp_path, blocks_of):
    columns = turned()
    columns["train_logp"][::17] -= 3.0
    columns["train_logp"][5::17] -= 1.0
    edge = torch.tensor(0.5, dtype=torch.float64).log().float()
    columns["train_logp"][7::17] = columns["rollout_logp"][7::17] = edge
    tokens = tokens_of(columns)
    profiles = measured(tmp_path, columns).profiles()
    assert list(profiles) == ["position", "probability", "length", "turn", "versions", "steps"]
    check_rows(profiles["position"], tokens, lambda token: math.floor(4 * math.log2(token[1] + 1) + 1e-9))
    edges = [torch.tensor(edge, dtype=torch.float64).log().float().item() for edge in PROBABILITY_EDGES]
    check_rows(profiles["probability"], tokens, lambda token: sum(token[5] >= edge for edge in edges))
    check_rows(profiles["turn"], tokens, lambda token: min(token[2], 64))
    check_rows(profiles["versions"], tokens, lambda token: token[6])
    check_rows(profiles["steps"], tokens, lambda token: token[7])
    assert [row.label for row in profiles["versions"]] == ["7", "8", "9"]
    lengths, sums = {}, {}
    for s, *_, d, _, _, _, _ in tokens:
        lengths[s], sums[s] = lengths.get(s, 0) + 1, sums.get(s, 0.0) + d
    means = [(s, 0, 0, sums[s] / n) for s, n in lengths.items()]
    check_rows(profiles["length"], means, lambda token: math.floor(2 * math.log2(lengths[token[0]]) + 1e-9))


def test_further_columns_are_shown_by_value_or_cut_into_tenths(tmp_path, blocks_of):
    columns = turned()
    columns["kind"] = torch.arange(columns["steps"].numel()) % 2 - 5
    profiles = measured(tmp_path, columns, by=("entropy", "kind")).profiles()
    assert [row.label for row in profiles["kind"]] == ["-5", "-4"]
    assert len(profiles["entropy"]) == 10
    assert sum(row.count for row in profiles["entropy"]) == int(columns["mask"].sum())
    assert [row.at for row in profiles["entropy"]] == list(range(10))


def test_worst_tokens_in_context(tmp_path, blocks_of):
    columns = turned()
    valid = columns["mask"].nonzero().squeeze(1)
    for i, place in enumerate(valid[5:400:9].tolist()):
        columns["train_logp"][place] = columns["rollout_logp"][place] - 5.0 - i
    columns["train_logp"][valid[40]] = torch.nan
    tokens = tokens_of(columns)
    ids = columns["token_ids"][columns["mask"]].tolist()
    worst = measured(tmp_path, columns).worst
    order = sorted((t for t in tokens if not math.isnan(t[3])), key=lambda t: -abs(t[3]))[:WORST]
    assert [(w.record, w.position, w.turn, w.d, w.version) for w in worst] == [
        (t[0], t[1], t[2], t[3], t[6]) for t in order
    ]
    for w, t in zip(worst, order, strict=True):
        at = tokens.index(t)
        around = [i for i in range(at - 6, at + 7) if 0 <= i < len(tokens) and tokens[i][0] == t[0]]
        assert w.tokens == tuple(str(ids[i]) for i in around)
        assert w.at == around.index(at)
        assert w.context == tuple(None if math.isnan(tokens[i][3]) else tokens[i][3] for i in around)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_finite_at_all(bad, tmp_path):
    columns = packed(4)
    columns["train_logp"] = torch.full_like(columns["train_logp"], bad)
    found = measured(tmp_path, columns)
    assert found.metrics()["tokens_nonfinite"] == int(columns["mask"].sum())
    assert found.profiles() == {} and found.worst == []
    assert all(math.isfinite(value) for value in found.metrics().values())


# --- the command ------------------------------------------------------------------------------------------------------


def test_report_as_json(tmp_path, capsys):
    """The output is only JSON, has no NaN, and is complete."""
    columns = turned()
    rows = [plain(record) for record in records({k: columns[k] for k in packed(1)})]
    rows[1]["rollout_logp"].pop()
    rows[2]["train_logp"][3] = math.nan
    write_jsonl(tmp_path / "x.jsonl", rows)
    assert main(["report", str(tmp_path / "x.jsonl"), "--json"]) == 0
    out = capsys.readouterr()
    found = json_of(out.out)
    assert out.err == ""
    assert {"fields", "unused", "warnings", "findings", "profiles", "worst", "worst_sequences"} <= set(found)
    assert found["problems"]["count"] == 1 and found["problems"]["shown"][0]["record"] == 1
    assert found["metrics"]["sequences"] == 8
    assert found["metrics"]["tokens_nonfinite"] == 1


def test_a_terminal_shows_how_far_it_is(tmp_path, capsys, monkeypatch):
    """The bar is on stderr, so that piped output stays clean; with --json there is none."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(chunk, "CHUNK_SLOTS", 40)
    path = str(write("pt packed", tmp_path, packed()))
    assert main(["report", path, "--no-page"]) == 0
    out = capsys.readouterr()
    assert "reading dump.pt" in out.err and "reading" not in out.out
    assert main(["report", path, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_the_terminal_begins_with_the_cause_and_its_axis(tmp_path, capsys):
    """The evidence follows, and the cause's table is the first of the tables by an axis."""
    torch.save(planted_dumps.over_steps(0, lambda step: 0.02 + 0.01 * step, steps=40), tmp_path / "x.pt")
    assert main(["report", str(tmp_path / "x.pt"), "--no-page"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1. warning: ") and lines[0].endswith("[drift]") and lines[1].startswith("   - mean |D|")
    axes = [line.strip() for line in lines if line.startswith("D by ")]
    assert axes[:2] == ["D by step", "D by position in the sequence"]
    # All 40 steps, three to a row.
    below = lines[lines.index(next(line for line in lines if line.startswith("D by step"))) :]
    rows = [line.split() for line in below[4 : below.index("", 4)]]
    assert [" ".join(row[:3]) for row in rows[:2]] == ["0 - 2", "3 - 5"] and len(rows) == 14 and rows[-1][0] == "39"


def test_neighbors_are_joined_and_no_token_is_lost():
    rows = [Row(f"{i}", float(i), i + 1, 0.1 * i - 1.0, 1.0 + i, 0.5, 2.0 + i % 5) for i in range(37)]
    few = joined(rows, 16)
    assert len(few) == 13 and joined(few, 16) is few
    assert [row.label for row in few[:2]] == ["0 - 2", "3 - 5"] and few[-1] == rows[-1]
    assert sum(row.count for row in few) == sum(row.count for row in rows)
    first = few[1]
    assert first.count == 15 and first.logratio_abs_max == 6.0
    assert first.logratio_mean == near(math.fsum(row.count * row.logratio_mean for row in rows[3:6]) / 15)
    squares = math.fsum(row.count * (row.logratio_std**2 + row.logratio_mean**2) for row in rows[3:6]) / 15
    assert first.logratio_std == near(math.sqrt(squares - first.logratio_mean**2))
