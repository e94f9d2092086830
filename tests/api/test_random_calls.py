"""Random losses with a Spec: in one call what they are with what `correct` made before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from builders.same_bits import in_hex
from frozen.calls import loss_call
from frozen.generator import SURROGATES, random_loss, random_spec

pytestmark = pytest.mark.usefixtures("one_thread")

# `make test-all` has as many again, twenty times.
BLOCKS = [*range(2), *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 40))]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_spec_in_the_call_is_a_correction_before_it(block):
    """Whatever is not finite, with any units, rules, turns, versions, kept mass and labels."""
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(f"fused {seed}")
        loss = replace(
            random_loss(rng, rng.choice([name for name in SURROGATES if name != "Score"])), entropy_bonus=None
        )
        loss = replace(loss, surrogate=replace(loss.surrogate, of=None))
        call = loss_call(rng, loss, random_spec(rng), "decoupled", extras=0.3)
        if call.drawn.laid.layout.kind == "list":
            continue
        tensors, held, case = call.drawn.tensors, call.drawn.laid, f"{seed} {loss!r} {call.spec!r}"
        fused, new, _ = call.lost("torch", loss)
        out = call.corrected(call.spec, "torch")
        given = {} if loss.kl is None else {"ref_logp": tensors["ref"]}
        batch = rc.Batch(**call.drawn.batch | call.given)
        apart = rc.policy_loss(
            new, tensors["advantages"], batch, loss, old_logp=tensors["train"], correction=out, **given
        )
        assert fused.value.item() == near(apart.value.item(), torch.float32), case
        slopes = [held.read(torch.autograd.grad(one.value, new)[0]) for one in (fused, apart)]
        for row, other in zip(*slopes, strict=True):
            assert row == near(other, torch.float32), case
        assert held.read(fused.mask) == held.read(apart.mask) and fused.keep.equal(out.keep), case
        assert (fused.weights is None) == (out.weights is None) and (fused.keep_turns is None) == (
            out.keep_turns is None
        )
        if out.weights is not None:
            assert in_hex(held.read(fused.weights)) == in_hex(held.read(out.weights)), case
        assert out.metrics().items() <= fused.metrics().items() or call.spec.nonfinite == "propagate", case
        counts = [one.metrics()["tokens_trained"] for one in (fused, apart)]
        assert counts[0] == counts[1], case
