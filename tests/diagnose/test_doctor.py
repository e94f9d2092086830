"""The doctor: every cause on dumps that have it and on dumps that only look like it; conditions; exit codes."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps as dumps
from builders.diagnose_cases import CASES, measured, table
from builders.planted_dumps import Model, at
from rollout_corr.cli.main import main
from rollout_corr.diagnose.doctor.cause import SEVERITIES
from rollout_corr.diagnose.doctor.conditions import is_true
from rollout_corr.diagnose.doctor.diagnosis import CAUSES, diagnose, ordered
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.problems import DumpError

DOCS = Path(__file__).resolve().parents[2] / "docs"


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
    "padding of -1 without a mask",
}


def shows(found, says):
    """Look for texts in all that the first finding says; those with "!" must not be there."""
    text = "\n".join((f"{found[0].severity}: {found[0].title}", *found[0].evidence, found[0].advice)) if found else ""
    for said in says:
        assert (re.search(said.removeprefix("!"), text) is None) == said.startswith("!"), (said, text)


# A third, the first of each cause, and those whose words are given. The others are slow tests; so are texts whose
# certainty comes in runs: a second each to make.
FIRST = {case.cause: case.name for case in reversed(CASES) if case.cause is not None}
SLICE = [
    case
    for i, case in enumerate(CASES)
    if (i % 3 == 0 or FIRST.get(case.cause) == case.name or case.says) and "in runs" not in case.name
]


REST = [pytest.param(case, marks=pytest.mark.slow, id=case.name) for case in CASES if case not in SLICE]


@pytest.mark.parametrize("case", [*(pytest.param(case, id=case.name) for case in SLICE), *REST])
def test_a_dump_is_named_by_its_cause(case):
    of = measured(case.make(0))
    found = diagnose(of)
    names = [finding.name for finding in found]
    assert case.is_named(names), names
    shows(found, case.says)
    warned = of.mismatch_warnings()
    assert bool(warned) == (case.cause is not None and case.name not in SILENT), warned
    for finding in found:
        assert finding.severity in SEVERITIES and 0.0 <= finding.strength <= 1.0
        assert finding.evidence and all(re.search(r"\d|no shift", line) for line in finding.evidence)
        assert finding.advice.endswith(".") and not finding.title.endswith(".")


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
    text = (DOCS / "mismatch.md").read_text(encoding="utf-8").lower()
    for cause in CAUSES.values():
        words = " ".join(cause.recognize.__doc__.lower().split()).removesuffix(".")
        assert f"| `{cause.name}` | {words} |" in text


ORDER = """
not_exact label empty not_log_probs nonfinite filled padding identical bfloat16 shifted swapped reordered scale
turn_starts wrong_weights sequence_starts renormalized temperature stale drift penalties positions engine_alone
trainer_varies trainer_disagrees raw_log_probs outliers not_the_sampler different_policies long_products
"""


def test_the_order_in_which_causes_are_looked_for():
    """A cause stands behind all that hide it: in another order it would be reported before these are known."""
    assert list(CAUSES) == ORDER.split()
    assert {name for cause in CAUSES.values() for name in cause.hides} < CAUSES.keys()
    with pytest.raises(ValueError, match="causes that hide one another: stale, outliers"):
        ordered([CAUSES["stale"], replace(CAUSES["outliers"], hides=("stale",))])


# --- dumps and what is found in them ----------------------------------------------------------------------------------


def plain(**changes):
    """A healthy dump, and changes of its columns, which may be computed from them."""
    columns = Model(0).healthy()
    return columns | {name: made(columns[name]) if callable(made) else made for name, made in changes.items()}


def three_bugs():
    columns = plain(rollout_logp=lambda x: x.roll(1).bfloat16().float())
    columns["train_logp"][::50] = torch.nan
    return columns


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


def impossible(side):
    """Logits of -1e4 where a mask of top-k excludes the token: no value repeats, and they are too many for outliers."""
    model = Model(0)
    draw = partial(model.uniform, model.count)
    return model.changed(f"{side}_logp", lambda x: x - (draw() < 0.04) * 1e4 * (1.0 + draw()))


def nearly_even():
    """Log-probs hardly vary on either side, so a constant explains top-k as well as a factor."""
    model = Model(0, sure=-4.0)
    return model.sampled(model.logits, dumps.truncated(model.engine, top_k=20))


def off_throughout(where):
    """A quarter of the sequences is short, so of first tokens it has more than of others."""
    model = Model(0, sequences=80)
    short = (model.owner % 4 == 0) & (model.position < 16)
    other = model.updated((short & where(model))[:, None])
    kept = short | (model.owner % 4 != 0)
    columns = {name: x[kept] for name, x in model.sampled(other).items() if name != "cu_seqlens"}
    return columns | {"lengths": torch.bincount(model.owner[kept])}


def multiples_under_top_k():
    """Answers of one form, which other log-probs than theirs do not fit, while all sequences are off as much."""
    columns = dumps.renormalized(0, top_k=2)
    few = slice(int(columns["cu_seqlens"][4]))
    columns["rollout_logp"][few] = columns["train_logp"][few] / 2.7
    return columns


def next_place():
    """Log-probs of the next place. Half of the tokens are blanks in runs, which are as sure there."""
    model = Model(0)
    blank = torch.arange(model.count) // 20 % 2 == 0
    for logits in (model.logits, model.engine):
        logits[:, 0] += torch.where(blank, 20.0 + 5.0 * model.uniform(model.count), 0.0)
    columns = model.healthy()
    columns["train_logp"] = at(model.logits.log_softmax(1).roll(-1, 0), columns["token_ids"])
    assert measured(columns).metrics()["prob_correlation"] > 0.3
    return columns


def conversation(where, noise=2.0):
    """Two turns of any lengths with a masked tool between them, and another policy of the trainer in some place."""
    model = Model(0, sequences=80, median=120)
    cut = (model.lengths * (0.2 + 0.6 * model.uniform(80))).long()[model.owner]
    turn = model.position >= cut
    return model.sampled(model.updated(noise * where(model, turn)[:, None]), mask=~turn | (model.position >= cut + 8))


def growing_turns():
    """All first turns are short, and the later a turn is, the more it differs."""
    model = Model(0, sequences=60, median=200)
    mask = (model.position < 12) | (model.position >= 200)
    growing = (model.position >= 200) * (1.0 + (model.position - 200.0).clamp(min=0.0) / 100.0)
    return model.sampled(model.updated(growing[:, None]), mask=mask)


def shifted_turns():
    """A turn is moved within itself: over whole sequences no shift fits."""
    model = Model(0, sequences=80, median=120)
    later = model.position >= (model.lengths * 0.5).long()[model.owner]
    return model.changed("rollout_logp", lambda x: torch.where(later, x.roll(1), x), turns=later.long())


def every_eighth_at(temperature):
    model = Model(0, sequences=80)
    some = (model.owner % 8 == 3)[:, None]
    return model.sampled(model.logits, torch.where(some, model.engine / temperature, model.engine).log_softmax(1))


def one_unsure_token():
    """Sequences whose unsure tokens stand at one place correlate by 0.95, whoever they are."""
    generator = torch.Generator().manual_seed(0)
    rollout, train = -0.05 * torch.rand(2, 64, 32, generator=generator)
    row = torch.arange(64)
    rollout[row, 5 * (row % 4)] -= 4.0
    train[row, 5 * ((row + 1) % 4)] -= 4.0
    train[row, torch.randint(16, 32, (64,), generator=generator)] -= 1.3
    return {"train_logp": train, "rollout_logp": rollout}


def shuffled(length, rows=256):
    """Rows of one side in another order, too short for the test of long ones."""
    model = Model(0, sequences=rows, median=length)
    columns = model.healthy()
    lengths = model.lengths.tolist()
    own, other = (
        torch.stack([row[:length] for row in columns[n].split(lengths)]) for n in ("train_logp", "rollout_logp")
    )
    return {"train_logp": own, "rollout_logp": other[torch.randperm(rows, generator=model.generator)]}


def in_rows(columns):
    """The first tokens as 200 rows of 16."""
    return {name: columns[name][: 16 * 200].view(200, 16) for name in ("train_logp", "rollout_logp")}


def since_version(columns, first=0, of=1):
    count = columns["train_logp"].numel()
    return columns | {"versions": first + torch.arange(count).view_as(columns["train_logp"]) % of}


def one_sequence(**changes):
    one = Model(0, sequences=1).healthy()
    return one | {name: made(one["train_logp"]) for name, made in changes.items()}


# A name; columns; the findings as "name severity", all of them in order, or with "..." at the end the first ones, or
# with "!" one that is not there; and what the first one says, or with "!" does not.
ROWS = [
    ("three bugs, by severity and then by strength", three_bugs, "shifted error, nonfinite error, bfloat16 note"),
    ("one sequence", one_sequence, ""),
    ("one token", partial(one_sequence, cu_seqlens=lambda x: torch.tensor([0, 1])), ""),
    ("all invalid", partial(one_sequence, mask=torch.zeros_like), "empty error"),
    ("all NaN", partial(one_sequence, train_logp=lambda x: x * math.nan), "nonfinite error"),
    # --- padding
    ("20 late", partial(with_zeros_at_the_ends, 20, sure=1.3), "padding error",
     "ends with 20 tokens .* the mask is too long, or 20 tokens late"),
    ("20 early", partial(with_zeros_at_the_ends, 20, left=True), "padding error",
     "begins with 20 tokens .* or 20 tokens early"),
    ("4 late", partial(with_zeros_at_the_ends, 4), "padding error"),
    ("3 late, or certain", partial(with_zeros_at_the_ends, 3), "padding note",
     "the mask is too long, or .* certain of an end-of-sequence token", "if they are padding", "nothing is wrong"),
    ("certain tokens anywhere", partial(with_zeros_at_the_ends, 1, sure=3.0), "!padding"),
    ("5 late in half of the rows", partial(with_zeros_at_the_ends, 1, every=2), "!padding"),
    ("any number at the ends", partial(with_zeros_at_the_ends, 1, at_once=5), "!padding"),
    ("-100 on the left", partial(dumps.padded, 0, left=True, value=-100.0), "padding error",
     "are exactly -100 on both sides, at the beginnings of rows"),
    ("-100 behind its mask", partial(dumps.padded, 0, value=-100.0, hidden=True), ""),
    # --- how far apart
    ("near, of one version", lambda: since_version(dumps.updated(0, 0.5)), "different_policies warning",
     "all tokens are of version 0: there is nothing to compare", "!Dump versions"),
    ("impossible to the trainer", partial(impossible, "train"), "filled error",
     r"the train log-probs call 3\.\d* % of the tokens impossible", "logits that were masked"),
    ("impossible to the engine", partial(impossible, "rollout"), "filled error", "the rollout log-probs call "),
    ("gathered at the next place, between blanks", next_place, "wrong_weights error", "gathered at the wrong logits"),
    ("top-k of a nearly even policy", nearly_even, "renormalized error ..."),
    ("top-k takes most from unsure first tokens",
     lambda: dumps.renormalized(0, top_k=2, certainty=lambda position, owner: torch.where(position < 1, 0.1, 4.0)),
     "renormalized error"),
    # --- temperatures
    ("1.3, since some version", lambda: since_version(dumps.temperature(0, 1.3, 1.3, 1.0), 3, 4), "temperature warning",
     "more confident since version 3 looks the same: compare tokens of the current version"),
    ("some sequences at 0.6", partial(every_eighth_at, 0.6), "outliers warning ...",
     r"there a temperature explains 100 % of it: .* about 0\.\d\d \(0\.5\d to 0\.6"),
    # --- penalties
    ("a penalty without ids", lambda: {n: x for n, x in dumps.penalized(0, 1.0).items() if n != "token_ids"},
     "!penalties"),
    ("a penalty and a shift", lambda: (c := dumps.penalized(0, 1.5)) | {"rollout_logp": c["rollout_logp"].roll(1)},
     "shifted error"),
    ("a factor, which repeated tokens feel least",
     lambda: (c := dumps.penalized(0, 0.0)) | {"train_logp": 0.5 * c["train_logp"]}, "!penalties"),
    # --- where
    ("first tokens of some sequences", partial(off_throughout, lambda model: model.position == 0),
     "sequence_starts error ..."),
    ("sequences that are off from their first token on", partial(off_throughout, lambda model: model.position >= 0),
     "outliers warning ..."),
    ("a window: first turns that are as long are off as well",
     partial(conversation, lambda model, turn: model.position >= 60), "!turn_starts"),
    ("later turns", partial(conversation, lambda model, turn: turn), "turn_starts error",
     "other text stands between turns"),
    ("later turns, or late positions", growing_turns, "turn_starts error ...",
     "or late positions: no first turn reaches as far", "a sliding window"),
    ("a shift of later turns", shifted_turns, "shifted error", "1 token late in later turns", "turns after the first"),
    # --- order and scale
    ("five late", partial(dumps.reordered, 0, lambda row: row.roll(5)), "reordered error"),
    ("short rows in another order", partial(shuffled, 16), "swapped error ...", "over the first 12 tokens"),
    ("shorter rows in another order", partial(shuffled, 8), "wrong_weights error ...", "list their sequences in one or",
     "no shift fits better; other sequences were not compared: these are shorter than 12 tokens, or a single one"),
    ("short rows of other weights", lambda: in_rows(dumps.other_weights(0)), "wrong_weights error ..."),
    ("one unsure token in each sequence", one_unsure_token, "!swapped"),
    ("a few multiples under top-k", multiples_under_top_k, "renormalized error"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_is_found_in_a_dump(row):
    _, make, wanted, *says = row
    found = diagnose(measured(make()))
    shown = ", ".join(f"{one.name} {one.severity}" for one in found)
    if wanted.startswith("!"):
        assert wanted[1:] not in shown
    elif wanted.endswith(" ..."):
        assert shown.startswith(wanted[:-4])
    else:
        assert shown == wanted
    shows(found, says)


@pytest.mark.parametrize(("length", "tested"), [(2, 0), (10, 16)])
def test_short_sequences_are_tested_for_a_shift_together(length, tested):
    """Moved by one within each sequence; pairs that reached into the next one would spoil the fit."""
    logp = -torch.rand(16 * length, generator=torch.Generator().manual_seed(0))
    moved = logp.view(16, length).roll(1, 1).flatten()
    found = measured({"train_logp": logp, "rollout_logp": moved, "lengths": torch.full((16,), length)}).evidence.pairing
    assert found.paired == found.shifted[-1] == tested


def test_two_passes_with_the_same_weights_have_to_agree():
    """The numbers cannot tell whether two passes used the same weights; --on-policy does."""
    apart = measured(dumps.three(0, 0.03, 0.03))
    assert diagnose(apart) == []
    assert [finding.name for finding in diagnose(apart, on_policy=True)] == ["trainer_disagrees"]
    assert diagnose(measured(dumps.three(0, 0.03, 0.0)), on_policy=True) == []


def test_padding_is_counted(tmp_path, capsys):
    """A padded batch without its mask is not healthy; a column that may be the mask is named."""
    columns, hidden = dumps.padded(0), dumps.padded(0, hidden=True)
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


def test_a_dump_that_brings_the_mass_kept_is_healthy(tmp_path):
    """Through rc.dump and both kinds of reader: log_mass is taken from the trainer's log-probs."""
    made = dumps.renormalized(0, with_mass=True, top_p=0.8)
    batch = rc.Batch(cu_seqlens=made.pop("cu_seqlens"), kept_mass=rc.KeptMass(made.pop("log_mass")))
    logps = made.pop("train_logp"), made.pop("rollout_logp")
    for path in (tmp_path / "x.jsonl", tmp_path / "folder"):
        rc.dump(path, *logps, batch, sequences=None, **made).result()
        measurement = measure(Dump(path))
        assert diagnose(measurement) == []
        by_call = rc.correct(*logps, batch).metrics()
        assert measurement.metrics()["ratio_mean"] == pytest.approx(by_call["ratio_mean"], rel=1e-6)


