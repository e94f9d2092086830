"""Costs of 64 labels on the CPU, in counts that other work on the machine cannot change.

Operations of torch that compute or copy, and the elements that they read and write: time follows the first where tokens
are few and the second where they are many. docs/batches.md#labels has times.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rollout_corr as rc

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = {
    "metrics": rc.Spec(),
    "weights": rc.spec("verl.decoupled_token_is"),
    "weights and rejection": rc.spec("verl.decoupled_seq_is_rs"),
}


class Touched(TorchDispatchMode):
    """Count operations that are no views, and the elements that they read and write."""

    def __init__(self):
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            leaves = tree_leaves((args, kwargs, found))
            self.elements += sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))
        return found


def batch_of(sequences, tokens):
    """Packed log-probs, and labels of sequences, of stretches of some hundred tokens, and of tokens one by one."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.linspace(0, tokens, sequences + 1).long()
    train = -torch.rand(tokens, generator=generator)
    rollout = train + 0.02 * torch.randn(tokens, generator=generator)
    labels = {
        "sequences": torch.randint(64, (sequences, 1), generator=generator),
        "stretches": torch.arange(tokens) // 430 % 64,
        "tokens": torch.randint(64, (tokens,), generator=generator),
    }
    return (train, rollout), offsets, labels


def cost(given, offsets, spec, ids=None, by=None):
    """Operations and elements of a call and its metrics."""
    labels = None if ids is None else {"environment": rc.Labels(ids, 64)}
    for _ in range(2):  # the first call fills caches
        with Touched() as touched:
            out = rc.correct(*given, rc.Batch(cu_seqlens=offsets, labels=labels), spec=spec)
            out.metrics(by=by)
    return touched.operations, touched.elements


@pytest.mark.parametrize("name", SPECS)
def test_few_tokens(name):
    given, offsets, labels = batch_of(64, 22_000)
    operations, elements = cost(given, offsets, SPECS[name])
    for units, ids in labels.items():
        more, touched = cost(given, offsets, SPECS[name], ids)
        assert more - operations <= 180, units
        assert touched <= 3.6 * elements, units
        # Reading 64 labels, 2,177 numbers and more, is some operations on tables.
        read, _ = cost(given, offsets, SPECS[name], ids, "environment")
        assert read - more <= 600, units


# Elements of a call with labels over those of one without.
MOST = {
    "metrics": {"sequences": 2.2, "stretches": 2.6, "tokens": 2.6},
    "weights": {"sequences": 2.4, "stretches": 2.8, "tokens": 2.8},
    "weights and rejection": {"sequences": 2.2, "stretches": 2.9, "tokens": 2.9},
}


@pytest.mark.parametrize("name", SPECS)
def test_many_tokens(name):
    given, offsets, labels = batch_of(256, 330_000)
    _, elements = cost(given, offsets, SPECS[name])
    for units, ids in labels.items():
        _, touched = cost(given, offsets, SPECS[name], ids)
        assert touched <= MOST[name][units] * elements, units
