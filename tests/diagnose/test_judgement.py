"""What doctor claims, and how surely: by the size of the mismatch, by where it is, and by what was tested."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders import planted_dumps, planted_mixes
from builders.diagnose_cases import causes_of, measured
from builders.planted_dumps import VOCABULARY, Model, at
from rollout_corr.diagnose.doctor.diagnosis import diagnose

pytestmark = pytest.mark.usefixtures("one_thread")


def found_in(columns):
    return diagnose(measured(columns))


def first_of(columns):
    return found_in(columns)[0]


# --- raw log-probs ----------------------------------------------------------------------------------------------------


def sampled_at(temperature, sequences=40, seed=1):
    """A batch of raw log-probs and their entropies, sampled at a temperature."""
    model = Model(seed, sequences=sequences, median=50)
    sampled = model.sample((model.engine / temperature).log_softmax(1))
    train, rollout = model.logits.log_softmax(1), model.engine.log_softmax(1)
    made = model.columns(sampled, train, rollout, entropy=-(train.exp() * train).sum(1))
    batch = rc.Batch(cu_seqlens=made["cu_seqlens"], entropy=made["entropy"])
    return made["train_logp"], made["rollout_logp"], batch


def tiled(logps, batch, times):
    """The same sequences so many times."""
    offsets = batch.cu_seqlens
    return (
        *(x.repeat(times) for x in logps),
        rc.Batch(
            cu_seqlens=torch.cat([offsets[:1], *(offsets[1:] + i * offsets[-1] for i in range(times))]),
            entropy=batch.entropy.repeat(times),
        ),
    )


def named(train, rollout, batch):
    return [(one.name, one.severity) for one in rc.doctor(train, rollout, batch).findings]


def test_raw_log_probs_are_a_note_where_a_selection_of_answers_looks_the_same():
    """A temperature of 0.9 in 40 sequences was called healthy; more of the same data made no difference."""
    train, rollout, batch = sampled_at(0.9)
    assert named(train, rollout, batch) == [("raw_log_probs", "note")]
    (note,) = rc.doctor(train, rollout, batch).findings
    assert "or the likelier ones of several answers were kept" in note.title
    assert named(*tiled((train, rollout), batch, 10)) == [("raw_log_probs", "note")]
    assert named(*sampled_at(1.0)) == named(*tiled(sampled_at(1.0)[:2], sampled_at(1.0)[2], 10)) == []


@pytest.mark.parametrize("groups", [rc.Groups(size=4), rc.Groups(index=torch.arange(40) % 8)])
def test_raw_log_probs_are_a_warning_where_no_answer_of_a_group_is_missing(groups, tmp_path):
    train, rollout, batch = sampled_at(0.9)
    whole = rc.Batch(cu_seqlens=batch.cu_seqlens, entropy=batch.entropy, groups=groups)
    rc.dump(tmp_path / "x.jsonl", train, rollout, whole, sequences=None).result()
    for diagnosis in (rc.doctor(train, rollout, whole), rc.doctor(tmp_path / "x.jsonl")):
        (warning,) = diagnosis.findings
        assert (warning.name, warning.severity) == ("raw_log_probs", "warning")
        assert warning.evidence[1] == "all groups have the same number of answers, so none was selected"
    index = torch.arange(40) // 4
    index[:2] = 9
    missing = rc.Batch(cu_seqlens=batch.cu_seqlens, entropy=batch.entropy, groups=rc.Groups(index=index))
    assert named(train, rollout, missing) == [("raw_log_probs", "note")]


@pytest.mark.parametrize(("temperature", "seed"), [(0.7, 2), (0.85, 3), (0.9, 1), (1.0, 4)])
def test_warnings_and_doctor_say_the_same_of_raw_log_probs(temperature, seed):
    """Both take the error over sequences; warnings() took that over tokens, up to 3 times smaller."""
    train, rollout, batch = sampled_at(temperature, seed=seed)
    # Where sequences differ in temperature, their errors do not average out over tokens.
    own = torch.arange(40).repeat_interleave(batch.cu_seqlens.diff())
    shift = 0.25 * torch.randn(40, generator=torch.Generator().manual_seed(seed))[own]
    batch = rc.Batch(cu_seqlens=batch.cu_seqlens, entropy=(batch.entropy + shift).clamp(min=0.0))
    warned = any("the mean entropy is" in said for said in rc.correct(train, rollout, batch).warnings())
    assert warned == (("raw_log_probs", "warning") in named(train, rollout, batch))


# --- how far apart ----------------------------------------------------------------------------------------------------


def test_policies_that_are_far_apart_are_not_called_stale():
    """Beyond a k3 of 0.1 the model is broken, and `what-if` is no advice."""
    near, far = first_of(planted_dumps.updated(0, 0.5)), first_of(planted_dumps.updated(0, 1.5))
    assert (near.name, far.name) == ("different_policies", "different_policies")
    assert near.numbers["kl_rollout_train_k3"] < 0.1 < far.numbers["kl_rollout_train_k3"]
    assert "staleness or low precision are the usual causes" in near.title and "what-if" in near.advice
    assert "a LoRA adapter at another scale, a layer that was not sent" in near.advice
    assert "further apart than staleness or low precision usually explains" in far.title
    assert "attention mask and packing" in far.advice and "what-if" not in far.advice


@pytest.mark.parametrize(("side", "sign"), [("train", 1.0), ("rollout", -1.0)])
def test_tokens_that_one_policy_calls_impossible(side, sign):
    """Logits of -1e4 where a mask of top-k excludes the token: no value repeats, and they are too many for outliers."""
    model = Model(0)
    columns = model.healthy()
    some = model.uniform(model.count) < 0.04
    columns[f"{side}_logp"] -= 1e4 * (1.0 + model.uniform(model.count)) * some
    (found,) = found_in(columns)
    assert (found.name, found.severity, found.numbers["tokens"]) == ("filled", "error", int(some.sum()))
    assert found.title.startswith(f"the {side} log-probs call ") and "logits that were masked" in found.advice


def test_another_model_calls_no_token_impossible():
    """Its log-probs are far off everywhere, some by more than 50 nats."""
    columns = planted_dumps.other_weights(0)
    assert ((columns["train_logp"] - columns["rollout_logp"]).abs() > 50.0).double().mean() > 1e-3
    assert causes_of(columns) == ["wrong_weights"]


def test_truncation_makes_no_token_very_unlikely():
    """Ids of the vocabulary's second half gathered 16 rows later: ratios average below 1, and few D are positive."""
    model = Model(0)
    rollout = model.engine.log_softmax(1)
    sampled = model.sample(rollout)
    later = torch.where(sampled < VOCABULARY // 2, sampled, VOCABULARY // 2 + (sampled + 16) % (VOCABULARY // 2))
    columns = model.columns(sampled, model.logits.log_softmax(1), rollout)
    columns["train_logp"] = at(model.logits.log_softmax(1), later)
    (found,) = found_in(columns)
    assert found.name == "different_policies" and "further apart" in found.title


def test_a_flat_policy_is_no_constant():
    """A norm whose epsilon is too large: the trainer is even over the vocabulary, and the engine is sure."""
    model = Model(0, sure=3.0)
    rollout = model.engine.log_softmax(1)
    sampled = model.sample(rollout)
    columns = model.columns(sampled, (0.002 * model.logits).log_softmax(1), rollout)
    assert "renormalized" not in causes_of(columns)


def test_a_truncation_of_a_nearly_even_policy_is_no_multiple():
    """Log-probs hardly vary on either side, so a constant explains as well as a factor."""
    model = Model(0, sure=-4.0)
    rollout = planted_dumps.truncated(model.engine, top_k=20)
    found = first_of(model.columns(model.sample(rollout), model.logits.log_softmax(1), rollout))
    assert (found.name, found.severity) == ("renormalized", "error")


@pytest.mark.parametrize(("noise", "severity"), [(0.0, "error"), (0.5, "warning")])
def test_a_temperature_is_an_error_where_it_explains_the_mismatch(noise, severity):
    """One that explains a part stands behind what explains the rest."""
    model = Model(0)
    rollout = model.engine.log_softmax(1)
    other = model.logits / 0.75 + noise * model.normal(model.count, VOCABULARY)
    found = found_in(model.columns(model.sample(rollout), other.log_softmax(1), rollout))
    by_name = {one.name: one for one in found}
    assert by_name["temperature"].severity == severity
    assert (by_name["temperature"].numbers["explained"] > 0.85) == (severity == "error")
    assert [one.name for one in found] == ["different_policies"] * (noise > 0.0) + ["temperature"]


def test_a_part_of_nearly_nothing_is_no_temperature():
    """An old head: k3 is a tenth of what is healthy, and D follows the log-prob a little."""
    model = Model(0, sequences=200, noise=0.01)
    rollout = model.engine.log_softmax(1)
    other = model.logits * 1.02 + 0.03 * model.normal(model.count, VOCABULARY)
    columns = model.columns(model.sample(rollout), other.log_softmax(1), rollout)
    one = measured(columns)
    assert 0.3 < one.evidence.sharpness.found().share < 0.85 and one.metrics()["kl_rollout_train_k3"] < 1e-3
    assert diagnose(one) == []


# --- penalties --------------------------------------------------------------------------------------------------------


def test_penalties_are_not_named_next_to_what_explains_them():
    """Rows of one side in another order, and a temperature: repeated tokens are likelier than others in both."""
    columns = planted_mixes.penalized(0, 1.5)
    for name, change in (("shifted", lambda x: x.roll(1)), ("not_log_probs", lambda x: -x)):
        assert causes_of(columns | {"rollout_logp": change(columns["rollout_logp"])}) == [name]
    cooler = planted_mixes.penalized(0, 0.0)
    model = Model(0)
    assert model.count == len(cooler["train_logp"])
    assert "penalties" not in causes_of(cooler | {"train_logp": cooler["train_logp"] * 0.5})


def test_a_penalty_lifts_what_it_does_not_lower():
    """Another prompt lowers the trainer's log-probs of first tokens, which repeat least."""
    model = Model(0, sequences=60)
    columns = model.healthy()
    seen = torch.zeros(len(model.lengths), VOCABULARY, dtype=torch.bool)
    repeated = torch.zeros(model.count, dtype=torch.bool)
    for i, (row, token) in enumerate(zip(model.owner.tolist(), columns["token_ids"].tolist(), strict=True)):
        repeated[i] = seen[row, token]
        seen[row, token] = True
    columns["train_logp"] -= 0.15 * ~repeated
    rollout = columns["rollout_logp"]
    for lifted in (0.01, 0.07):
        columns["rollout_logp"] = rollout - lifted * repeated
        assert ("penalties" in causes_of(columns)) == (lifted > 0.05)


# --- where ------------------------------------------------------------------------------------------------------------


def conversations(seed=0, sequences=80):
    """Two turns of any lengths with a masked tool between them: the model, and per token its turn."""
    model = Model(seed, sequences=sequences, median=120)
    cut = (model.lengths * (0.2 + 0.6 * model.uniform(sequences))).long()
    turn = (model.position >= cut[model.owner]).long()
    mask = (model.position < cut[model.owner]) | (model.position >= cut[model.owner] + 8)
    return model, turn, mask


def with_other_logits(model, mask, where, noise=2.0):
    """Another policy of the trainer where it is asked for."""
    other = model.logits + noise * where[:, None] * model.normal(model.count, VOCABULARY)
    rollout = model.engine.log_softmax(1)
    return model.columns(model.sample(rollout), other.log_softmax(1), rollout, mask=mask)


def test_late_positions_are_not_called_later_turns():
    """A sliding window in the trainer alone: first turns that are as long are off as well."""
    model, _, mask = conversations()
    assert "turn_starts" not in causes_of(with_other_logits(model, mask, model.position >= 60))


def test_the_second_half_of_sequences_is_not_called_later_turns():
    """Sequence-parallel ranks of which the second has other values."""
    model, _, mask = conversations()
    assert "turn_starts" not in causes_of(
        with_other_logits(model, mask, 2 * model.position >= model.lengths[model.owner])
    )


def test_later_turns_are_compared_at_one_place():
    model, turn, mask = conversations()
    (found,) = found_in(with_other_logits(model, mask, turn == 1))
    assert found.name == "turn_starts" and "other text stands between turns" in found.title


def test_later_turns_that_no_first_one_reaches_may_be_late_positions():
    """All first turns are short: doctor says both, and does not hide `positions`."""
    model = Model(0, sequences=60, median=200)
    mask = (model.position < 12) | (model.position >= 200)
    growing = (model.position >= 200) * (1.0 + (model.position - 200.0).clamp(min=0.0) / 100.0)
    found = found_in(with_other_logits(model, mask, growing, 1.0))
    assert found[0].name == "turn_starts" and "or late positions: no first turn reaches as far" in found[0].title
    assert "a sliding window" in found[0].advice


def test_one_rank_is_guessed_where_sequences_lie_as_ranks_do():
    """Every eighth sequence, a block of them, whole files; scattered ones are in some sequences."""
    said = "1 token late in 12.5 % of the sequences"
    titles = []
    for block in (False, True):
        titles.append(first_of(planted_mixes.part(0, planted_mixes.shift, block=block)).title)
    assert titles[0].endswith(
        f"{said}: one rank or replica of several? (they are the records whose number modulo 8 is 5)"
    )
    assert titles[1].endswith(f"{said}: one rank or replica of several? (they are one block, 50 to 59)")
    scattered = first_of(planted_dumps.shifted(0, 1, 0.33)).title
    assert "in 3" in scattered and "rank" not in scattered


def test_files_of_a_rank_are_told(tmp_path):
    for rank in range(4):
        torch.save(planted_dumps.shifted(rank, int(rank == 2), sequences=20), tmp_path / f"{rank}.pt")
    (found,) = rc.doctor(tmp_path).findings
    assert found.title.endswith("in 25 % of the sequences: one rank or replica of several? (they are whole files)")


def test_a_shift_of_later_turns_alone_is_named():
    """A turn is moved within itself: over whole sequences no shift fits."""
    model, turn, mask = conversations()
    columns = model.healthy(mask=mask)
    rolled = columns["rollout_logp"].roll(1)
    columns["rollout_logp"] = torch.where(turn == 1, rolled, columns["rollout_logp"])
    found = first_of(columns)
    assert (found.name, found.title) == ("shifted", "the rollout log-probs are 1 token late in later turns")
    assert "turns after the first" in found.evidence[0]


def test_two_groups_and_a_temperature_of_some_sequences():
    """Every eighth sequence is sampled at 0.6, and the trainer divides by 1."""
    model = Model(0, sequences=80)
    some = (model.owner % 8 == 3)[:, None]
    rollout = torch.where(some, model.engine / 0.6, model.engine).log_softmax(1)
    found = first_of(model.columns(model.sample(rollout), model.logits.log_softmax(1), rollout))
    assert found.name == "outliers"
    (said,) = (one for one in found.evidence if one.startswith("there a temperature explains 100 % of it"))
    low, high = map(float, re.search(r"\(([\d.]+) to ([\d.]+)\)", said).groups())
    assert low < 0.6 < high < 0.65
    bad = first_of(planted_mixes.part(0, planted_mixes.bad_replica))
    assert not any("temperature" in one for one in bad.evidence)


# --- order ------------------------------------------------------------------------------------------------------------


def five_late(row):
    return row.roll(5)


@pytest.mark.parametrize("order", [planted_dumps.zigzag, planted_dumps.chunks_reversed, five_late])
def test_log_probs_in_another_order_are_named(order):
    """They were other weights."""
    (found,) = found_in(planted_dumps.reordered(0, order))
    assert (found.name, found.severity, found.numbers["sequences"]) == ("reordered", "error", 40)


def test_other_weights_are_no_other_order():
    for seed in range(3):
        for make in (planted_dumps.other_weights, planted_dumps.untrained_head, planted_dumps.coarse):
            assert "reordered" not in causes_of(make(seed))


def shuffled(seed, length, rows=256):
    """Rows of one side in another order, too short for the test of long ones."""
    model = Model(seed, sequences=rows, median=length)
    columns = model.healthy()
    short = [row[:length] for row in columns["rollout_logp"].split(model.lengths.tolist())]
    own = [row[:length] for row in columns["train_logp"].split(model.lengths.tolist())]
    order = torch.randperm(rows, generator=model.generator).tolist()
    # Every row has as many tokens.
    return {"train_logp": torch.stack(own), "rollout_logp": torch.stack([short[i] for i in order])}


def test_short_rows_in_another_order_are_named():
    """They were called wrong weights, and "no other sequence fits better" without a look."""
    found = first_of(shuffled(0, 16))
    assert found.name == "swapped" and "over the first 12 tokens" in found.evidence[0]
    for make in (planted_dumps.other_weights, planted_dumps.coarse):
        columns = make(0)
        rows = [columns[name][: 16 * 200].view(200, 16) for name in ("train_logp", "rollout_logp")]
        assert causes_of(dict(zip(("train_logp", "rollout_logp"), rows, strict=True)))[:1] == ["wrong_weights"]


def test_what_was_not_tested_is_not_claimed():
    found = first_of(shuffled(0, 8))
    assert found.name == "wrong_weights" and "both sides list their sequences in one order" in found.advice
    assert found.evidence[-1] == (
        "no shift fits better; other sequences were not compared: these are shorter than 12 tokens, or a single one"
    )
    assert first_of(planted_dumps.other_weights(0)).evidence[-1] == "no shift and no other sequence fits better"


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, -100.0])
@pytest.mark.parametrize("left", [False, True])
def test_padding_with_any_value_is_named(value, left):
    """Only exact zeros were found: k3 was too small, and nothing was said."""
    filled = planted_dumps.padded(0, left=left, value=value)
    (found,) = found_in(filled)
    assert (found.name, found.severity, found.numbers["value"]) == ("padding", "error", value)
    assert f"are exactly {value:g} on both sides, at the {'beginnings' if left else 'ends'} of rows" in found.title
    assert causes_of(planted_dumps.padded(0, left=left, value=value, hidden=True)) == []


# --- the trainer and itself -------------------------------------------------------------------------------------------


def test_a_trainer_that_differs_from_itself_is_named():
    """Dropout: two passes are as far from one another as from the engine. After learning the second is further."""
    (found,) = found_in(planted_dumps.three(0, 0.03, 0.6, 0.6))
    assert (found.name, found.severity) == ("trainer_varies", "warning") and "dropout" in found.title
    for learned in (0.6, 1.0, 2.0):
        assert causes_of(planted_dumps.three(0, 0.6, learned)) == ["different_policies"]
    assert causes_of(planted_dumps.three(0, 0.6, 0.005, 0.005)) == ["engine_alone"]
    assert causes_of(planted_dumps.three(0, 0.03, 0.05, 0.05)) == []
