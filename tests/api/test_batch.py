"""One Batch and one Loss for every call: read once, read again when a tensor changes, and plain data."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from rollout_corr.backends import batch as reading
from rollout_corr.backends import read, turns
from rollout_corr.backends.given import batch_given
from rollout_corr.specs.batch_losses import OF_BATCH
from rollout_corr.specs.surrogates import SURROGATES

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


def test_lists_of_tensors_are_values():
    batch = rc.Batch(mask=[MASK, MASK[:3]], entropy=(TRAIN, TRAIN[:3]), turns="runs")
    assert repr(batch) == "Batch(mask=list of 2 bool, turns='runs', entropy=list of 2 float32)"


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

    def there():
        one = read.reader("train_logp", torch.zeros(N, device="meta"), batch)
        return read.offsets_there(one, batch), read.turns_there(one, batch.turns, batch)

    offsets, turns = there()
    assert offsets.device.type == turns.device.type == "meta"
    assert [x is y for x, y in zip(there(), (offsets, turns), strict=True)] == [True, True]
    OFFSETS[1] += 0
    assert there()[0] is not offsets


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
            lambda: rc.policy_loss(TRAIN, TRAIN, batch, 3),
            lambda: rc.policy_loss(TRAIN, TRAIN, batch, spec=3),
        ):
            with pytest.raises(TypeError, match="got int") as raised:
                call()
            told.assert_called_once_with(raised.value)
            told.reset_mock()


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
    assert eval(repr(loss), {name: getattr(rc, name) for name in rc.__all__}) == loss
    assert "_hash" not in loss.__getstate__()
