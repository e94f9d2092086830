"""The doctor: every cause on dumps that have it and on dumps that only look like it; conditions; exit codes."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps, planted_mixes
from builders.diagnose_cases import CASES, causes_of, measured, table
from builders.planted_dumps import Model, three
from rollout_corr.cli.main import main
from rollout_corr.diagnose.doctor.cause import SEVERITIES
from rollout_corr.diagnose.doctor.conditions import is_true
from rollout_corr.diagnose.doctor.diagnosis import CAUSES, diagnose, ordered
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.testing import example_batch

DOCS = Path(__file__).resolve().parents[2] / "docs"


pytestmark = pytest.mark.usefixtures("one_thread")


# Bugs that leave the metrics of a call healthy, and are seen only by a look at tokens, positions or steps.
SILENT = {
    "temperature 0.95 in the engine alone",
    "log-probs kept in bfloat16",
    "the trainer's log-probs kept in bfloat16",
    "worse step by step",
    "one very bad step at the end",
    "older weights in every other sequence",
    "products over long sequences",
    "raw log-probs, sampled at temperature 0.7",
    "raw log-probs, sampled with top-p 0.9",
    "padding without a mask",
    "padding on the left without a mask",
    "padding without a mask, a sure policy",
}


def is_named_right(case):
    of = measured(case.make(0))
    found = diagnose(of)
    names = [finding.name for finding in found]
    assert case.is_named(names), names
    warned = of.mismatch_warnings()
    assert bool(warned) == (case.cause is not None and case.name not in SILENT), warned
    for finding in found:
        assert finding.severity in SEVERITIES and 0.0 <= finding.strength <= 1.0
        assert finding.evidence and all(re.search(r"\d|no shift", line) for line in finding.evidence)
        assert finding.advice.endswith(".") and not finding.title.endswith(".")


# A third, and the first of each cause. The others are slow tests; so are texts whose certainty comes in runs: a second
# each to make.
FIRST = {case.cause: case.name for case in reversed(CASES) if case.cause is not None}
SLICE = [
    case
    for i, case in enumerate(CASES)
    if (i % 3 == 0 or FIRST.get(case.cause) == case.name) and "in runs" not in case.name
]


@pytest.mark.parametrize("case", SLICE, ids=lambda case: case.name)
def test_a_dump_is_named_by_its_cause(case):
    is_named_right(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in SLICE], ids=lambda case: case.name)
def test_every_dump_is_named_by_its_cause(case):
    is_named_right(case)


def test_a_dump_that_brings_the_mass_kept_is_healthy(tmp_path):
    """Through rc.dump and both kinds of reader: log_mass is taken from the trainer's log-probs."""
    made = planted_dumps.renormalized(0, with_mass=True, top_p=0.8)
    batch = rc.Batch(cu_seqlens=made.pop("cu_seqlens"), kept_mass=rc.KeptMass(made.pop("log_mass")))
    logps = made.pop("train_logp"), made.pop("rollout_logp")
    for path in (tmp_path / "x.jsonl", tmp_path / "folder"):
        rc.dump(path, *logps, batch, sequences=None, **made).result()
        measurement = measure(Dump(path))
        assert diagnose(measurement) == []
        by_call = rc.correct(*logps, batch).metrics()
        assert measurement.metrics()["ratio_mean"] == pytest.approx(by_call["ratio_mean"], rel=1e-6)


def test_every_signature_has_dumps_that_have_it_and_dumps_that_do_not():
    causes = {cause.name for cause in CAUSES.values() if not cause.asked}
    assert {case.cause for case in CASES} == causes | {None}
    # That the policies differ is said of whatever is left, and has no look-alikes.
    assert {case.like for case in CASES} == causes - {"different_policies"} | {None}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
def test_the_table_is_fresh():
    """Doctor, held over 5 seeds of every kind: 95 % named right, none healthy called ill, none ill called healthy."""
    text = table()
    assert text in Path(__file__).with_name("README.md").read_text(encoding="utf-8"), (
        "python -m builders.diagnose_cases"
    )
    right, healthy, ill = re.findall(r"([\d.]+) (?:%\)|of \d+ healthy|of \d+ ill)", text)
    assert float(right) >= 95.0 and healthy == ill == "0"


