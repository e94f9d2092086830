"""What-if: every preset is tried or left out for a reason, and plain loops give the result of each setting."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import yaml

import rollout_corr as rc
from builders import planted_dumps
from builders.diagnose_cases import chunks_of
from builders.dumps import json_of, write_jsonl
from builders.rounding import near
from rollout_corr.cli.main import main
from rollout_corr.diagnose import remaining_bias
from rollout_corr.diagnose.best_settings import _reason, best_settings, verdict_of
from rollout_corr.diagnose.read import chunk
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.show import terminal
from rollout_corr.diagnose.what_if import (
    Setting,
    SettingResult,
    WhatIf,
    grid,
    named_settings,
    settings_in,
    try_all,
)
from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.nearest import lines_of
from rollout_corr.frameworks.shared.writing import differences


def columns():
    """Make sequences that thresholds keep in part and reject in part, and a mask with holes."""
    made = planted_dumps.updated(0, 0.3, sequences=16, median=60)
    made["mask"] = torch.arange(made["token_ids"].numel()) % 7 != 3
    made["advantages"] = torch.tensor([(-1.0) ** s * (1 + s % 3) for s in range(16)])
    made["rewards"] = torch.tensor([0.5 * s for s in range(16)])
    return made


def results(made):
    """Try all settings on columns: their results by name; a bias is the estimate itself, and chance is left in."""
    tried = WhatIf("advantages" in made)
    for one in chunks_of(made):
        assert list(tried.adding(one))[-1] == len(tried.settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remaining_bias, "norm_of", lambda x, _: remaining_bias.Bias(*[float(x.norm())] * 3))
        return {one.setting.name: one for one in tried.results()}


@pytest.fixture(scope="module")
def tried():
    return results(columns())


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
            spec = lookup.named(name)
            beyond = spec.reads_versions or spec.measures_turns
            selects = not has_advantages and any(criterion.when != "any" for criterion in spec.criteria)
            other = any(one.of != "train/rollout" or one.stat == "external" for one in spec.criteria)
            assert selects if "advantages" in reason else beyond or other
    assert "open_instruct.vaco" in named_settings(False)[1] and "open_instruct.vaco" not in named_settings(True)[1]


@pytest.mark.parametrize("block", [None, 500], ids=["one block", "small blocks"])
def test_results_are_those_of_plain_loops(block, tried, monkeypatch):
    made = columns()
    found = tried
    if block is not None:
        monkeypatch.setattr(chunk, "CHUNK_SLOTS", block)
        found = results(made)
    bounds = made["cu_seqlens"].tolist()
    valid = [[i for i in range(a, b) if made["mask"][i]] for a, b in pairwise(bounds)]
    d = (made["train_logp"].double() - made["rollout_logp"].double()).tolist()
    sums = [math.fsum(d[i] for i in tokens) for tokens in valid]
    whole = {"cu_seqlens": made["cu_seqlens"], "advantages": made["advantages"]}
    functions = functions_of(made, valid)
    for outcome in found.values():
        setting = outcome.setting
        weight = setting.spec.weight
        if block is not None and (setting.spec.asks_batch or (weight is not None and weight.normalize == "batch")):
            # A chunk is the batch.
            continue
        out = rc.correct(made["train_logp"], made["rollout_logp"], mask=made["mask"], spec=setting.spec, **whole)
        product = setting.spec.weight is not None and setting.spec.weight.is_product
        weights, ratios, alive, shares = [], [], 0, []
        for s, tokens in enumerate(valid):
            kept = [
                bool(out.mask[i]) and (setting.spec.rejected == "mask" or float(out.weights[i]) != 0) for i in tokens
            ]
            alive += any(kept)
            shares.append(sum(kept) / len(kept))
            for i, k in zip(tokens, kept, strict=True):
                weights.append((1.0 if out.weights is None else float(out.weights[i])) if k else 0.0)
                ratios.append(math.exp(max(-20.0, min(20.0, sums[s] if product else d[i]))))
        n, total, squares = len(weights), math.fsum(weights), math.fsum(w * w for w in weights)
        ess = total * total / (n * squares) if squares else 0.0
        assert outcome.sequences_kept == pytest.approx(alive / len(valid)), setting.name
        for one in outcome.selected:
            values = [quantity_of(one.name, made, s, tokens) for s, tokens in enumerate(valid)]
            for mean, by in ((one.kept, shares), (one.rejected, [1.0 - k for k in shares])):
                wanted = math.fsum(k * x for k, x in zip(by, values, strict=True)) / (math.fsum(by) or 1.0)
                assert mean == pytest.approx(wanted, abs=1e-9), (setting.name, one.name)
        assert len(outcome.selected) == 4
        assert outcome.weight_mean == near(total / n, torch.float32), setting.name
        assert outcome.ess == near(ess, torch.float32), setting.name
        bias = bias_of(functions, weights, ratios) if total else math.inf
        assert outcome.bias == pytest.approx(bias, rel=1e-4, abs=1e-6), setting.name
        assert outcome.variance == near(1 / ess - 1 if ess else math.inf, torch.float32), setting.name
        assert setting.name != "no correction" or (outcome.variance, outcome.weight_mean) == (0.0, 1.0)


def quantity_of(name, made, s, tokens):
    """What is compared between sequences that train and those that do not."""
    of = {"length": float(len(tokens)), "log_length": math.log(len(tokens))}
    return of[name] if name in of else float(made[f"{name}s"][s])


def functions_of(made, valid):
    """The test functions at valid tokens, [M, 4]: log-prob, its mean and log length of the sequence, advantage."""
    logps = [[float(made["rollout_logp"][i]) for i in tokens] for tokens in valid]
    rows = [
        [logp, math.fsum(of) / len(of), math.log(len(of)), float(made["advantages"][s])]
        for s, of in enumerate(logps)
        for logp in of
    ]
    return torch.tensor(rows, dtype=torch.float64)


def bias_of(functions, weights, ratios):
    """The largest difference of weighted means over functions of standard deviation 1."""
    f = functions - functions.mean(0)
    one, exact = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (weights, ratios))
    apart = (f * one).sum(0) / one.sum() - (f * exact).sum(0) / exact.sum()
    return math.sqrt(float(apart @ torch.linalg.solve(f.T @ f / len(f), apart)))


def test_records_without_advantages_beside_others_with_them(tmp_path):
    """A missing advantage counts as 0, which selects nothing."""
    rows = [{"train_logp": [-0.1, -2.0], "rollout_logp": [-9.0, -1.5]} | more for more in ({"advantages": 1.0}, {})]
    write_jsonl(tmp_path / "x.jsonl", rows)
    tried = try_all(Dump(tmp_path / "x.jsonl"))
    kept = {one.setting.name: one.tokens_kept for one in tried.results()}
    assert kept["open_instruct.vaco"] == 0.75
    write_jsonl(tmp_path / "x.jsonl", rows[1:])
    assert "open_instruct.vaco" in try_all(Dump(tmp_path / "x.jsonl")).left_out


def test_rewards_of_a_dump(tmp_path):
    """A value for the sequence, or one of each token, which are added up; other forms are no problem of the dump."""
    logps = {"train_logp": [-0.1, -2.0], "rollout_logp": [-9.0, -1.5]}
    forms = [{"score": 2.0}, {"score": [0.0, 3.0]}, {"score": {"math": 1.0}}, {"score": [1.0, 2.0, 3.0]}]
    write_jsonl(tmp_path / "x.jsonl", [logps | form for form in forms])
    dump = Dump(tmp_path / "x.jsonl")
    outcome = {one.setting.name: one for one in try_all(dump).results()}["no correction"]
    assert {one.name: one.kept for one in outcome.selected}["reward"] == 2.5 and not dump.problems.count


def test_products_that_reject_long_answers_are_named(tmp_path):
    lengths = torch.logspace(0.5, 2.7, 250).long()
    generator = torch.Generator().manual_seed(0)
    rollout = torch.full((int(lengths.sum()),), -1.0)
    train = rollout + 0.05 * torch.randn(rollout.shape, generator=generator)
    made = {"train_logp": train, "rollout_logp": rollout, "lengths": lengths, "rewards": lengths / 100.0}
    torch.save(made, tmp_path / "x.pt")
    found = {one.setting.name: one for one in try_all(Dump(tmp_path / "x.pt")).results()}
    said = _reason(found["product rejection 2"])
    assert "(means of kept and rejected: length " in said and ", reward " in said
    assert "Watch: rejection prefers short answers" in said
    assert "means of" not in _reason(found["no correction"])


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    torch.save(columns(), tmp_path / "x.pt")
    assert main(["what-if", "x.pt", "--all"]) == 0
    text = capsys.readouterr().out
    assert "not tried, because" in text
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()][:2] == ["1.", "2."]
    # Names stand whole next to their numbers.
    rows = [line.split("  ")[0].strip() for line in text.splitlines()]
    assert {setting.name for setting in WhatIf(True).settings} <= set(rows)
    assert main(["what-if", "x.pt", "--json", "--sequences", "7"]) == 0
    found = json_of(capsys.readouterr().out)
    assert {"name", "spec", "tokens_kept", "ess", "bias", "bias_low", "bias_high", "variance", "worth"} <= set(
        found["settings"][0]
    )
    for setting in found["settings"]:
        assert rc.Spec.from_dict(setting["spec"]) is not None
        if setting["bias"] is not None and setting["variance"] is not None:
            worth = 1.0 / (1.0 + setting["variance"] + 7 * setting["bias"] ** 2)
            assert setting["worth"] == pytest.approx(worth)
    assert found["left_out"] and found["sequences"] == 7
    assert {"name", "config", "worth", "does", "reason", "alike"} == set(found["best"][0])
    assert main(["what-if", "x.pt", "--sequences", "0"]) == 2
    assert "--sequences: expected a number >= 1, got 0" in capsys.readouterr().err


# --- what is said first -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "state", "title", "told"),
    [
        (planted_dumps.temperature(0, 0.7, 0.7, 1.0), "broken", "error: ", "No setting repairs this: "),
        (
            planted_dumps.Model(0, sequences=100).healthy(),
            "healthy",
            "no correction needed",
            "keep the setting you have",
        ),
        (planted_dumps.updated(0, 0.3), "equal", "no setting is better than no correction", "warning: "),
    ],
    ids=["temperature", "healthy", "stale"],
)
def test_the_verdict_comes_first(made, state, title, told, tmp_path, monkeypatch):
    """An error before any ranking; where the policies agree, that no correction is needed."""
    monkeypatch.setattr("rollout_corr.diagnose.what_if.grid", lambda: grid()[:20])
    monkeypatch.setattr("rollout_corr.diagnose.what_if.named_settings", lambda has: ([], {}))
    torch.save(made, tmp_path / "x.pt")
    source = Dump(tmp_path / "x.pt")
    tried = try_all(source)
    verdict = verdict_of(tried)
    assert verdict.state == state and verdict.title.startswith(title)
    assert any(told in sentence for sentence in verdict.sentences)
    text = terminal.text_of(terminal.what_if(source, tried))
    assert " ".join(text.split()).startswith(" ".join(verdict.title.split()))
    assert "T x KL" not in text  # nobody asked for products


def test_a_better_setting_is_named():
    """Worth is compared with no correction's; a warning of the doctor stands before the numbers."""

    def judged(sequences, warnings=("k3",), sure=True):
        none = replace(result(Setting("none", rc.Spec()), 0.1, 0.0), bias_low=0.05 * sure)
        tried = [none, result(weighted("w", 2.0), 0.001, 0.05)]
        measured = SimpleNamespace(mismatch_warnings=lambda: warnings)
        return verdict_of(SimpleNamespace(results=lambda: tried, findings=list, measured=measured), sequences)

    found = judged(100)
    assert (found.state, found.title) == ("better", "best here: w")
    assert found.sentences == ("The batch is worth 95.2 % of an exact one with it, and 50 % without.",)
    assert judged(100, ()).state == "healthy"
    # 4 sequences are too few for the variance that a weight brings, and 8 are not.
    keep, larger = judged(4).sentences
    assert judged(4).state == "equal" and "keep the setting you have" in keep
    assert larger.startswith("From about 8 sequences in a batch w pays")
    # A bias that may be chance is no reason.
    assert judged(4, sure=False).sentences == (keep,)


