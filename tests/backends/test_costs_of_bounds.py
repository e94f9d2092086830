"""The cost of bounds that the batch decides, by the bytes that operations of torch touch: no load changes them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rollout_corr as rc
from rollout_corr.backends import bounds_of_batch

pytestmark = pytest.mark.usefixtures("one_thread")

C, W = rc.Criterion, rc.Weight
# Times of a bound that is a number. Measured: 1.26 to 1.89, at 64 x 1024, where tables weigh more, 1.46 to 3.45.
MOST = 2.2


class Touched(TorchDispatchMode):
    """Counts operations, and the bytes that they read and write; views touch nothing."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.operations += 1
            every = tree_leaves((args, kwargs, result))
            self.bytes += sum(x.numel() * x.element_size() for x in every if isinstance(x, torch.Tensor))
        return result


def cost(spec, rows=256, width=2048):
    """The operations and bytes of a call, without what is made once."""
    generator = torch.Generator().manual_seed(0)
    rollout = -2.0 * torch.rand(rows, width, generator=generator)
    train = rollout + 0.1 * torch.randn(rows, width, generator=generator)
    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    rc.correct(train, rollout, mask=mask, spec=spec)
    with Touched() as touched:
        rc.correct(train, rollout, mask=mask, spec=spec)
    return touched


CASES = {
    "a quantile of token weights": (rc.Spec(W.token(upper=1.2)), rc.Spec(W.token(upper=rc.Quantile(0.99)))),
    "a sample size": (rc.Spec(W.token(upper=1.2)), rc.Spec(W.token(upper=rc.KeepESS(0.99)))),
    "a quantile of products": (rc.Spec(W.product(upper=1.2)), rc.Spec(W.product(upper=rc.Quantile(0.9)))),
    "a quantile of tokens": (
        rc.Spec(W.token(upper=2.0), (C("abs", upper=0.3),)),
        rc.Spec(W.token(upper=2.0), (C("abs", upper=rc.Quantile(0.99)),)),
    ),
    "M2PO": (rc.Spec(criteria=(C("k2", upper=0.04),)), rc.Spec(criteria=(C("k2", upper=rc.MeanBelow(0.004)),))),
    "the worst sequences": (
        rc.Spec(W.token(upper=2.0), (C("k3", "sequence", "mean", upper=0.01),)),
        rc.Spec(W.token(upper=2.0), (C("k3", "sequence", "mean", upper=rc.Quantile(0.99)),)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bound_from_the_batch_costs_little_more_than_a_number(name):
    fixed, decided = (cost(spec) for spec in CASES[name])
    assert decided.bytes <= MOST * fixed.bytes, (decided.bytes, fixed.bytes)


def test_without_one_nothing_is_searched():
    with mock.patch.object(bounds_of_batch, "find_bounds") as search:
        for fixed, _ in CASES.values():
            cost(fixed, 4, 16)
    assert not search.called
