"""Reductions over the tokens of a sequence, padded and packed."""

from __future__ import annotations

import torch

from rollout_corr.definition.sequences import Packed, Rows


def test_sequences_answer_alike() -> None:
    """`Rows` and `Packed` are two shapes of the same questions, gaps and empty sequences included."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 70, generator=generator)
    rows, packed = Rows(6), Packed(torch.arange(7) * 70, 420)
    integers = (x * 1000).long()
    assert torch.equal(rows.sum_integers(integers), packed.sum_integers(integers.flatten().clone()))
    assert torch.equal(rows.max(x), packed.max(x.flatten()))
    assert all(torch.equal(*pair) for pair in zip(rows.ends(x), packed.ends(x.flatten()), strict=True))
    assert torch.allclose(rows.sum(x), packed.sum(x.flatten()), rtol=1e-12)
    gaps = Packed(torch.tensor([3, 3, 40, 41, 41, 400]), 420)
    flat = integers.flatten()
    wanted = [flat[a:b].sum() for a, b in ((3, 3), (3, 40), (40, 41), (41, 41), (41, 400))]
    assert torch.equal(gaps.sum_integers(flat.clone()), torch.stack(wanted))
    assert gaps.max(x.flatten())[0] == -torch.inf
    assert torch.equal(gaps.spread(torch.arange(5))[3:400], torch.tensor([1] * 37 + [2] + [4] * 359))