def test_files_of_a_rank_are_told(tmp_path):
    for rank in range(4):
        torch.save(dumps.shifted(rank, int(rank == 2), sequences=20), tmp_path / f"{rank}.pt")
    (found,) = rc.doctor(tmp_path).findings
    assert found.title.endswith("in 25 % of the sequences: one rank or replica of several? (they are whole files)")


@pytest.mark.parametrize(("steps", "named"), [((3, 7), "step {}"), ((3, 3), "ranks/{}.pt"), ((), "ranks/{}.pt")])
def test_records_of_several_files_are_told_apart(steps, named, tmp_path, monkeypatch, capsys):
    """By their steps; by their files, where ranks wrote one step or the dump has no steps."""
    dump = dumps.off_tokens(0, 15.0, count=1)
    monkeypatch.chdir(tmp_path)
    Path("ranks").mkdir()
    for i in (3, 7):
        torch.save(dump | {"steps": torch.full((300,), steps[i == 7])} if steps else dump, f"ranks/{i}.pt")
    assert main(["doctor", "ranks"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"3 of {named.format(i)} (50 % of k3" in said for i in (3, 7))


def temperatures(seeds, engines=(0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.3)):
    """The interval of the temperature in dumps of three sharpnesses, of engines in bfloat16 and in int8."""
    for sure, noise, engine, seed in itertools.product((0.6, 1.3, 2.2), (0.03, 0.1), engines, seeds):
        model = Model(seed, noise=noise, sure=sure)
        found = measured(model.sampled(model.logits, (model.engine / engine).log_softmax(1)))
        yield engine, found.evidence.sharpness.found()


def test_a_temperature_is_estimated_with_its_error():
    """The interval holds the truth and is narrow."""
    for engine, found in temperatures(range(200, 201), (0.7, 1.3)):
        low, high = found.interval()
        assert low <= engine <= high and high - low < 0.12 and found.share > 0.7


@pytest.mark.slow
def test_the_interval_of_a_temperature_holds_it_in_95_of_100_dumps():
    """Of 210 dumps, on seeds that no threshold was set on."""
    inside = [found.interval()[0] <= engine <= found.interval()[1] for engine, found in temperatures(range(300, 305))]
    assert len(inside) == 210 and sum(inside) >= 0.95 * len(inside)


# --- raw log-probs ----------------------------------------------------------------------------------------------------


def sampled_at(temperature, seed=1, times=1):
    """A batch of raw log-probs and their entropies, sampled at a temperature; the same sequences so many times."""
    model = Model(seed, sequences=40, median=50)
    entropy = -(model.logits.softmax(1) * model.logits.log_softmax(1)).sum(1)
    sampled = model.sample((model.engine / temperature).log_softmax(1))
    logps = (at(logits.log_softmax(1), sampled).repeat(times) for logits in (model.logits, model.engine))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), model.lengths.repeat(times).cumsum(0)])
    return *logps, rc.Batch(cu_seqlens=offsets, entropy=entropy.repeat(times))