# --- in a framework's words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", lookup.readable("write"))
def test_settings_are_those_that_a_framework_can_say(framework):
    """What is tried is what the configuration means, own names come first, and the lines are YAML."""
    left_out = {}
    tried = [Setting("no correction", rc.Spec()), *named_settings(True)[0], *grid()[::3]]
    found = settings_in(framework, tried, left_out)
    assert found or framework == "prime_rl"  # each of its losses rejects by the policy being trained
    assert len({repr(setting.config) for setting in found}) == len(found)
    for setting in found:
        read = rc.spec(framework, setting.config)
        assert not differences(setting.spec, read), setting.name
        own = setting.name.startswith(f"{framework}.")
        assert own or setting.family or setting.name == "no correction"
        assert "bypass" not in setting.name or not any("decoupled" in name for name in setting.same)
        block = yaml.safe_load("\n".join(lines_of(setting.config, framework)))
        place = getattr(lookup.part(framework), "PLACE", "")
        for name in filter(None, place.split(".")):
            block = block[name]
        assert block == plain(setting.config)
    assert all(f"it cannot be said in {framework}: " in reason for reason in left_out.values())


def plain(config):
    """Tuples as YAML reads them."""
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    return [plain(value) for value in config] if isinstance(config, (list, tuple)) else config


