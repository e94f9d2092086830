"""One Batch and one Loss for every call: read once, read again when a tensor changes, plain data, and 20 mistakes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from rollout_corr.backends import batch as reading
from rollout_corr.backends import read, turns
from rollout_corr.backends.batch import OpenBatch
from rollout_corr.backends.given import batch_given
from rollout_corr.specs.surrogates import OF_BATCH, SURROGATES

N = 12
OFFSETS = torch.tensor([0, 5, 5, N])
TRAIN, ROLLOUT = -torch.rand(N), -torch.rand(N)
MASK = torch.arange(N) % 4 != 3
SPEC = rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(rc.Criterion("k1", over="turn", reduce="mean", upper=1.0),))
SPEC_OF_TOKENS = rc.Spec(weight=SPEC.weight, criteria=(rc.Criterion("k1", upper=1.0),))


def full_batch(**changes):
    held = {
        "mask": MASK.clone(),
        "cu_seqlens": OFFSETS.clone(),
        "turns": torch.tensor([0, 2, 5, N]),
        "kept_mass": rc.KeptMass(-torch.rand(N)),
        "groups": rc.Groups(index=torch.tensor([0, 1, 0])),
    }
    return rc.Batch(**held | changes)


def both_calls(batch):
    out = rc.correct(TRAIN, ROLLOUT, batch, spec=SPEC)
    loss = rc.policy_loss(TRAIN, torch.ones(3), batch, old_logp=TRAIN, correction=out)
    return out, loss


def test_two_calls_and_a_dump_read_a_batch_once(tmp_path):
    batch = full_batch()
    with (
        mock.patch.object(reading, "checked_offsets", wraps=reading.checked_offsets) as offsets,
        mock.patch.object(turns, "checked_offsets", wraps=turns.checked_offsets) as of_turns,
        mock.patch.object(read, "_check_mass", wraps=read._check_mass) as mass,
    ):
        both_calls(batch)
        rc.suggest(TRAIN, ROLLOUT, rc.Batch(cu_seqlens=batch.cu_seqlens))
        assert offsets.call_count == 2
        both_calls(batch)
        rc.dump(tmp_path / "x.jsonl", TRAIN, ROLLOUT, batch).result()
        assert (offsets.call_count, mass.call_count) == (2, 1)
        assert of_turns.call_count == 2  # the dump numbers the tokens of turns
        both_calls(full_batch())
        assert (offsets.call_count, mass.call_count) == (3, 2)


def test_a_tensor_that_is_written_to_is_read_again():
    batch = full_batch(turns="runs", kept_mass=None)
    first = both_calls(batch)[0]
    batch.cu_seqlens[1:3] = 7
    batch.mask[:2] = False
    found, expected = (
        both_calls(b)[0] for b in (batch, rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens, turns="runs"))
    )
    for name in ("weights", "mask", "keep", "turns"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert not torch.equal(first.turns, found.turns)
    batch.cu_seqlens[-1] = N + 1
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        both_calls(batch)


def test_a_tensor_that_lies_elsewhere_is_read_again():
    batch = full_batch(turns="runs")
    both_calls(batch)
    batch.cu_seqlens.data = torch.tensor([0, 7, 7, N])
    assert torch.equal(both_calls(batch)[0].turns, both_calls(replace(batch))[0].turns)


def test_writes_that_torch_does_not_count_reach_nothing_that_was_checked():
    batch = full_batch()
    first = both_calls(batch)[0]
    for x in (batch.cu_seqlens, batch.turns, batch.groups.index):
        x.data[1] = 10**9
    batch.cu_seqlens.numpy()[2] = -(10**9)
    found = both_calls(batch)[0]
    assert torch.equal(found.weights, first.weights)
    assert torch.equal(found.turns, first.turns)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        both_calls(replace(batch))


def test_a_result_that_is_written_to_is_no_part_of_the_batch():
    for kind in ("runs", torch.tensor([0, 2, 5, N])):
        batch = full_batch(turns=kind)
        first = both_calls(batch)[0].turns
        expected = first.clone()
        first.fill_(-1)
        assert torch.equal(both_calls(batch)[0].turns, expected)


def test_lists_and_nested_tensors_of_other_lengths_have_other_turns():
    def cut(x, i, nested):
        parts = [x[:i], x[i:]]
        return torch.nested.nested_tensor(parts, layout=torch.jagged) if nested else parts

    for nested in (False, True):
        batch = rc.Batch(turns="runs")
        for i in (5, 7):
            out = rc.correct(cut(TRAIN, i, nested), cut(ROLLOUT, i, nested), batch)
            assert out.turns.tolist() == [0, i, N]


def test_copies_of_a_batch_keep_nothing_that_was_read():
    batch = full_batch()
    batch.mask.logical_and_(batch.mask)
    both_calls(batch)
    for copied in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert copied._read == {}
        assert torch.equal(both_calls(copied)[0].weights, both_calls(batch)[0].weights)


def test_what_inference_mode_reads_serves_a_loss_outside():
    batch = full_batch(cu_seqlens=OFFSETS.int(), turns="runs", groups=rc.Groups(size=3))
    with torch.inference_mode():
        rc.correct(TRAIN, ROLLOUT, batch, spec=SPEC)
    with mock.patch.object(reading, "checked_offsets", wraps=reading.checked_offsets) as offsets:
        out, _ = both_calls(batch)
    assert not offsets.called
    assert not out.turns.is_inference()


def test_a_stream_and_a_captured_graph_read_for_themselves():
    batch, device, streams = rc.Batch(), torch.device("cuda"), iter((1, 1, 2))
    read = mock.Mock(side_effect=lambda: torch.zeros(1))
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False) as capturing:
        with mock.patch.object(
            torch.cuda, "current_stream", side_effect=lambda _: mock.Mock(cuda_stream=next(streams))
        ):
            counts = [batch.once("x", read, device, None) is not None and read.call_count for _ in range(3)]
            assert counts == [1, 1, 2]
        capturing.return_value = True
        for count in (3, 4):
            batch.once("x", read, device, None)
            assert read.call_count == count


def test_offsets_on_the_cpu_travel_to_a_device_once():
    batch = rc.Batch(cu_seqlens=OFFSETS, turns=torch.tensor([0, 5, N]))

    def opened():
        x = torch.zeros(N, device="meta")
        return OpenBatch(x, x, None, OFFSETS, 3, lambda x: x, None, turns=batch.turns)

    first, second = opened(), opened()
    for one in (first, second):
        read.upload(one, batch)
        assert one.offsets.device.type == one.turns.device.type == "meta"
    assert first.offsets is second.offsets
    assert first.turns is second.turns
    OFFSETS[1] += 0
    third = opened()
    read.upload(third, batch)
    assert third.offsets is not first.offsets


def test_log_probs_of_another_shape_are_checked_against_the_same_batch():
    batch = rc.Batch(cu_seqlens=OFFSETS)
    rc.correct(TRAIN, ROLLOUT, batch)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        rc.correct(TRAIN[:-1], ROLLOUT[:-1], batch)
    with torch.inference_mode():
        rc.correct(TRAIN.clone(), ROLLOUT.clone(), rc.Batch(cu_seqlens=OFFSETS.clone()))
    of_rows = rc.Batch(turns="runs")
    for rows in (2, 3):
        found = rc.correct(TRAIN.view(rows, -1), ROLLOUT.view(rows, -1), of_rows).turns
        assert found.tolist() == [*range(0, N + 1, N // rows)]


def test_a_mass_is_checked_again_where_the_mask_lets_more_in():
    batch = full_batch(kept_mass=rc.KeptMass(torch.where(MASK, -0.1, 1.0)))
    rc.correct(TRAIN, ROLLOUT, batch)
    batch.mask[:] = True
    with pytest.raises(ValueError, match=r"kept_mass.log_mass: expected"):
        rc.correct(TRAIN, ROLLOUT, batch)


def test_the_short_forms_are_a_batch():
    short = rc.correct(TRAIN, ROLLOUT, mask=MASK, cu_seqlens=OFFSETS, spec=rc.Spec(weight=SPEC.weight))
    long = rc.correct(TRAIN, ROLLOUT, rc.Batch(mask=MASK, cu_seqlens=OFFSETS), spec=rc.Spec(weight=SPEC.weight))
    assert torch.equal(short.weights, long.weights)
    assert short.metrics() == long.metrics()
    made, constructed = vars(batch_given(None, MASK, OFFSETS)), vars(rc.Batch(mask=MASK, cu_seqlens=OFFSETS))
    assert made | {"_read": {}} == constructed


@pytest.mark.parametrize("kind", [list, tuple])
def test_samples_come_back_as_they_were_given(kind):
    train, rollout = (kind(x.split([5, 7])) for x in (TRAIN, ROLLOUT))
    out = rc.correct(train, rollout, spec=SPEC_OF_TOKENS)
    loss = rc.policy_loss(train, train, rollout_logp=rollout, spec=SPEC_OF_TOKENS)
    found = out.weights, out.mask, loss.weights, loss.mask, rc.future_kl_weights(train, rollout)
    assert all(type(x) is kind and [len(part) for part in x] == [5, 7] for x in found)


def test_a_loss_reads_of_a_batch_what_it_needs():
    """The batch of `correct` is that of the loss, whatever it holds."""
    batch = full_batch(versions=rc.Versions(torch.zeros(3, dtype=torch.int64), 4), sequence_ids=torch.arange(3))
    plain = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens)
    found, expected = (rc.policy_loss(TRAIN, torch.ones(3), b, old_logp=TRAIN) for b in (batch, plain))
    assert torch.equal(found.value, expected.value)
    assert found.metrics() == expected.metrics()


def test_ranks_that_compare_their_calls_hear_of_a_wrong_spec_or_loss():
    """The others wait for this rank's call."""
    batch = rc.Batch(cu_seqlens=OFFSETS, validate=True, ranks=rc.Ranks(batch=object()))
    with mock.patch.object(rc.Ranks, "tell") as told:
        for call in (
            lambda: rc.correct(TRAIN, ROLLOUT, batch, spec=3),
            lambda: rc.policy_loss(TRAIN, A, batch, 3),
            lambda: rc.policy_loss(TRAIN, A, batch, spec=3),
            lambda: rc.threshold_statistics(TRAIN, ROLLOUT, batch, spec=3),
        ):
            with pytest.raises(TypeError, match="got int") as raised:
                call()
            told.assert_called_once_with(raised.value)
            told.reset_mock()


