"""What-if: every preset is tried or left out for a reason, and the result of each setting is that of plain loops."""

from __future__ import annotations

import html
import math
from itertools import pairwise

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps
from builders.diagnose_cases import chunks_of
from builders.dumps import json_of, write_jsonl
from builders.rounding import near
from rollout_corr.cli.main import main
from rollout_corr.diagnose.best_settings import best_settings
from rollout_corr.diagnose.read import chunk
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.what_if import Setting, SettingResult, WhatIf, named_settings, pareto, try_all
from rollout_corr.frameworks.shared import lookup

pytestmark = pytest.mark.usefixtures("one_thread")


def columns():
    """Make sequences of which thresholds keep some and reject some, and a mask with holes."""
    made = planted_dumps.updated(0, 0.3, sequences=16, median=60)
    made["mask"] = torch.arange(made["token_ids"].numel()) % 7 != 3
    made["advantages"] = torch.tensor([(-1.0) ** s * (1 + s % 3) for s in range(16)])
    return made


def outcomes(made):
    """Try all settings on columns: {name: (setting, outcome)}."""
    tried = WhatIf("advantages" in made)
    for one in chunks_of(made):
        assert list(tried.adding(one))[-1] == len(tried.settings)
    return {setting.name: (setting, outcome) for setting, outcome in tried.outcomes()}


@pytest.fixture(scope="module")
def tried():
    return outcomes(columns())


def test_every_preset_is_tried_or_left_out_for_a_reason():
    for has_advantages in (False, True):
        tried, left_out = named_settings(has_advantages)
        named = [name for setting in tried for name in (setting.name, *setting.same)]
        assert sorted([*named, *left_out]) == lookup.spec_names()
        assert len(named) > 50
        for setting in tried:
            for name in (setting.name, *setting.same):
                assert lookup.named(name) == setting.spec
        for name, reason in left_out.items():
            criteria = lookup.named(name).criteria
            if "advantages" in reason:
                assert not has_advantages and any(criterion.when != "any" for criterion in criteria)
            else:
                spec = lookup.named(name)
                beyond = spec.reads_versions or spec.measures_turns
                assert beyond or any(c.of != "train/rollout" or c.stat == "external" for c in criteria)
    assert "open_instruct.vaco" in named_settings(False)[1] and "open_instruct.vaco" not in named_settings(True)[1]


@pytest.mark.parametrize("block", [None, 500], ids=["one block", "small blocks"])
def test_outcomes_are_those_of_plain_loops(block, tried, monkeypatch):
    made = columns()
    found = tried
    if block is not None:
        monkeypatch.setattr(chunk, "CHUNK_SLOTS", block)
        found = outcomes(made)
    bounds = made["cu_seqlens"].tolist()
    valid = [[i for i in range(a, b) if made["mask"][i]] for a, b in pairwise(bounds)]
    d = (made["train_logp"].double() - made["rollout_logp"].double()).tolist()
    sums = [math.fsum(d[i] for i in tokens) for tokens in valid]
    whole = {"cu_seqlens": made["cu_seqlens"], "advantages": made["advantages"]}
    for setting, outcome in found.values():
        weight = setting.spec.weight
        if block is not None and (setting.spec.asks_batch or (weight is not None and weight.normalize == "batch")):
            # A chunk is the batch.
            continue
        out = rc.correct(made["train_logp"], made["rollout_logp"], mask=made["mask"], spec=setting.spec, **whole)
        product = setting.spec.weight is not None and setting.spec.weight.is_product
        weights, ratios, alive = [], [], 0
        for s, tokens in enumerate(valid):
            kept = [
                bool(out.mask[i]) and (setting.spec.rejected == "mask" or float(out.weights[i]) != 0) for i in tokens
            ]
            alive += any(kept)
            for i, k in zip(tokens, kept, strict=True):
                weights.append((1.0 if out.weights is None else float(out.weights[i])) if k else 0.0)
                ratios.append(math.exp(max(-20.0, min(20.0, sums[s] if product else d[i]))))
        n, total, squares = len(weights), math.fsum(weights), math.fsum(w * w for w in weights)
        ess = total * total / (n * squares) if squares else 0.0
        bias = math.fsum(abs(w - r) for w, r in zip(weights, ratios, strict=True)) / math.fsum(ratios)
        assert outcome.sequences_kept == pytest.approx(alive / len(valid)), setting.name
        assert outcome.weight_mean == near(total / n, torch.float32), setting.name
        assert outcome.ess == near(ess, torch.float32), setting.name
        assert outcome.bias == near(bias, torch.float32), setting.name
        assert outcome.variance == near(1 / ess - 1 if ess else math.inf, torch.float32), setting.name
        assert setting.name != "no correction" or (outcome.variance, outcome.weight_mean) == (0.0, 1.0)


def test_the_best_are_those_that_nothing_beats():
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (Setting(str(i), rc.Spec()), SettingResult(1.0, 1.0, 1.0, 1.0, bias, variance))
        for i, (bias, variance) in enumerate(torch.rand(60, 2, generator=generator).tolist())
    ]
    wanted = {a.name for a, x in pairs if not any(y.bias < x.bias and y.variance < x.variance for _, y in pairs)}
    assert set(pareto(pairs)) == wanted and 2 < len(wanted) < 30


