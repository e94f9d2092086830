"""Corrections that random calls do not meet: no mask, and advantages whose shape fits both tokens and sequences."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc

pytestmark = pytest.mark.usefixtures("one_thread")


def test_mask_of_none_is_false_outside_every_interval():
    """There is no given mask to hand back, so what belongs to no sequence does not train."""
    for spec in (
        rc.Spec(),
        rc.Spec(rc.Weight.token(), rejected="zero"),
        rc.Spec(criteria=(rc.Criterion("abs", upper=1),)),
    ):
        out = rc.correct(torch.zeros(6), torch.zeros(6), cu_seqlens=torch.tensor([1, 3, 4]), spec=spec)
        assert out.mask.tolist() == [False, True, True, True, False, False]
        assert out.metrics()["tokens_outside"] == 3


@pytest.mark.parametrize("layout", ["list", "jagged"])
def test_advantages_of_sequences_where_there_are_as_many_tokens(layout):
    """A plain tensor given with samples or a jagged tensor is per sequence, also where it would fit the tokens."""
    samples = [torch.tensor([-0.1, -0.9]), torch.tensor([]), torch.tensor([-0.3])]
    others = [x - 0.5 for x in samples]
    if layout == "jagged":
        samples, others = (torch.nested.nested_tensor(x, layout=torch.jagged) for x in (samples, others))
    spec = rc.Spec(criteria=(rc.Criterion("abs", upper=0.1, when="negative_advantage"),))
    out = rc.correct(samples, others, spec=spec, advantages=torch.tensor([1.0, 1.0, -1.0]))
    kept = out.mask if layout == "list" else out.mask.unbind()
    assert [x.tolist() for x in kept] == [[True, True], [], [False]]