def named(train, rollout, batch):
    return [f"{one.name} {one.severity}" for one in rc.doctor(train, rollout, batch).findings]


def test_raw_log_probs_are_a_note_where_a_selection_of_answers_looks_the_same():
    """A temperature of 0.9 in 40 sequences was called healthy; more of the same data made no difference."""
    train, rollout, batch = sampled_at(0.9)
    (note,) = rc.doctor(train, rollout, batch).findings
    assert "or the likelier ones of several answers were kept" in note.title
    assert named(train, rollout, batch) == named(*sampled_at(0.9, times=10)) == ["raw_log_probs note"]
    assert named(*sampled_at(1.0)) == named(*sampled_at(1.0, times=10)) == []
    unseen = rc.doctor(train, rollout, cu_seqlens=batch.cu_seqlens)
    assert unseen.healthy and "add `entropy`, or let the engine return" in " ".join(str(unseen).split())


@pytest.mark.parametrize("groups", [rc.Groups(size=4), rc.Groups(index=torch.arange(40) % 8)])
def test_raw_log_probs_are_a_warning_where_no_answer_of_a_group_is_missing(groups, tmp_path):
    train, rollout, batch = sampled_at(0.9)
    whole = replace(batch, groups=groups)
    rc.dump(tmp_path / "x.jsonl", train, rollout, whole, sequences=None).result()
    for diagnosis in (rc.doctor(train, rollout, whole), rc.doctor(tmp_path / "x.jsonl")):
        (warning,) = diagnosis.findings
        assert (warning.name, warning.severity) == ("raw_log_probs", "warning")
        assert warning.evidence[1] == "all groups have the same number of answers, so none was selected"
    index = torch.arange(40) // 4
    index[:2] = 9
    assert named(train, rollout, replace(batch, groups=rc.Groups(index=index))) == ["raw_log_probs note"]


