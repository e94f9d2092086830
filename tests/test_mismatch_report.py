"""One pass over a dump: the same numbers as `correct` and as plain loops, however it is cut into blocks."""

from __future__ import annotations

import importlib
import json
import math
from threading import Event

import pytest
import torch

import rollout_corr as rc
from dumps import packed, padded, plain, records, statistics, write, write_jsonl
from rollout_corr import dumping
from rollout_corr.__main__ import main
from rollout_corr.mismatch import arrays, problems
from rollout_corr.mismatch.measuring import UPPER, WORST, measure
from rollout_corr.mismatch.profiles import LARGE, PROBABILITY_EDGES
from rollout_corr.mismatch.reading import Dump
from rollout_corr.testing import example_batch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Pages are written into the current folder."""
    monkeypatch.chdir(tmp_path)


def measured(folder, columns, kind="pt packed", **arguments):
    return measure(Dump(write(kind, folder, columns), **arguments))


def turned(sequences=9, seed=3):
    """A batch of turns of 4 tokens with one of a tool between them, versions and steps."""
    columns = packed(sequences, seed=seed, median_length=60)
    columns["mask"] = torch.cat([torch.arange(n) % 5 < 4 for n in columns["cu_seqlens"].diff().tolist()])
    columns["versions"] = torch.arange(columns["mask"].numel()) % 3 + 7
    columns["steps"] = torch.arange(sequences) // 3
    columns["entropy"] = torch.rand(columns["mask"].shape, generator=torch.Generator().manual_seed(seed))
    return columns


def tokens_of(columns):
    """Every valid token as a plain tuple: sequence, position, turn, D, train, rollout, version, step."""
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
        monkeypatch.setattr(arrays, "BLOCK", request.param)


def test_metrics_are_those_of_correct(tmp_path, blocks_of):
    columns = packed(30)
    found = measured(tmp_path, columns).metrics()
    for key, value in statistics(columns).metrics().items():
        # Sums of fp32 values, rounded once a block: 3e-8 apart with blocks of 100 slots.
        assert found[key] == pytest.approx(value, rel=3e-7, abs=1e-9), key
    for level in ("token", "product", "geometric"):
        spec = rc.Spec(weight=rc.Weight(level, upper=UPPER))
        of_level = statistics(columns, spec).metrics()
        for key in ("weight_ess", "weight_raw_ess", "sequence_weight_ess", "weight_raw_max"):
            assert found[f"{level}/{key}"] == pytest.approx(of_level[key], rel=3e-7), (level, key)


def check_rows(rows, tokens, key):
    """A profile against plain loops over all tokens."""
    groups = {}
    for token in tokens:
        groups.setdefault(key(token), []).append(token[3])
    assert [row.count for row in rows] == [len(groups[k]) for k in sorted(groups)]
    for row, k in zip(rows, sorted(groups), strict=True):
        d = groups[k]
        mean = math.fsum(d) / len(d)
        assert row.d_mean == pytest.approx(mean, rel=1e-9, abs=1e-12)
        assert row.d_abs_mean == pytest.approx(math.fsum(map(abs, d)) / len(d), rel=1e-9)
        assert row.d_std == pytest.approx(math.sqrt(math.fsum((x - mean) ** 2 for x in d) / len(d)), rel=1e-6, abs=1e-9)
        assert row.d_abs_max == max(map(abs, d))
        assert row.large_fraction == sum(abs(x) > LARGE for x in d) / len(d)


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


def test_turn_ids_say_where_turns_begin(tmp_path):
    """Without them, holes in the mask do; ids count changes, whatever their numbers."""
    columns = packed(1, median_length=40)
    columns["mask"] = torch.ones_like(columns["mask"])
    n = columns["mask"].numel()
    assert "turn" not in measured(tmp_path, columns).profiles()
    columns["turns"] = torch.tensor([5] * 3 + [9] * 4 + [2] * (n - 7))
    rows = measured(tmp_path, columns).profiles()["turn"]
    assert [(row.label, row.count) for row in rows] == [("0", 3), ("1", 4), ("2", n - 7)]


def test_labels_of_positions_and_lengths_say_what_is_in_them(tmp_path):
    columns = packed(40, median_length=100)
    columns["mask"] = torch.ones_like(columns["mask"])
    profiles = measured(tmp_path, columns).profiles()
    lengths = columns["cu_seqlens"].diff().tolist()
    positions = [i for n in lengths for i in range(n)]
    for rows, values in ((profiles["position"], positions), (profiles["length"], lengths)):
        for row in rows:
            low, _, high = row.label.partition(" - ")
            assert row.count == sum(int(low) <= value <= int(high or low) for value in values), row.label


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


def test_texts_are_shown_where_there_are_some(tmp_path):
    rows = [plain(record) for record in records(packed(3))]
    for row in rows:
        row["texts"] = [f"<{i}>" for i in row["token_ids"]]
    write_jsonl(tmp_path / "x.jsonl", rows)
    worst = measure(Dump(tmp_path / "x.jsonl")).worst[0]
    assert worst.tokens is not None
    assert all(text in rows[worst.record]["texts"] for text in worst.tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_finite_at_all(bad, tmp_path):
    columns = packed(4)
    columns["train_logp"] = torch.full_like(columns["train_logp"], bad)
    found = measured(tmp_path, columns)
    assert found.metrics()["tokens_nonfinite"] == int(columns["mask"].sum())
    assert found.profiles() == {} and found.worst == []
    assert all(math.isfinite(value) for value in found.metrics().values())


def test_nothing_valid_at_all(tmp_path):
    columns = packed(4)
    columns["mask"][:] = False
    found = measured(tmp_path, columns)
    assert found.metrics()["tokens"] == 0 and found.worst == []
    assert all(math.isfinite(value) for value in found.metrics().values())


def test_percentiles_of_the_magnitude(tmp_path):
    """Within the histogram's 1/8 of what sorting says."""
    columns = packed(60, median_length=200)
    found = measured(tmp_path, columns).metrics()
    d = (columns["train_logp"] - columns["rollout_logp"])[columns["mask"]].abs().sort().values
    for percent in (50, 90, 99, 99.9):
        exact = float(d[min(d.numel() - 1, round(percent / 100 * d.numel()))])
        assert found[f"abs_logp_p{percent:g}"] == pytest.approx(exact, rel=0.13), percent