def test_the_table_names_every_cause():
    text = (DOCS / "mismatch.md").read_text(encoding="utf-8")
    for cause in CAUSES.values():
        assert f"| `{cause.name}` | {cause.looks_for} |" in text


ORDER = """
not_exact label empty not_log_probs nonfinite filled padding identical bfloat16 shifted swapped reordered scale
turn_starts wrong_weights sequence_starts renormalized temperature stale drift penalties positions engine_alone
trainer_varies trainer_disagrees raw_log_probs outliers not_the_sampler different_policies long_products
"""


def test_the_order_in_which_causes_are_looked_for():
    """A cause stands behind all that hide it: in another order it would be reported before these are known."""
    assert list(CAUSES) == ORDER.split()
    assert {name for cause in CAUSES.values() for name in cause.hides} < CAUSES.keys()
    circle = [CAUSES["stale"], replace(CAUSES["outliers"], hides=("stale",)), CAUSES["drift"]]
    with pytest.raises(ValueError, match="causes that hide one another: stale, outliers"):
        ordered(circle[:2])


def test_two_passes_with_the_same_weights_have_to_agree():
    """The numbers cannot tell whether two passes used the same weights; --on-policy does."""
    apart = measured(three(0, 0.03, 0.03))
    assert diagnose(apart) == []
    assert [finding.name for finding in diagnose(apart, on_policy=True)] == ["trainer_disagrees"]
    assert diagnose(measured(three(0, 0.03, 0.0)), on_policy=True) == []


def test_findings_are_ranked_by_severity_then_by_strength():
    model = Model(0)
    columns = model.healthy()
    columns["train_logp"][::50] = torch.nan
    columns["rollout_logp"] = columns["rollout_logp"].roll(1).bfloat16().float()
    found = diagnose(measured(columns))
    assert [finding.name for finding in found] == ["shifted", "nonfinite", "bfloat16"]
    assert found[0].strength > found[1].strength


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda one: {}, []),
        (lambda one: {"mask": torch.zeros_like(one["token_ids"])}, ["empty"]),
        (lambda one: {"train_logp": torch.full_like(one["train_logp"], torch.nan)}, ["nonfinite"]),
        (lambda one: {"cu_seqlens": torch.tensor([0, 1])}, []),
    ],
    ids=["one sequence", "all invalid", "all NaN", "one token"],
)
def test_small_and_empty_dumps_get_no_false_finding(change, wanted):
    one = Model(0, sequences=1).healthy()
    assert causes_of(one | change(one)) == wanted


@pytest.mark.parametrize(("length", "pools"), [(2, 0), (10, 4), (25, 8), (26, 8)])
def test_short_sequences_are_tested_for_a_shift_together(length, pools):
    """Moved by one within each sequence; pairs that reached into the next one would spoil the fit."""
    logp = -torch.rand(16 * length, generator=torch.Generator().manual_seed(0))
    moved = logp.view(16, length).roll(1, 1).flatten()
    found = measured({"train_logp": logp, "rollout_logp": moved, "lengths": torch.full((16,), length)}).evidence.pairing
    assert found.paired == found.shifted[-1] == (16 if pools else 0)