def test_records_without_advantages_beside_others_with_them(tmp_path):
    """A missing advantage counts as 0, which selects nothing."""
    rows = [{"train_logp": [-0.1, -2.0], "rollout_logp": [-9.0, -1.5]} | more for more in ({"advantages": 1.0}, {})]
    write_jsonl(tmp_path / "x.jsonl", rows)
    tried = try_all(Dump(tmp_path / "x.jsonl"))
    kept = {setting.name: outcome.tokens_kept for setting, outcome in tried.outcomes()}
    assert kept["open_instruct.vaco"] == 0.75
    write_jsonl(tmp_path / "x.jsonl", rows[1:])
    assert "open_instruct.vaco" in try_all(Dump(tmp_path / "x.jsonl")).left_out


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    torch.save(columns(), tmp_path / "x.pt")
    assert main(["what-if", "x.pt"]) == 0
    text = capsys.readouterr().out
    assert "page: x.pt.what-if.html" in text and "lower bias and lower variance): " in text
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3.", "4.", "5."]
    assert "reject sequences by product 1.1" not in text
    assert main(["what-if", "x.pt", "--all"]) == 0
    text = capsys.readouterr().out
    assert "verl.decoupled_token_is" in text and "token weight <= 2" in text and "not tried, because" in text
    assert "reject sequences by product 1.1" in text
    assert main(["what-if", "x.pt", "--json"]) == 0
    found = json_of(capsys.readouterr().out)
    assert {"name", "spec", "tokens_kept", "sequences_kept", "ess", "bias", "variance", "note"} <= set(
        found["settings"][0]
    )
    for setting in found["settings"]:
        assert rc.Spec.from_dict(setting["spec"]) is not None
    assert found["left_out"]
    assert [set(one) for one in found["best"]] == [{"name", "error", "does", "reason", "alike"}] * 5


# --- the best ones ----------------------------------------------------------------------------------------------------


def result(bias, variance, kept=1.0, note=""):
    return SettingResult(kept, kept, 1.0, 1.0 / (1.0 + variance), bias, variance, note)


def weighted(name, upper, family="grid", **more):
    return Setting(name, rc.Spec(rc.Weight.token(upper=upper)), family, upper, **more)


REJECTING = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.5, upper=2.0)


def test_the_best_of_each_kind_come_first():
    """Least error first; one of a kind; a preset and the lesser variance among equals; one of those with one result."""
    none = Setting("none", rc.Spec())
    tried = [
        (none, result(0.2, 0.0)),
        (weighted("grid 2", 2.0), result(0.001, 0.05)),
        (weighted("preset", 2.0, ""), result(0.001, 0.05)),
        (weighted("grid 1.1", 1.1), result(0.1, 0.01)),
        (Setting("veto, no effect", rc.Spec(rc.Weight.token(upper=2.0), (REJECTING,))), result(0.001, 0.05)),
        (Setting("half", rc.Spec(None, (REJECTING,))), result(0.5, 1.0, kept=0.5)),
        (Setting("noise", rc.Spec(rc.Weight.product())), result(0.0, 0.0, note="T x KL")),
        (Setting("nothing", rc.Spec(rc.Weight.geometric())), result(1.0, math.inf, kept=0.0)),
    ]
    found = best_settings(tried, 100)
    assert [one.setting.name for one in found] == ["preset", "none", "half"]
    assert found[0].alike == ("grid 2", "veto, no effect")
    assert [one.error for one in found] == pytest.approx([0.001**2 + 0.0105, 0.04 + 0.01, 0.25 + 0.02])
    # Of few sequences the average is uncertain anyway, and a little bias does not matter.
    assert best_settings([tried[1], tried[3]], 1)[0].setting.name == "grid 1.1"
    assert best_settings([tried[1], tried[3]], 100)[0].setting.name == "grid 2"
    assert best_settings([], 0) == []


def test_a_setting_has_a_plain_reason():
    tried = [
        (weighted("w", 2.0), result(0.00005, 0.25)),
        (Setting("none", rc.Spec()), result(0.031, 0.0)),
        (Setting("reject", rc.Spec(None, (REJECTING,))), result(0.0004, 0.0001, kept=0.9876)),
    ]
    found = {one.setting.name: one for one in best_settings(tried, 100)}
    assert found["w"].does == "token weights, cut to at most 2"
    assert found["w"].reason == (
        "Rejects nothing here; weights are the exact ratios; the batch is worth 80 % of its tokens."
    )
    assert found["none"].does == "no weights" and "a weight of 1 is 3.1 % away from its ratio" in found["none"].reason
    assert "no information is lost to uneven weights" in found["none"].reason
    assert found["reject"].does == "no weights; rejects sequences whose geometric mean ratio is outside 0.5 to 2"
    assert found["reject"].reason.startswith("Rejects 1.24 % of the tokens and 1.24 % of the sequences; ")
    assert "less than 0.1 % away" in found["reject"].reason


def test_it_recommends_what_suggest_says(tmp_path, capsys, monkeypatch):
    """Row 2 of the users' review: what-if gave 105 rows and no bound that fits; the numbers are those of rc.suggest."""
    made = columns()
    told = rc.suggest(made["train_logp"], made["rollout_logp"], mask=made["mask"], cu_seqlens=made["cu_seqlens"])
    what_if = WhatIf(True)
    for one in chunks_of(made):
        what_if._add_sequences(chunk.ValidTokens.of(one))
    assert what_if.suggestion() == told
    assert WhatIf(True).suggestion() is None
    monkeypatch.setattr("rollout_corr.diagnose.what_if.grid", list)
    torch.save(made, tmp_path / "x.pt")
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["what-if", str(tmp_path / "x.pt"), "--page", str(tmp_path / "x.html")]) == 0
    said, drawn = capsys.readouterr().out, html.unescape((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert all(sentence in said and sentence in drawn for sentence in told.sentences)