@pytest.mark.parametrize(("temperature", "seed"), [(0.7, 2), (0.85, 3), (0.9, 1), (1.0, 4)])
def test_warnings_and_doctor_say_the_same_of_raw_log_probs(temperature, seed):
    """Both take the error over sequences; warnings() took that over tokens, up to 3 times smaller."""
    train, rollout, batch = sampled_at(temperature, seed)
    # Where sequences differ in temperature, their errors do not average out over tokens.
    own = torch.arange(40).repeat_interleave(batch.cu_seqlens.diff())
    shift = 0.25 * torch.randn(40, generator=torch.Generator().manual_seed(seed))[own]
    batch = replace(batch, entropy=(batch.entropy + shift).clamp(min=0.0))
    warned = any("the mean entropy is" in said for said in rc.correct(train, rollout, batch).warnings())
    assert warned == ("raw_log_probs warning" in named(train, rollout, batch))


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


def test_a_gate_replaces_the_default(tmp_path, capsys):
    moved, healthy, masked = (str(tmp_path / f"{name}.pt") for name in ("moved", "healthy", "masked"))
    torch.save(dumps.shifted(0, 1), moved)
    torch.save(Model(0).healthy(), healthy)
    assert main(["doctor", moved, "--fail-if", "tokens < 10"]) == 0
    assert main(["doctor", moved, "--fail-if", "tokens < 10", "--fail-if", "shifted == 1"]) == 1
    assert main(["doctor", healthy, "--fail-if", "logratio_abs_p99 > 1e-3"]) == 1
    assert main(["doctor", healthy, "--fail-if", "problems > 0 or findings > 0"]) == 0
    capsys.readouterr()
    assert main(["doctor", healthy, "--fail-if", "kl_rollout_train_k33 > 1"]) == 2
    assert "did you mean 'kl_rollout_train_k3'" in capsys.readouterr().err
    # A dump that is masked everywhere does not pass a gate as healthy.
    torch.save(dumps.masked_everywhere(0), masked)
    for more in ([], ["--fail-if", "kl_rollout_train_k3 > 1"], ["--json"]):
        assert main(["doctor", masked, *more]) == 2
        text = capsys.readouterr().out
        assert "no valid token" in text and "healthy:" not in text