def test_padding_is_counted(tmp_path, capsys):
    """A padded batch without its mask is not healthy."""
    columns, hidden = planted_dumps.padded(0), planted_dumps.padded(0, hidden=True)
    (found,) = diagnose(measured(columns))
    zeros = int((columns["train_logp"] == 0).sum())
    assert abs(found.numbers["tokens"] - zeros) < 0.01 * zeros and "at the ends of rows" in found.title
    k3 = measured(hidden).metrics()["kl_rollout_train_k3"]
    assert found.numbers["rest_kl_rollout_train_k3"] == pytest.approx(k3, rel=0.01)
    mask = hidden["mask"].to(torch.uint8)
    torch.save(columns | {"picked": mask, "grades": torch.ones(len(mask))}, tmp_path / "x.pt")
    rc.dump(tmp_path / "x.jsonl", **columns, sequences=None, picked=mask).result()
    rows, width = mask.shape
    for name, shape in (("x.pt", f"{rows} x {width}"), ("x.jsonl", f"{width}")):
        assert main(["doctor", str(tmp_path / name)]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert f"picked [{shape}, 0/1: --field mask=picked if it is the mask]" in text
        assert main(["doctor", str(tmp_path / name), "--field", "mask=picked"]) == 0
        assert "picked [" not in capsys.readouterr().out


def with_zeros_at_the_ends(count, left=False, sure=0.6, every=1, at_once=1):
    """A healthy batch whose mask includes so many tokens of padding in every row, or in every few."""
    model = Model(3, sequences=60, sure=sure)
    columns = model.healthy()
    made = {}
    for name in ("train_logp", "rollout_logp"):
        rows = columns[name].split(model.lengths.tolist())
        zeros = [torch.zeros(count * (i % every == 0) * (1 + i % at_once)) for i in range(len(rows))]
        made[name] = torch.cat([torch.cat([z, r] if left else [r, z]) for r, z in zip(rows, zeros, strict=True)])
    extra = torch.tensor([len(z) for z in zeros])
    return made | {"lengths": model.lengths + extra}


@pytest.mark.parametrize(("count", "left", "sure"), [(20, False, 1.3), (20, True, 0.6), (4, False, 0.6)])
def test_a_mask_that_is_too_long_is_an_error(count, left, sure):
    (found,) = diagnose(measured(with_zeros_at_the_ends(count, left, sure)))
    assert (found.name, found.severity) == ("padding", "error")
    assert f"{'begins' if left else 'ends'} with {count} tokens" in found.title
    assert f"the mask is too long, or {count} tokens {'early' if left else 'late'}" in found.title
    assert found.numbers["tokens"] == count * 60 and found.numbers["run_length"] == count


@pytest.mark.parametrize("count", [1, 3])
def test_few_zeros_at_the_ends_may_be_certain_tokens(count):
    """A mask that is one late and a certain end of sequence look the same."""
    (found,) = diagnose(measured(with_zeros_at_the_ends(count)))
    assert (found.name, found.severity) == ("padding", "note")
    assert "the mask is too long, or" in found.title and "certain of an end-of-sequence token" in found.title
    assert "if they are padding" in found.advice and "nothing is wrong" in found.advice


@pytest.mark.parametrize(
    "healthy", [{"sure": 3.0}, {"every": 2}, {"at_once": 5}], ids=["certain anywhere", "half of the rows", "any length"]
)
@pytest.mark.parametrize("count", [1, 5])
def test_certain_tokens_are_no_mask_that_is_too_long(count, healthy):
    found = measured(with_zeros_at_the_ends(count, **healthy)).evidence
    assert found.padding.fillers[0.0].beyond(60, found.tokens) is None


def test_an_entropy_shows_what_log_probs_cannot(tmp_path):
    """Raw log-probs of both sides agree whatever sampled. Entropies come from a batch or from a dump."""
    made = planted_dumps.raw(0, 0.7)
    batch = rc.Batch(cu_seqlens=made.pop("cu_seqlens"), entropy=made.pop("entropy"))
    logps = made["train_logp"], made["rollout_logp"]
    rc.dump(tmp_path / "x.jsonl", *logps, batch, sequences=None).result()
    for found in (rc.doctor(*logps, batch), rc.doctor(tmp_path / "x.jsonl")):
        assert [one.name for one in found.findings] == ["raw_log_probs"] and "entropy" in found.source.fields
    unseen = rc.doctor(*logps, cu_seqlens=batch.cu_seqlens)
    assert unseen.healthy and "add `entropy`, or let the engine return" in " ".join(str(unseen).split())


def test_two_engines_are_told_from_one():
    """Every other sequence from an engine of older weights: k3 stays healthy, and nothing labels them."""
    (found,) = diagnose(measured(planted_mixes.every_other(0, 0.2, sequences=80)))
    assert (found.name, found.severity, found.numbers["sequences"]) == ("outliers", "warning", 40)
    assert 5.0 < found.numbers["times"] < 10.0 and "two engines" in found.title


def test_a_penalty_is_no_growth_along_the_sequence():
    """Penalties of the sampler were called positions. A token counts as seen within its own sequence alone."""
    columns = planted_mixes.penalized(0, 1.0)
    (found,) = diagnose(measured(columns))
    assert found.name == "penalties" and 0.2 < found.numbers["difference"] < 1.0
    del columns["token_ids"]
    assert "penalties" not in causes_of(columns)


def test_truncation_of_unsure_first_tokens_is_no_other_prompt():
    """Top-k takes most from the first tokens, which have many continuations; later ones are truncated all the same."""
    columns = planted_dumps.renormalized(
        0, top_k=2, certainty=lambda position, owner: torch.where(position < 1, 0.1, 4.0)
    )
    assert causes_of(columns) == ["renormalized"]


def test_first_tokens_of_one_prompt_are_no_other_prompt():
    """The samples of one prompt begin alike: a router that takes another expert there moves five of them at once."""
    model = planted_dumps.Model(0)
    columns = model.healthy()
    first = model.offsets[:5]
    columns["train_logp"][first] -= 0.6
    assert causes_of(columns) == []


def test_a_policy_that_sharpened_since_is_no_error():
    """With versions, a trainer that is surer than the engine may have learned to be."""
    columns = planted_dumps.temperature(0, 1.3, 1.3, 1.0)
    (error,) = diagnose(measured(columns))
    (found,) = diagnose(measured(columns | {"versions": torch.zeros_like(columns["token_ids"])}))
    assert (error.severity, found.severity) == ("error", "warning")
    assert found.evidence[-1].endswith("compare tokens of the current version") and len(error.evidence) == 3


def test_versions_that_are_equal_are_no_advice():
    """A dump whose tokens have one version is not told to bring versions."""
    columns = planted_dumps.updated(0, 0.5)
    (found,) = diagnose(measured(columns | {"versions": torch.zeros_like(columns["token_ids"])}))
    assert found.evidence[-1].startswith("all tokens are of version 0: there is nothing to compare")
    assert "Dump versions" not in found.advice and "Dump versions" in diagnose(measured(columns))[0].advice


# --- conditions -------------------------------------------------------------------------------------------------------

VALUES = {"logratio_abs_p99.9": 0.5, "token/weight_ess": 0.25, "tokens": 1e6, "zero": 0.0, "notes": 2.0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("logratio_abs_p99.9 > 0.4", True),
        ("logratio_abs_p99.9 >= .5", True),
        ("logratio_abs_p99.9 <= .5", True),
        ("logratio_abs_p99.9 < .5 or logratio_abs_p99.9 > .5", False),
        ("tokens == 1000000", True),
        ("tokens != 1e6", False),
        ("-1 < zero", True),
        ("zero > -1", True),
        # and before or; not before and.
        ("tokens > 1 or tokens > 1 and zero > 1", True),
        ("(tokens > 1 or tokens > 1) and zero > 1", False),
        ("not zero > 1 and zero > 1", False),
        ("notes > 1", True),
    ],
)
def test_conditions(text, wanted):
    assert is_true(text, VALUES) is wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected comparisons such as 'kl_rollout_train_k3 > 0.01', joined by and, or, not and parentheses"),
        ("tokens", "; cannot read 'tokens'"),
        ("0 < zero < 1", "; cannot read '< 1'"),
        ("(tokens) > 1", "; cannot read 'tokens) > 1'"),
        ("token > 1", "there is no metric 'token', did you mean 'tokens'?"),
        ("zero > 1 and nothing_like_it > 1", "there is no metric 'nothing_like_it'"),
        ("tokens > 1 or nothing_like_it > 1", "there is no metric 'nothing_like_it'"),
        ("__import__('os').system('true') > 1", "; cannot read \"__import__('os')"),
        ("tokens > and", "; cannot read 'tokens > and'"),
    ],
)
def test_wrong_conditions_are_named(text, message):
    with pytest.raises(DumpError) as caught:
        is_true(text, VALUES)
    assert message in str(caught.value) and str(caught.value).startswith(f"--fail-if {text!r}: ")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def healthy(tmp_path):
    torch.save(Model(0).healthy(), tmp_path / "healthy.pt")
    return str(tmp_path / "healthy.pt")


