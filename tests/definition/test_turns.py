"""Turns that random calls do not draw; loops judge random offsets, ids and runs of a mask there."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc

pytestmark = pytest.mark.usefixtures("one_thread")

FIVE, SIX = [torch.zeros(3), torch.zeros(2)], [torch.zeros(3), torch.zeros(3)]


def jagged(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_runs_of_a_mask_of_none_are_the_sequences():
    logp = torch.randn(6)
    out = rc.correct(logp, logp, rc.Batch(cu_seqlens=torch.tensor([0, 2, 2, 6]), turns="runs"))
    assert out.turns.tolist() == [0, 2, 6] and out.keep_turns.tolist() == [True, True]


@pytest.mark.parametrize("logp", [jagged(FIVE), FIVE], ids=["jagged", "list"])
def test_offsets_that_are_as_many_as_the_tokens_are_no_ids_where_ids_have_rows(logp):
    out = rc.correct(logp, logp, rc.Batch(turns=torch.tensor([0, 1, 3, 4, 5])))
    assert out.turns.tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-7), (torch.float64, 0.0)])
def test_turns_that_are_whole_sequences_or_single_tokens(dtype, within):
    """One turn a sequence has the bits of its sequence; a turn of one token has the token's ratio."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(40, generator=generator, dtype=dtype)
    train = rollout + 0.2 * torch.randn(40, generator=generator, dtype=dtype)
    offsets = torch.tensor([0, 7, 8, 40])

    def corrected(weight, over, reduce, turns=None):
        spec = rc.Spec(weight, (rc.Criterion("k3", over, reduce, upper=0.02),), "both")
        return rc.correct(train, rollout, rc.Batch(cu_seqlens=offsets, turns=turns), spec=spec)

    for weight in (rc.Weight.product, rc.Weight.geometric):
        one = corrected(weight(upper=1.1, over="turn"), "turn", "mean", offsets)
        other = corrected(weight(upper=1.1), "sequence", "mean")
        assert one.weights.equal(other.weights) and one.mask.equal(other.mask) and one.keep_turns.equal(other.keep)
        one = corrected(weight(upper=1.1, over="turn"), "turn", "mean", torch.arange(41))
        other = corrected(rc.Weight.token(upper=1.1), "token", None)
        torch.testing.assert_close(one.weights, other.weights, rtol=within, atol=0.0)
        assert one.mask.equal(other.mask) and 0 < one.mask.sum() < 40


IDS = torch.tensor([[0, 1, 2], [3, 4, 6]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("logp", "ids", "more"),
    [
        (torch.zeros(2, 3), IDS, {}),
        (torch.zeros(1, 6), IDS.view(1, 6), {"cu_seqlens": torch.tensor([0, 3, 6])}),
        (jagged(SIX), torch.nested.nested_tensor_from_jagged(IDS.view(6), torch.tensor([0, 3, 6])), {}),
        (SIX, list(IDS), {}),
    ],
    ids=["padded", "row", "jagged", "list"],
)
def test_ids_in_rows_are_no_offsets_whatever_they_are(logp, ids, more, dtype):
    """Ids that begin and end where offsets would, in a tensor that has not the shape of offsets."""
    ids = [x.to(dtype) for x in ids] if isinstance(ids, list) else ids.to(dtype)
    assert rc.correct(logp, logp, rc.Batch(turns=ids, **more)).turns.tolist() == [0, 1, 2, 3, 4, 5, 6]
