"""Bounds that the ranks of a batch group decide together."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import lay_out
from builders.coarse import coarse
from builders.split_cases import Rank
from builders.threaded_ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


TOGETHER = rc.Spec(
    criteria=(
        rc.Criterion("k2", upper=rc.MeanBelow(0.125)),
        rc.Criterion("abs", over="sequence", reduce="mean", lower=rc.Quantile(0.2), upper=rc.Bottom(3)),
    ),
    sums_over="kept",
)
# By what is bounded.
SPECS = {
    "criteria": TOGETHER,
    "weights": rc.Spec(rc.Weight.token(lower=rc.Quantile(0.1), upper=rc.Quantile(0.9))),
    "sample size": rc.Spec(rc.Weight.token(upper=rc.KeepESS(0.9))),
    "products": rc.Spec(
        rc.Weight.product(upper=rc.KeepESS(0.5)), (rc.Criterion("abs", upper=rc.Quantile(0.8)),), sums_over="kept"
    ),
    "tokens of groups": rc.Spec(
        criteria=(rc.Criterion("abs", lower=rc.TopK(2, within="group"), upper=rc.Quantile(0.9, "group")),)
    ),
    "survivors in groups, and a bound of the batch": rc.Spec(
        criteria=(
            rc.Criterion("abs", "sequence", "mean", lower=rc.Quantile(0.2), upper=rc.Quantile(0.7, within="group")),
            rc.Criterion("abs", upper=rc.MeanBelow(0.2, within="group")),
        ),
        sums_over="kept",
    ),
}
# Group 3 is all invalid, group 4 has no sequence, and some lie on both ranks.
INDEX = [0, 1, 3, 0, 2, 1, 0, 1]


def laid_out(batch, part, layout, dtype=torch.float32):
    """Some sequences of a batch, with the numbers of their groups."""
    laid = lay_out(batch[part], layout, dtype)
    laid.others.update(group_index=torch.tensor(INDEX[part]), group_count=5)
    return laid


def bounds_of(found):
    return {key: x for key, x in found.metrics().items() if key.endswith(("/upper_max", "/upper_min", "/lower_max"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECS)
def test_ranks_decide_together(name, dtype, way):
    """Each token has the fate, and each bound the bits, of one call with the whole batch."""
    spec, batch = SPECS[name], coarse(5)
    whole = laid_out(batch, slice(None), "packed", dtype)

    def told(laid, out):
        return laid.read(out.mask), [] if out.weights is None else laid.read(out.weights), out.keep.tolist()

    def of_rank(rank):
        part = laid_out(batch, (slice(0, 3), slice(3, None))[rank], ("padded_left", "list")[rank], dtype)
        out = part.correct(spec, batch_group=Rank(rank=rank, ranks=2))
        return *told(part, out), bounds_of(out)

    first, second = Ranks(2).run(of_rank)
    out = whole.correct(spec)
    assert tuple(a + b for a, b in zip(first[:3], second[:3], strict=True)) == told(whole, out)
    assert first[3] == second[3] == bounds_of(out) and len(bounds_of(out)) >= 2


def test_groups_of_neighbors_stay_on_their_rank():
    """A size counts whole groups on each rank, so ranks exchange nothing for the bound."""
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=rc.Quantile(0.6, within="group")),))
    batch = coarse(3)

    def of_rank(rank):
        part = lay_out(batch[4 * rank : 4 * rank + 4], "list", torch.float32)
        return part.read(part.correct(spec, group_size=2, batch_group=Rank(rank=rank, ranks=2)).mask)

    group = Ranks(2)
    first, second = group.run(of_rank)
    laid = lay_out(batch, "packed", torch.float32)
    assert first + second == laid.read(laid.correct(spec, group_size=2).mask) and group.rounds == 0


def test_the_tokens_of_highest_entropy_train():
    spec = rc.Spec(criteria=(rc.Criterion("entropy", lower=rc.TopK(share=0.2)),))
    logp, entropy = torch.full((2, 10), -1.0), torch.arange(20.0).view(2, 10)
    found = rc.correct(logp, logp, rc.Batch(entropy=entropy), spec=spec)
    assert torch.equal(found.mask, entropy >= 16.0) and found.metrics()["token_entropy/lower_max"] == 16.0