FUNCTIONS = [name for name in rc.__all__ if inspect.isfunction(getattr(rc, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_call_has_more_than_twelve_parameters(name):
    assert len(inspect.signature(getattr(rc, name)).parameters) <= 12


# --- Loss and Mean ---

TERMS = {
    "kl": rc.KL("k3", 0.1, gradient="k2", mean=rc.Mean("sequence", over="kept")),
    "regularizer": rc.SquaredLogRatio(0.5),
    "entropy_bonus": rc.EntropyBonus(0.01),
}
LOSSES = [
    rc.Loss(),
    rc.Loss(rc.PPO(0.2, 0.28), rc.Mean("sequence_sum", length=4096.0), **TERMS),
    *(rc.Loss(kind()) for kind in (*SURROGATES, *OF_BATCH)),
    *(rc.Loss(mean=rc.Mean(of, over)) for of, over in (("sum", "original"), ("sequence", "rows"), ("token", "kept"))),
]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_loss_is_plain_data(loss):
    assert rc.Loss.from_dict(json.loads(json.dumps(loss.to_dict()))) == loss
    again = pickle.loads(pickle.dumps(loss))
    assert again == loss
    assert hash(again) == hash(loss)
    assert eval(repr(loss), vars(rc)) == loss
    assert "_hash" not in loss.__getstate__()


def test_explain_says_every_part():
    text = LOSSES[1].explain()
    for part in ("PPO(high=0.28)", "0.1 times k3", "gradient of k2", "mean of its own", "0.5 times the squared", "4096",
                 "0.01 times the entropy", "valid sequences"):  # fmt: skip
        assert part in text, part
    assert [line.partition(".")[0] for line in text.splitlines()] == ["1", "2", "3", "4", "5"]
    text = rc.Loss(mean=rc.Mean("sequence", "kept"), kl=rc.KL("k1", 1.0, scope="all")).explain()
    for part in ("its kept tokens", "of kept sequences", "is added, at valid tokens, rejected ones too"):
        assert part in text, part


# --- mistakes ---

BATCH = rc.Batch(mask=MASK, cu_seqlens=OFFSETS)
A = torch.ones(N)

MISTAKES = {
    "a mask by position": (
        lambda: rc.correct(TRAIN, ROLLOUT, MASK),
        "batch: expected rc.Batch(mask=..., cu_seqlens=...) or None, got Tensor; a mask is mask=...",
    ),
    "a dict": (lambda: rc.correct(TRAIN, ROLLOUT, {"mask": MASK}), "got dict; write rc.Batch(mask=...)"),
    "a Spec": (lambda: rc.correct(TRAIN, ROLLOUT, SPEC), "got Spec; write spec=..."),
    "a Batch and a mask": (
        lambda: rc.correct(TRAIN, ROLLOUT, BATCH, mask=MASK),
        "mask: expected None beside a Batch, got both; write rc.Batch(mask=...)",
    ),
    "a Loss as a Spec": (
        lambda: rc.correct(TRAIN, ROLLOUT, BATCH, spec=rc.Loss()),
        "spec: expected a Spec, got Loss; a Loss is loss=... of policy_loss",
    ),
    "a misspelled mask": (lambda: rc.correct(TRAIN, ROLLOUT, msk=MASK), "correct: unknown argument 'msk'"),
    "turns of a call": (
        lambda: rc.correct(TRAIN, ROLLOUT, cu_seqlens=OFFSETS, turns="runs"),
        "did you mean batch=rc.Batch(turns=...)?",
    ),
    "old_logp of a correction": (
        lambda: rc.correct(TRAIN, ROLLOUT, old_logp=TRAIN),
        "correct: unknown argument 'old_logp', expected some of",
    ),
    "a surrogate as the loss": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, rc.PPO(), old_logp=TRAIN),
        "loss: expected a rollout_corr.Loss, got PPO; write rc.Loss(PPO())",
    ),
    "a Spec as the loss": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, SPEC),
        "loss: expected a rollout_corr.Loss, got Spec; a Spec is spec=...",
    ),
    "a Loss as the batch": (lambda: rc.policy_loss(TRAIN, A, rc.Loss()), "got Loss; write loss=..."),
    "weights of a loss": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, weights=A),
        "did you mean correction=rc.Factors(weights=...)?",
    ),
    "weights as a correction": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, correction=A),
        "correction: expected what correct() gives, or rc.Factors, got Tensor; weights are rc.Factors(weights=...)",
    ),
    "a Spec as a correction": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, correction=SPEC),
        "got Spec; a Spec is spec=...",
    ),
    "a Spec beside a correction": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, old_logp=TRAIN, correction=rc.Factors(A), spec=SPEC),
        "spec: expected None beside a correction, got both",
    ),
    "a reduction": (
        lambda: rc.policy_loss(TRAIN, A, BATCH, reduction="token_mean"),
        "did you mean loss=rc.Loss(mean=rc.Mean(...))?",
    ),
    "verl's word for a mean": (
        lambda: rc.Mean("seq-mean-token-mean"),
        "got 'seq-mean-token-mean'; write Mean('sequence')",
    ),
    "a mean as a string": (
        lambda: rc.Loss(mean="token_mean"),
        "Loss.mean: expected a Mean, got str 'token_mean'; write rc.Mean('token')",
    ),
    "a length of a token mean": (
        lambda: rc.Mean("token", length=8.0),
        "Mean.length: expected None with of='token', got 8.0",
    ),
    "rows of tokens": (lambda: rc.Mean("token", over="rows"), "Mean.over: expected 'rows' with a mean over sequences"),
    "a total of a sum": (
        lambda: rc.policy_loss(TRAIN, A, rc.Batch(cu_seqlens=OFFSETS, total=3), rc.Loss(mean=rc.Mean("sum"))),
        "total: expected None with Mean('sum')",
    ),
    "a negative total": (
        lambda: rc.policy_loss(TRAIN, A, rc.Batch(cu_seqlens=OFFSETS, total=-1)),
        "total: expected a finite number >= 0",
    ),
    "a length of a KL's mean": (
        lambda: rc.KL("k3", 0.1, mean=rc.Mean("sequence_sum", length=8.0)),
        "KL.mean: expected one without a length",
    ),
    "labels that are no mapping": (lambda: rc.Batch(labels=A), "labels: expected a mapping of names to rc.Labels"),
    "a count of no groups": (
        lambda: rc.Groups(index=OFFSETS, count=0),
        "groups.count: expected an integer above 0 or None, got 0",
    ),
    "a dump of the trainer's mass": (
        lambda: rc.dump("x", TRAIN, ROLLOUT, full_batch(kept_mass=rc.KeptMass(-A, of="train"))),
        "kept_mass.of: expected 'rollout' in a dump",
    ),
    "bare versions": (
        lambda: rc.Batch(versions=A),
        "versions: expected rc.Versions(ids, current), got Tensor float32[12]",
    ),
    "a bare mass": (lambda: rc.Batch(kept_mass=A), "kept_mass: expected rc.KeptMass(log_mass"),
    "bare groups": (
        lambda: rc.Batch(groups=A),
        "groups: expected rc.Groups(index=...) or rc.Groups(size=...), got Tensor",
    ),
    "a bare process group": (lambda: rc.Batch(ranks="dp"), "ranks: expected rc.Ranks(batch=...)"),
    "bare labels": (lambda: rc.Batch(labels={"task": A}), "labels['task']: expected rc.Labels(ids, names), got Tensor"),
    "an old name of a batch": (lambda: rc.Batch(current_version=3), "did you mean versions=rc.Versions(ids, current)?"),
    "the mask of transformers": (lambda: rc.Batch(attention_mask=MASK), "did you mean mask=?"),
    "a mask of a Batch by position": (
        lambda: rc.Batch(MASK),
        "Batch: expected keywords, such as mask=..., got Tensor by position",
    ),
    "a reduction of a KL": (
        lambda: rc.KL("k3", 0.1, reduction="token_mean"),
        "KL: unknown argument 'reduction', expected some of ['kind', 'coef',",
    ),
    "a reduction of a mean": (lambda: rc.Mean(reduction="token"), "Mean: unknown argument 'reduction'"),
    "an old name of groups": (lambda: rc.Groups(group_size=2), "did you mean size=?"),
    "an old name of factors": (lambda: rc.Factors(train_mask=MASK), "did you mean mask=?"),
    "an old name of turns": (lambda: rc.TurnIds("runs", max_turns=2), "did you mean at_most=?"),
    "an old name of labels": (lambda: rc.Labels(A, label_names=["a"]), "did you mean names=?"),
    "a surrogate's class": (lambda: rc.Loss(rc.PPO), "got the class PPO; write PPO()"),
    "a name that is a list": (
        lambda: rc.Loss.from_dict({"surrogate": {"name": ["PPO"]}}),
        "Loss.surrogate: expected a mapping with a name among ['PPO',",
    ),
    "a coefficient as a bonus": (lambda: rc.Loss(entropy_bonus=0.1), "expected EntropyBonus(...) or None, got float"),
    "no groups": (lambda: rc.Groups(), "groups: expected index= or size=, got neither"),
    "two kinds of groups": (
        lambda: rc.Groups(index=OFFSETS, size=2),
        "groups.index: expected None beside groups.size, got both",
    ),
    "a recipe's old words": (
        lambda: rc.Loss(denominator="kept"),
        "did you mean mean=rc.Mean(..., over=...), or total= of the Batch?",
    ),
    "a column of a batch": (
        lambda: rc.dump("x.jsonl", TRAIN, ROLLOUT, BATCH, versions=A),
        "versions: expected it in the Batch, rc.Batch(versions=...), got a column",
    ),
    "no versions": (
        lambda: rc.proximal(TRAIN, ROLLOUT, BATCH),
        "versions: expected rc.Batch(versions=rc.Versions(ids, current)), got None",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_argument_the_expectation_and_what_came(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as raised:
        call()
    assert "\n" not in str(raised.value)
