"""Random losses: with a Spec in the call or a correction before it, and the bonus of the entropy by loops."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import judges
from builders.judges import Told
from builders.rounding import near
from builders.same_bits import in_hex
from frozen.calls import loss_call
from frozen.generator import SURROGATES, random_loss, random_spec
from oracles import loss_terms
from oracles.entropy_bonus import bonus

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


@pytest.mark.parametrize("block", BLOCKS)
def test_the_bonus_of_the_entropy(block):
    """What it adds to the value, and its slopes, by loops: any mean, scale, total, training mask and layout."""
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(f"bonus {seed}")
        drawn = random_loss(rng, rng.choice(("PPO", "GSPO", "Reinforce")))
        loss = replace(drawn, entropy_bonus=rc.EntropyBonus(0.3, ("kept", "all")[seed % 2]))
        mode = rng.choice(("decoupled", "bypass")) if loss.surrogate.of is None else "both"
        call = loss_call(rng, loss, None, mode, dtypes=(torch.float32,) * 2)
        if call.correction == "correction" or not judges.is_oracles(call):
            continue
        told, case = Told(call), f"{seed} {call.drawn.laid.layout} {loss!r} {call.given}"
        sequences, total = judges.sequences_of_loss(call, told), call.given.get("total")
        total = told.count if loss.mean.over == "rows" else total and float(total)
        scales = [[x if math.isfinite(x) else 0.0 for x in q.scale or [1.0] * len(q)] for q in sequences]
        entropies = [
            [h * x for h, x in zip(*row, strict=True)]
            for row in zip(told.rows("entropy", torch.float32), scales, strict=True)
        ]
        trains = [[t in loss_terms.trained(q, loss.surrogate) for t in range(len(q))] for q in sequences]
        value, slopes = bonus(entropies, told.masks, trains, 0.3, loss.entropy_bonus.scope, loss.mean, total)

        out, _, entropy = call.lost("torch", loss)
        plain = call.lost("torch", replace(loss, entropy_bonus=None))[0]
        assert out.value.item() == near(plain.value.item() + value, torch.float32), case
        some = isinstance(entropy, list)
        found = torch.autograd.grad(out.value, entropy) if not some or entropy else ()
        found = list(found) if some else found[0]
        for row, wanted, factors in zip(call.drawn.laid.read(found), slopes, scales, strict=True):
            assert row == near([x * y for x, y in zip(wanted, factors, strict=True)], torch.float32, size=0.0), case
        assert not any(call.drawn.laid.elsewhere(found)), case