@pytest.fixture
def moved(tmp_path):
    torch.save(planted_dumps.shifted(0, 1), tmp_path / "moved.pt")
    return str(tmp_path / "moved.pt")


def test_a_gate_replaces_the_default(moved, healthy, capsys):
    assert main(["doctor", moved, "--fail-if", "tokens < 10"]) == 0
    assert main(["doctor", moved, "--fail-if", "tokens < 10", "--fail-if", "shifted == 1"]) == 1
    assert main(["doctor", healthy, "--fail-if", "logratio_abs_p99 > 1e-3"]) == 1
    assert main(["doctor", healthy, "--fail-if", "problems > 0 or findings > 0"]) == 0
    capsys.readouterr()
    assert main(["doctor", healthy, "--fail-if", "kl_rollout_train_k33 > 1"]) == 2
    assert "did you mean 'kl_rollout_train_k3'" in capsys.readouterr().err


def test_nothing_is_neither_healthy_nor_ill(tmp_path, capsys):
    """A dump that is masked everywhere does not pass a gate as healthy."""
    torch.save(planted_mixes.masked_everywhere(0), tmp_path / "x.pt")
    for more in ([], ["--fail-if", "kl_rollout_train_k3 > 1"], ["--json"]):
        assert main(["doctor", str(tmp_path / "x.pt"), *more]) == 2
        text = capsys.readouterr().out
        assert "no valid token" in text and "healthy:" not in text