def test_the_command_in_a_frameworks_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rollout_corr.diagnose.what_if.grid", lambda: grid()[::6])
    torch.save(columns(), tmp_path / "x.pt")
    assert main(["what-if", str(tmp_path / "x.pt"), "--framework", "verl"]) == 0
    text = capsys.readouterr().out
    assert "      algorithm:\n        rollout_correction:\n          rollout_is: " in text
    assert "# verl has no setting for the veto" in text
    assert main(["what-if", str(tmp_path / "x.pt"), "--framework", "prime_rl"]) == 0
    assert "# cannot be said in prime_rl" in capsys.readouterr().out


# --- the best ones ----------------------------------------------------------------------------------------------------


def result(setting, bias, variance, kept=1.0, **more):
    return SettingResult(
        setting, kept, kept, 1.0, 1.0 / (1.0 + variance), bias, 0.5 * bias, 2.0 * bias, variance, **more
    )


def weighted(name, upper, family="grid", **more):
    return Setting(name, rc.Spec(rc.Weight.token(upper=upper)), family, **more)


REJECTING = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.5, upper=2.0)


def test_the_best_of_each_kind_come_first():
    """Most worth first; one of a kind; the simplest and a preset among equals; one of those with one result."""
    none = Setting("none", rc.Spec())
    tried = [
        result(none, 0.05, 0.0),
        result(weighted("grid 2", 2.0), 0.001, 0.05),
        result(weighted("preset", 2.0, ""), 0.001, 0.05),
        result(weighted("grid 1.1", 1.1), 0.1, 0.01),
        result(Setting("veto, no effect", rc.Spec(rc.Weight.token(upper=2.0), (REJECTING,))), 0.001, 0.05),
        result(Setting("half", rc.Spec(None, (REJECTING,))), 0.05, 0.4, kept=0.5),
        result(Setting("a tenth", rc.Spec(rc.Weight.geometric())), 0.3, 0.0, kept=0.1),
        result(Setting("noise", rc.Spec(rc.Weight.product())), 0.0, 0.0, too_long=True),
        result(Setting("nothing", rc.Spec(rc.Weight("prefix"))), math.inf, math.inf, kept=0.0),
    ]
    found = best_settings(tried, 100)
    assert [one.setting.name for one in found] == ["preset", "none", "half"]
    assert found[0].alike == ("grid 2", "veto, no effect")
    assert [one.worth for one in found] == pytest.approx([1 / 1.0501, 1 / 1.25, 1 / 1.65])
    # Of few sequences the average is uncertain anyway, and a little bias does not matter: the simplest is best.
    assert best_settings([tried[1], tried[3]], 1)[0].setting.name == "grid 1.1"
    assert best_settings([tried[1], tried[3]], 100)[0].setting.name == "grid 2"
    assert best_settings([tried[1], result(none, 0.0, 0.045)], 100)[0].setting.name == "none"
    assert best_settings([], 0) == []