# --- the command ------------------------------------------------------------------------------------------------------


def test_report_prints_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", str(write("pt packed", tmp_path, turned()))]) == 0
    text = capsys.readouterr().out
    for title in ("Mismatch", "Importance weights", "Worst tokens", "|D| by position", "|D| by turn", "|D| by step"):
        assert title in text
    assert "0 problems" not in text


def test_report_as_json(tmp_path, capsys):
    """Only JSON, without NaN, and with everything."""
    columns = turned()
    rows = [plain(record) for record in records({k: columns[k] for k in packed(1)})]
    rows[1]["rollout_logp"].pop()
    rows[2]["train_logp"][3] = math.nan
    write_jsonl(tmp_path / "x.jsonl", rows)
    assert main(["report", str(tmp_path / "x.jsonl"), "--json"]) == 0

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    out = capsys.readouterr()
    found = json.loads(out.out, parse_constant=refuse)
    assert out.err == ""
    assert set(found) == {"file", "fields", "problems", "metrics", "warnings", "verdicts", "profiles", "worst"}
    assert found["problems"]["count"] == 1 and found["problems"]["shown"][0]["record"] == 1
    assert found["metrics"]["sequences"] == 8
    assert found["metrics"]["tokens_nonfinite"] == 1


def test_a_terminal_shows_how_far_it_is(tmp_path, capsys, monkeypatch):
    """On stderr, so that what is piped stays clean; and not with --json."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(arrays, "BLOCK", 40)
    path = str(write("pt packed", tmp_path, packed()))
    assert main(["report", path, "--no-html"]) == 0
    out = capsys.readouterr()
    assert "reading dump.pt" in out.err and "reading" not in out.out
    assert main(["report", path, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_report_says_what_could_not_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = write("jsonl", tmp_path, packed())
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["report", str(path)]) == 0
    assert "1 problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pt"], "rollout-corr report: missing.pt: there is no such file\n"),
        (["FILE", "--field", "train_logp"], "--field: expected ROLE=NAME, got 'train_logp'"),
        (["FILE", "--field", "policy=x"], "field 'policy': expected one of"),
        (["FILE", "--by", "reward"], "field 'reward': as reward: it is not there"),
        (["FILE", "--limit", "0"], "--limit: expected a number >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named_on_stderr(arguments, message, tmp_path, capsys):
    path = write("pt packed", tmp_path, packed())
    assert main(["report", *(str(path) if word == "FILE" else word for word in arguments)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and message in out.err


def test_without_rich_the_extra_is_named_and_json_works(tmp_path, capsys, monkeypatch):
    path = write("pt packed", tmp_path, packed())

    def refuse(wanted):
        if wanted.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return importlib.import_module(wanted)

    monkeypatch.setattr(problems, "import_module", refuse)
    assert main(["report", str(path)]) == 2
    assert "needs rich: pip install 'rollout-corr[report]'" in capsys.readouterr().err
    assert main(["report", str(path), "--json"]) == 0


# --- rc.dump ----------------------------------------------------------------------------------------------------------


def dumped(path, columns, **arguments):
    names = ("train_logp", "rollout_logp", "mask")
    future = rc.dump(path, *(columns[name] for name in names), cu_seqlens=columns["cu_seqlens"], **arguments)
    return future.result(timeout=60)


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
def test_a_dump_is_read_back(name, tmp_path):
    columns = packed()
    more = {key: columns[key] for key in ("token_ids", "advantages")}
    assert dumped(tmp_path / name, columns, sequences=None, step=3, **more) == 12
    dump = Dump(tmp_path / name)
    block = next(dump.blocks())
    for key, x in (("train_logp", block.train), ("rollout_logp", block.rollout), ("mask", block.mask)):
        assert torch.equal(x, columns[key]), key
    assert torch.equal(block.offsets, columns["cu_seqlens"])
    assert torch.equal(block.columns["token_ids"], columns["token_ids"])
    assert set(block.columns["steps"].tolist()) == {3}
    assert block.columns["advantages"].unique().tolist() == columns["advantages"].tolist()


@pytest.mark.parametrize("name", ["x.jsonl", "folder"])
@pytest.mark.parametrize("layout", ["packed", "padded", "list"])
def test_some_sequences_are_drawn(name, layout, tmp_path):
    columns = packed(40)
    rows = records(columns)
    names = ("train_logp", "rollout_logp", "mask")
    if layout == "packed":
        given = {"cu_seqlens": columns["cu_seqlens"]}
        tensors = [columns[key] for key in names]
    elif layout == "list":
        given, tensors = {}, [[row[key] for row in rows] for key in names]
    else:
        given, tensors = {}, [padded(columns)[key] for key in names]
    for step in range(3):
        done = rc.dump(tmp_path / name, *tensors, **given, sequences=5, step=step, which=torch.arange(40.0))
        assert done.result(timeout=60) == 5
    drawn = {0: [], 1: [], 2: []}
    for block in Dump(tmp_path / name, by=("which",)).blocks():
        for s in range(block.sequences):
            piece = slice(int(block.offsets[s]), int(block.offsets[s + 1]))
            which = int(block.columns["which"][piece][0])
            length = rows[which]["mask"].numel()
            assert torch.equal(block.train[piece][:length], rows[which]["train_logp"])
            assert torch.equal(block.mask[piece][:length], rows[which]["mask"])
            drawn[int(block.columns["steps"][piece][0])].append(which)
    assert all(len(set(found)) == 5 for found in drawn.values())
    assert len({tuple(found) for found in drawn.values()}) > 1


def test_a_seed_draws_the_same_again(tmp_path):
    columns = packed(40)
    for name in ("a.jsonl", "b.jsonl"):
        dumped(tmp_path / name, columns, sequences=5, seed=1)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()


def test_later_changes_do_not_reach_the_dump(tmp_path, monkeypatch):
    """The loop may write over its tensors as soon as the call is back."""
    go, write_now = Event(), dumping._write

    def held(*arguments):
        assert go.wait(60)
        return write_now(*arguments)

    monkeypatch.setattr(dumping, "_write", held)
    columns = packed()
    wanted = columns["train_logp"].clone()
    names = ("train_logp", "rollout_logp", "mask")
    future = rc.dump(
        tmp_path / "x.jsonl", *(columns[n] for n in names), cu_seqlens=columns["cu_seqlens"], sequences=None
    )
    columns["train_logp"].fill_(0.0)
    columns["cu_seqlens"].fill_(0)
    go.set()
    assert future.result(timeout=60) == 12
    assert torch.equal(torch.cat([block.train for block in Dump(tmp_path / "x.jsonl").blocks()]), wanted)


def test_a_slow_disk_leaves_dumps_out_and_holds_nothing_up(tmp_path, monkeypatch):
    go, write_now = Event(), dumping._write

    def held(*arguments):
        assert go.wait(60)
        return write_now(*arguments)

    monkeypatch.setattr(dumping, "_write", held)
    batch = example_batch(3, 20)
    futures = [
        rc.dump(tmp_path / "x.jsonl", batch.train_logp, batch.rollout_logp, cu_seqlens=batch.cu_seqlens)
        for _ in range(dumping.MOST_WAITING + 2)
    ]
    go.set()
    assert [future.result(timeout=60) for future in futures] == [3] * dumping.MOST_WAITING + [0, 0]
    again = rc.dump(tmp_path / "x.jsonl", batch.train_logp, batch.rollout_logp, cu_seqlens=batch.cu_seqlens)
    assert again.result(timeout=60) == 3


def test_an_error_while_writing_is_kept_and_warned_of(tmp_path):
    (tmp_path / "file").write_text("")
    batch = example_batch(3, 20)
    with pytest.warns(RuntimeWarning, match=r"rollout_corr\.dump: nothing was written"):
        future = rc.dump(
            tmp_path / "file" / "x.jsonl", batch.train_logp, batch.rollout_logp, cu_seqlens=batch.cu_seqlens
        )
        with pytest.raises(OSError, match="file"):
            future.result(timeout=60)
        # The warning comes after the result, in the thread.
        rc.dump(tmp_path / "y.jsonl", batch.train_logp, batch.rollout_logp, cu_seqlens=batch.cu_seqlens).result(60)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"path": "x.parquet"}, ValueError, "path: expected a name that ends in .jsonl or a folder's, got 'x.parquet'"),
        ({"sequences": 0}, ValueError, "sequences: expected a whole number >= 1 or None, got 0"),
        ({"sequences": True}, ValueError, "sequences: expected a whole number >= 1 or None, got True"),
        ({"rollout_logp": None}, ValueError, "rollout_logp: expected the log-probs of the engine"),
        ({"turns": torch.zeros(3)}, ValueError, "turns: expected shape"),
        ({"lengths": torch.zeros(12)}, ValueError, "lengths: this name is taken"),
        ({"token_ids": [1, 2]}, TypeError, "token_ids: expected a tensor, got list"),
    ],
)
def test_wrong_arguments_of_dump(change, error, message, tmp_path):
    columns = packed()
    arguments = {"path": tmp_path / "x.jsonl"} | {
        name: columns[name] for name in ("train_logp", "rollout_logp", "mask", "cu_seqlens")
    }
    with pytest.raises(error) as caught:
        rc.dump(**arguments | change)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_dump_from_a_device_waits_for_nothing(layout, device, tmp_path):
    """The copies are started in the order of the stream; on a GPU with offsets on it, all sequences are copied."""
    columns = packed(40)
    names = ("train_logp", "rollout_logp", "mask")
    if layout == "packed":
        tensors, given = (
            [columns[n].to(device, copy=True) for n in names],
            {"cu_seqlens": columns["cu_seqlens"].to(device)},
        )
    else:
        made = padded(columns)
        tensors, given = [made[n].to(device) for n in names], {}
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        future = rc.dump(tmp_path / "folder", *tensors, **given, sequences=5, seed=3)
        tensors[0].fill_(0.0)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert future.result(timeout=60) == 5
    rows = [row["train_logp"] for row in records(columns)]
    for block in Dump(tmp_path / "folder").blocks():
        for s in range(block.sequences):
            train = block.train[int(block.offsets[s]) : int(block.offsets[s + 1])]
            assert any(torch.equal(train[: row.numel()], row) for row in rows)