def test_outliers_are_counted_and_named():
    """Ten tokens of 15 nats in 1 of 300 sequences are neither staleness nor low precision."""
    (found,) = diagnose(measured(planted_mixes.off_tokens(0, 15.0, count=10)))
    assert found.title == "10 tokens of 25,670 (0.039 %) carry 100 % of k3, in 1 sequence"
    assert "the worst record is 3 " in " ".join(found.evidence)
    (found,) = diagnose(measured(planted_mixes.off_tokens(0, -12.0, share=1e-3)))
    assert re.fullmatch(r"34 tokens of 25,670 \(0\.132 %\) carry 9\d(\.\d)? % of k3, in 32 sequences", found.title)
    assert "without them k3 is 0.00027" in " ".join(found.evidence)
    (found,) = diagnose(measured(planted_mixes.part(0, planted_mixes.bad_replica, block=True)))
    assert found.title.endswith(
        "in 12.5 % of the sequences: one rank or replica of several? (they are one block, 50 to 59)"
    )


@pytest.mark.parametrize(("steps", "named"), [((3, 7), "step {}"), ((3, 3), "ranks/{}.pt"), ((), "ranks/{}.pt")])
def test_records_of_several_files_are_told_apart(steps, named, tmp_path, monkeypatch, capsys):
    """By their steps; by their files, where ranks wrote one step or the dump has no steps."""
    dump = planted_mixes.off_tokens(0, 15.0, count=1)
    monkeypatch.chdir(tmp_path)
    Path("ranks").mkdir()
    for i in (3, 7):
        torch.save(dump | {"steps": torch.full((300,), steps[i == 7])} if steps else dump, f"ranks/{i}.pt")
    assert main(["doctor", "ranks"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"3 of {named.format(i)} (50 % of k3" in said for i in (3, 7))


@pytest.mark.parametrize(
    ("change", "cause"), [("nothing", "outliers"), ("a constant", "not_the_sampler"), ("none far", None)]
)
def test_what_warnings_reports_is_not_called_healthy(change, cause):
    """Few tokens far off, and a mean ratio a little off, in policies that otherwise agree."""
    batch = example_batch(catastrophic=0.0 if cause != "outliers" else 1e-4)
    train = batch.train_logp.where(batch.train_logp < -0.1, -0.1) + (0.02 if change == "a constant" else 0.0)
    rollout = batch.rollout_logp.where(batch.train_logp < -0.1, -0.1)
    given = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens)
    found = [one.name for one in rc.doctor(train, rollout, given).findings if one.severity != "note"]
    assert found == ([] if cause is None else [cause])
    assert bool(rc.correct(train, rollout, given).warnings()) == (cause is not None)


def temperatures(seeds, engines=(0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.3)):
    """The interval of the temperature in dumps of three sharpnesses, of engines in bfloat16 and in int8."""
    for sure, noise, engine, seed in itertools.product((0.6, 1.3, 2.2), (0.03, 0.1), engines, seeds):
        model = Model(seed, noise=noise, sure=sure)
        rollout = (model.engine / engine).log_softmax(1)
        columns = model.columns(model.sample(rollout), model.logits.log_softmax(1), rollout)
        found = measured(columns).evidence.sharpness.found()
        yield engine, found.interval(), found.share