def test_a_setting_has_a_plain_reason():
    tried = [
        result(weighted("w", 2.0), 0.00004, 0.25),
        result(Setting("none", rc.Spec()), 0.031, 0.0),
        result(Setting("reject", rc.Spec(None, (REJECTING,))), 0.0004, 0.0001, kept=0.9876),
    ]
    found = {one.setting.name: one for one in best_settings(tried, 100)}
    assert found["w"].does.endswith(" A weight above 2 becomes 2.")
    assert found["w"].reason == "Rejects nothing here; no bias remains; the effective sample is 80 % of the tokens."
    assert found["none"].does == "No weights."
    assert "a weighted mean is off by 3.1 % (1.6 % to 6.2 %) of a standard deviation" in found["none"].reason
    assert "no information is lost to uneven weights" in found["none"].reason
    step = rc.Spec(None, (REJECTING,)).explain().splitlines()[2]
    assert found["reject"].does == f"No weights. {step.removeprefix('3. ')}"
    assert found["reject"].reason.startswith("Rejects 1.2 % of the tokens and 1.2 % of the sequences; ")
    assert "off by < 0.1 % (" in found["reject"].reason


def test_it_recommends_what_suggest_says(tmp_path, capsys, monkeypatch):
    """What-if names a bound that fits; its numbers are those of rc.suggest, which alone sends to the doctor."""
    made = columns()
    alone = rc.suggest(made["train_logp"], made["rollout_logp"], mask=made["mask"], cu_seqlens=made["cu_seqlens"])
    assert "`rollout-corr doctor`" in alone.sentences[0]
    told = replace(alone, sentences=alone.sentences[1:])
    what_if = WhatIf(True)
    for one in chunks_of(made):
        what_if._hold(chunk.ValidTokens.of(one))
    assert what_if.suggestion() == told
    assert WhatIf(True).suggestion() is None
    monkeypatch.setattr("rollout_corr.diagnose.what_if.grid", list)
    monkeypatch.setattr("rollout_corr.diagnose.what_if.named_settings", lambda has: ([], {}))
    torch.save(made, tmp_path / "x.pt")
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["what-if", str(tmp_path / "x.pt")]) == 0
    said = capsys.readouterr().out
    assert all(sentence in said for sentence in told.sentences) and alone.sentences[0] not in said
