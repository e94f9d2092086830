"""`rc.doctor` and `rc.report`: a path and the same tensors agree, in every layout; errors name the argument."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps
from rollout_corr.cli.main import main


def hot(seed=0):
    """Columns of tokens that were sampled at a temperature which the trainer ignores."""
    return planted_dumps.temperature(seed, 0.7, 0.7, 1.0)


def lengths_of(columns):
    return columns["cu_seqlens"].diff().tolist()


def call(columns, function=rc.doctor, **more):
    """Pass columns by their names: what a Batch has in a Batch."""
    given = columns | more
    if "lengths" in given:
        given["cu_seqlens"] = torch.nn.functional.pad(given.pop("lengths").cumsum(0), (1, 0))
    logps = given.pop("train_logp"), given.pop("rollout_logp")
    batch = {name: given.pop(name) for name in ("mask", "cu_seqlens", "turns", "entropy", "labels") if name in given}
    if "versions" in given:
        batch["versions"] = rc.Versions(given.pop("versions"), 2)
    if "log_mass" in given:
        batch["kept_mass"] = rc.KeptMass(given.pop("log_mass"))
    return function(*logps, rc.Batch(**batch), **given)


def found_in(result):
    """Everything that a call found, without the names of files."""
    data = result.to_dict()
    for name in ("worst", "worst_sequences"):
        for each in data.get(name, ()):
            del each["file"]
    # A dump of no turns has no such field; columns that nothing names are refused with tensors.
    return {name: value for name, value in data.items() if name not in ("file", "fields", "unused")}


@pytest.mark.parametrize("suffix", [".pt", ".jsonl", ""])
def test_a_path_and_its_tensors_agree(suffix, tmp_path):
    columns = hot()
    columns |= {"versions": torch.arange(columns["train_logp"].numel()) % 3, "environment": torch.arange(40) % 2}
    path = tmp_path / f"dump{suffix}"
    if suffix == ".pt":
        torch.save(columns, path)
    else:
        call(columns, lambda *given, **more: rc.dump(path, *given, sequences=None, **more)).result()
    read = [rc.report(source, by="environment") for source in (path, [path])]
    by_tensors = call(columns, rc.report, by="environment")
    assert {"environment", "versions"} <= by_tensors.to_dict()["profiles"].keys()
    assert found_in(read[0]) == found_in(read[1]) == found_in(by_tensors)
    assert read[0].findings == by_tensors.findings
    # Limits count sequences on both sides.
    few = rc.doctor(path, limit=7), call(columns, limit=7, by="environment")
    assert few[0].sequences == few[1].sequences == 7 and found_in(few[0]) == found_in(few[1])


def test_the_command_prints_what_python_returns(tmp_path, capsys, monkeypatch):
    path = tmp_path / "dump.pt"
    torch.save(hot(), path)
    monkeypatch.setenv("COLUMNS", "4000")
    assert main(["doctor", str(path)]) == 1
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed == repr(rc.doctor(path)).splitlines()
    assert last == "exit 1: 1 error (--fail-if findings > 0)"
    assert main(["report", str(path), "--page", str(tmp_path / "one.html")]) == 0
    *printed, last = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    found = rc.report(path, page=tmp_path / "two.html")
    assert "\n".join(printed).rstrip() == repr(found) and last == f"page: {tmp_path / 'one.html'}"
    pages = [(tmp_path / name).read_text(encoding="utf-8") for name in ("one.html", "two.html")]
    assert pages[0] == pages[1] == found.html()


def test_a_planted_temperature_is_an_object(monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    found = call(hot())
    assert not found.healthy and found.counts == {"error": 1, "warning": 0, "note": 0}
    (finding,) = found.findings
    assert (finding.name, finding.severity) == ("temperature", "error")
    assert finding.numbers["temperature"] == pytest.approx(0.7, abs=0.03)
    assert finding.numbers["factor"] == pytest.approx(1.0 / finding.numbers["temperature"])
    assert 0.0 < finding.numbers["slope_error"] < 0.02
    assert f"{finding.numbers['slope']:+.3f}" in finding.evidence[1]
    assert finding.advice and finding.title and finding == call(hot()).findings[0] and hash(finding)
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.findings = ()
    text = repr(found)
    # The cause is the first line, what was read the last one.
    assert text.startswith("1. error: a temperature was applied on one side only")
    assert text.endswith("\ntensors: train_logp, rollout_logp, cu_seqlens, token_ids")
    assert f"1. error: {finding.title} [temperature]" in text and f"   -> {finding.advice}" in text
    monkeypatch.setenv("COLUMNS", "60")
    folded = repr(found)
    assert max(map(len, folded.splitlines())) <= 60 and folded.split() == text.split()
    assert "\n   -> Divide" in folded and "\n      engine return" in folded


def test_every_layout():
    """Padded, packed in one row, jagged and lists of the same sequences give the same diagnosis."""
    columns = hot()
    names = ("train_logp", "rollout_logp", "token_ids")
    lengths, packed = lengths_of(columns), call(columns)
    lists = {name: list(columns[name].split(lengths)) for name in names}
    padded = {name: torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=0) for name, x in lists.items()}
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    jagged = {name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in lists.items()}
    row = {name: columns[name][None] for name in names}
    layouts = {
        "padded": call(padded, mask=mask),
        "a row": call(row, cu_seqlens=columns["cu_seqlens"]),
        "jagged": call(jagged),
        "lists": call(lists),
        "bfloat16 mask": call(columns, mask=torch.ones_like(columns["train_logp"]).bfloat16()),
        "with a history": call(columns | {"train_logp": columns["train_logp"].clone().requires_grad_()}),
    }
    for name, found in layouts.items():
        assert found_in(found) == found_in(packed), name


def test_labels_are_named():
    columns = planted_dumps.Model(0).healthy()
    ids = torch.arange(40) % 4
    ill = (ids == 2).repeat_interleave(columns["cu_seqlens"].diff())
    columns["rollout_logp"] = columns["rollout_logp"] + 0.5 * torch.randn(ill.shape) * ill
    by_batch = call(columns, labels={"source": rc.Labels(ids, ["a", "b", "c", "d"])})
    (finding,) = (each for each in by_batch.findings if each.name == "label")
    assert "source c" in finding.title and finding.numbers["source/2/times"] > 2.0
    by_column = call(columns, by="source", source=ids)
    (unnamed,) = (each for each in by_column.findings if each.name == "label")
    assert "source 2" in unnamed.title and unnamed.numbers == finding.numbers


def turned():
    """Turns of five tokens, the last one masked, as offsets among the tokens; and an ill label of the third of each."""
    columns = planted_dumps.Model(0).healthy()
    lengths, starts = columns["cu_seqlens"].diff(), columns["cu_seqlens"][:-1]
    begins = torch.cat([start + torch.arange(0, int(n), 5) for start, n in zip(starts, lengths, strict=True)])
    columns["turns"] = torch.cat([begins, columns["cu_seqlens"][-1:]])
    place = torch.arange(columns["train_logp"].numel()) - torch.repeat_interleave(starts, lengths)
    columns["mask"] = place % 5 < 4
    ids = torch.cat([torch.arange(-(-int(n) // 5)) for n in lengths]) % 4
    ill = torch.repeat_interleave(ids == 2, columns["turns"].diff())
    columns["rollout_logp"] = columns["rollout_logp"] + 0.5 * torch.randn(ill.shape) * ill
    return columns, place // 5, ids


@pytest.mark.parametrize("kind", ["offsets", "ids", "runs", "at most"])
def test_labels_of_turns_are_those_of_their_tokens(kind):
    columns, per_token, ids = turned()
    columns["turns"] = {
        "offsets": columns["turns"],
        "ids": per_token,
        "runs": "runs",
        "at most": rc.TurnIds(per_token, at_most=ids.numel()),
    }[kind]
    found = call(columns, rc.report, labels={"tool": rc.Labels(ids[:, None], 4)})
    by_token = call(columns, rc.report, labels={"tool": rc.Labels(per_token % 4, 4)})
    assert found_in(found) == found_in(by_token)
    assert "tool/2/times" in next(each for each in found.findings if each.name == "label").numbers


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_findings_and_the_page(tmp_path):
    report = call(hot(), rc.report)
    shown = report._repr_html_()
    assert html.escape(repr(report.diagnoses[0])) in shown
    assert shown.count("<iframe") == 1 and 'sandbox=""' in shown
    framed = re.search(r'srcdoc="([^"]*)"', shown)
    assert framed is not None and html.unescape(framed[1]) == report.html()
    assert report.save(tmp_path / "page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == report.html()


def test_two_sources_are_compared(tmp_path):
    path = tmp_path / "dump.pt"
    torch.save(hot(), path)
    healthy = call(planted_dumps.Model(0).healthy())
    both = rc.report(path, compare=healthy)
    assert [each.healthy for each in both.diagnoses] == [False, True] and not both.healthy
    assert both.to_dict()["compare"]["findings"] == [] and "change" in repr(both)
    assert found_in(rc.report(path, compare=path)) == found_in(rc.report(path, compare=rc.doctor(path)))
    twice = rc.Report((healthy, healthy)).html()
    assert "<h2>tensors (1)</h2>" in twice and "<h2>tensors (2)</h2>" in twice


# --- errors -----------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("error", "arguments", "more", "message"),
    [
        (ValueError, ("nowhere.pt",), {}, "nowhere.pt: no such file"),
        (ValueError, ("x.txt",), {}, "x.txt: no such file"),
        (ValueError, (X,), {}, "rollout_logp: expected the log-probs of the engine that sampled the tokens, got None"),
        (ValueError, (X, X[:1]), {}, r"rollout_logp: expected shape \[2, 3\] \(of train_logp\), got \[1, 3\]"),
        (ValueError, (X, X), {"mask": X[0]}, r"mask: expected shape \[2, 3\]"),
        (ValueError, (X[0], X[0]), {}, "cu_seqlens: expected the offsets of the packed sequences"),
        (ValueError, (X[:0], X[:0]), {}, "train_logp: expected at least one token, got shape"),
        (ValueError, (X, X), {"limit": 0}, "limit: expected a number >= 1, got 0"),
        (ValueError, (X, X), {"by": "environment"}, "by: expected names of columns that are passed, environment=ids"),
        (TypeError, ("x.pt", X), {}, "rollout_logp: expected None with a path, whose file has its own; got Tensor"),
        (TypeError, ("x.pt",), {"mask": X}, "mask: expected None with a path"),
        (TypeError, ("x.pt",), {"token_ids": X}, "token_ids: expected None with a path"),
        (TypeError, ("x.pt", None, rc.Batch(mask=X)), {}, "batch: expected None with a path"),
        (TypeError, (X, X, X), {}, r"batch: expected rc.Batch\(mask=..., cu_seqlens=...\) or None, got Tensor"),
        (ValueError, (X, X, rc.Batch()), {"mask": X}, "mask: expected None with a Batch"),
        (ValueError, (X, X), {"versions": X}, r"versions: expected it in the Batch, rc.Batch\(versions=...\)"),
        (TypeError, (X, X), {"field": {"mask": "m"}}, "field: expected None with tensors"),
        (TypeError, ({"train_logp": X},), {}, "source: expected a path, a list of paths or train_logp, got dict"),
        (TypeError, (X, X), {"msk": X}, r"msk: expected one of token_ids, .*did you mean 'mask'\?"),
        (TypeError, (X, X), {"environment": X}, r"by= names, by=\('environment',\)"),
        (ValueError, (X, X), {"steps": X[:, :2].long()}, r"steps: expected shape \[2, 3\] \(per token\)"),
    ],
)
@pytest.mark.parametrize("function", [rc.doctor, rc.report])
def test_errors_name_the_argument(function, error, arguments, more, message):
    with pytest.raises(error, match=message):
        function(*arguments, **more)


def test_errors_of_report(tmp_path):
    path = tmp_path / "dump.pt"
    torch.save(hot(), path)
    with pytest.raises(TypeError, match=r"compare: expected a path or what rc\.doctor returned, got Tensor"):
        rc.report(path, compare=X)
    torch.save({"train_logp": X}, path)
    with pytest.raises(ValueError, match=r"name one: .*field=\{'rollout_logp': NAME\}"):
        rc.report(path)
