"""The committed page agrees with the names that exist, and a run replaces its own rows alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import rollout_corr as rc
from conformance import campaign, page
from conformance.page import Line
from conformance.rows import Tally
from conformance.sources import Source

TEXT = page.PAGE.read_text(encoding="utf-8")


def line(framework="nemo", kind="checkout", ours="recipe `nemo.tis`", cases="10", **more):
    made = Line(framework, f"1.0 ({kind})", ours, "`file.py: f`", cases, cases, "-", "-")
    return made._replace(**more)


def test_the_list_is_up_to_date():
    listed = TEXT.partition(page.BEGIN_LIST)[2].partition(page.END_LIST)[0].strip()
    assert listed == page.standing(page.lines(TEXT)), "write it again: make conformance ARGS=--list"


def test_rows_name_what_exists():
    names = {"preset": rc.spec_names(), "recipe": rc.recipe_names()}
    for found in page.lines(TEXT):
        kind = found.ours.partition(" ")[0]
        assert found.framework in campaign.frameworks()
        assert found.name in names.get(kind, [found.name]), found.ours
        assert int(found.cases) >= int(found.agreed) and found.kind in ("installed", "checkout")


def test_no_row_differs_undeclared():
    assert [found for found in page.lines(TEXT) if found.undeclared != "-"] == []


def test_what_has_no_row_is_listed_as_restated():
    listed = page.standing([line(), line(ours="preset `nemo.tis`")])
    (nemo,) = (row for row in listed.splitlines() if row.startswith("| nemo |"))
    _, _, compared, restated, _ = nemo.split("|")
    assert compared.strip() == "preset `nemo.tis`; recipe `nemo.tis`"
    assert "`nemo.icepop`" in restated and "its configuration" in restated and "`nemo.tis`" not in restated
    assert "| glm | - | all 2 presets; all 2 recipes |" in listed or "| glm | - | its preset; all 2 recipes |" in listed


def test_a_run_replaces_its_own_rows():
    old = [line(), line(kind="installed"), line("areal", ours="recipe `areal.ppo`"), line(ours="recipe `nemo.gone`")]
    new = [line(cases="20")]
    assert page.merged(old, new) == [old[2], new[0], old[1]]
    assert page.merged(old, new, only="tis") == [old[2], old[3], new[0], old[1]]


def test_a_line_is_read_back(tmp_path, monkeypatch):
    tally = Tally("recipe `nemo.tis`", "file.py: a|b", 5, 3, Counter({"known, by name": 1}), ["seed 1"], 1)
    made = page.line_of(Source("nemo", "abc", Path(), "checkout"), tally)
    assert made.declared == "1 known, by name" and made.undeclared == "1" and made.name == "nemo.tis"
    copy = tmp_path / "page.md"
    copy.write_text(TEXT)
    monkeypatch.setattr(page, "PAGE", copy)
    page.write([made])
    kept = [found for found in page.lines(TEXT) if (found.framework, found.kind) != ("nemo", "checkout")]
    assert sorted(page.lines(copy.read_text())) == sorted([*kept, made])
    assert copy.read_text().startswith(TEXT.partition(page.BEGIN_LIST)[0])