def test_a_temperature_is_estimated_with_its_error():
    """The interval holds the truth and is narrow."""
    for engine, (low, high), share in temperatures(range(200, 201), (0.7, 1.3)):
        assert low <= engine <= high and high - low < 0.12 and share > 0.7
    found = diagnose(measured(planted_mixes.mixed(0, 0.7)))[0]
    assert re.match(r"the engine's temperature is about 0\.(69|70|71) \(0\.6\d to 0\.7\d\) times", found.evidence[0])
    assert found.numbers["temperature_low"] < 0.7 < found.numbers["temperature_high"]
    assert "the engine has the sharper policy" in found.title
    # The trainer's may have become surer since the oldest version that sampled.
    columns = planted_mixes.mixed(0, 1.3)
    columns["versions"] = 3 + torch.arange(columns["train_logp"].numel()).view_as(columns["train_logp"]) % 4
    found = next(one for one in diagnose(measured(columns)) if one.name == "temperature")
    assert "the trainer has the sharper policy" in found.title
    assert any("surer since version 3 looks the same" in line for line in found.evidence)


@pytest.mark.slow
def test_the_interval_of_a_temperature_holds_it_in_95_of_100_dumps():
    """Of 210 dumps, on seeds that no threshold was set on."""
    inside = [low <= engine <= high for engine, (low, high), _ in temperatures(range(300, 305))]
    assert len(inside) == 210 and sum(inside) >= 0.95 * len(inside)


def test_a_temperature_is_named_where_it_explains_the_mismatch():
    """A damaged policy is flatter than the engine's, and no temperature: most of D has another cause."""
    share = {
        step: measured(planted_mixes.mixed(0, 0.7, step=step)).evidence.sharpness.found().share for step in (0, 0.8)
    }
    assert share[0] > 0.9 and 0.2 < share[0.8] < 0.5
    assert measured(planted_dumps.flattened(0, 1.0, 0.85)).evidence.sharpness.found().share < 0.25


def test_the_factor_of_a_scale_is_measured():
    """Log-probs divided by their length are not top-p with a mass of 0.4464."""
    for side in ("rollout_logp", "train_logp"):
        (found,) = diagnose(measured(planted_mixes.scaled(0, lambda x, n: x / n, side)))
        assert found.title == f"the {side[:-5]} log-probs were divided by the length of their sequence"
    (found,) = diagnose(measured(planted_mixes.scaled(0, lambda x, n: x / math.log(2.0), "rollout_logp")))
    assert found.title == "the train log-probs are 0.693 times the rollout log-probs"


def test_a_shift_on_one_rank_is_said_to_be_in_a_part():
    """A shift on 1 of 8 ranks is not said of all."""
    (found,) = diagnose(measured(planted_mixes.part(0, planted_mixes.shift)))
    assert found.title == (
        "the rollout log-probs are 1 token late in 12.5 % of the sequences: one rank or replica of several? (they are "
        "the records whose number modulo 8 is 5)"
    )
    (found,) = diagnose(measured(planted_dumps.shifted(0, 1)))
    assert found.title == "the rollout log-probs are 1 token late"


def test_sure_tokens_under_a_temperature_are_no_multiples():
    """In a tenth of the sequences one side is a multiple of the other, by factors of 0.8 to 1.5."""
    model = Model(sequences=120, median=20, sure=2.8)
    rollout = model.engine.log_softmax(1)
    columns = model.columns(model.sample(rollout), (model.logits / 0.7).log_softmax(1), rollout)
    assert causes_of(columns)[:1] == ["temperature"]


def test_sequences_with_one_unsure_token_are_not_swapped():
    """Sequences whose unsure tokens stand at one place correlate by 0.95, whoever they are."""
    generator = torch.Generator().manual_seed(0)
    rollout, train = -0.05 * torch.rand(2, 64, 32, generator=generator)
    row = torch.arange(64)
    rollout[row, 5 * (row % 4)] -= 4.0
    train[row, 5 * ((row + 1) % 4)] -= 4.0
    train[row, torch.randint(16, 32, (64,), generator=generator)] -= 1.3
    assert "swapped" not in causes_of({"train_logp": train, "rollout_logp": rollout})
