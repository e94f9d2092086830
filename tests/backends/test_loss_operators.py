"""The kernels of the policy loss as operators: what a compiler sees, what is launched, and what is in a compile key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.launches import FREE, Operations, key
from builders.rounding import assert_near
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.aot.variant import SHORT
from rollout_corr.specs.encode import encode
from rollout_corr.specs.terms import Objective

PPO = Objective(rc.PPO(0.2, 0.28))
AVERAGED = Objective(rc.GSPO(0.1, 0.1), rc.KL("k3", 0.1), rc.SquaredLogRatio(0.1), mean=rc.Mean("sequence"))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def inputs(tokens=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(tokens, generator=generator)
    old = new + 0.3 * torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    advantages = torch.randn(tokens, generator=generator)
    return new.requires_grad_(), old, advantages, mask, torch.tensor([0, 7, 7, tokens // 2, tokens])


def told(objective):
    return dict(zip(("objective", "numbers"), encode(objective), strict=True))


def test_operators_keep_their_promises():
    assert rc.policy_loss  # whose import defines them
    objective = AVERAGED
    new, old, advantages, mask, offsets = inputs()
    absent = dict.fromkeys(("weights", "trains", "divisor", "scales", "log_mass", "turns", "chosen"))
    packed = absent | {
        "new": new.detach(), "base": old, "ref": old if objective.kl else None, "advantages": advantages,
        "mask": mask, "offsets": offsets, "per_sequence": False, "mass_of_base": False, "double": False,
        "differentiable": True, **told(objective),
    }  # fmt: skip
    rows = {k: x.view(4, 10) if isinstance(x, torch.Tensor) and x.shape == (40,) else x for k, x in packed.items()}
    given = rows | {
        "offsets": None, "divisor": torch.tensor(3.0, dtype=torch.float64), "scales": torch.full((4, 10), 0.5),
        "log_mass": torch.full((4, 10), -0.1), "mass_of_base": True, "differentiable": False,
    }  # fmt: skip
    turns = torch.cat([offsets, offsets[-1:]])
    turned = packed | {"turns": turns, **told(dataclasses.replace(objective, surrogate=rc.GSPO(over="turn")))}
    for operands in (given, turned):
        torch.library.opcheck(torch.ops.rollout_corr.policy_loss, (), operands)
    value, gradient, inners, _, rest, _ = torch.ops.rollout_corr.policy_loss(**packed)
    arguments = (gradient, inners, torch.ones_like(value), rest, offsets, None, torch.bfloat16)
    torch.library.opcheck(torch.ops.rollout_corr.scale_gradient, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_graph_break(backend):
    """Forward and backward through the operators, packed and padded, with lengths that change."""

    def step(new, old, advantages, mask, cu_seqlens, backend="triton"):
        out = rc.policy_loss(
            new * 1.0,
            advantages,
            **bundled_loss(
                mask=mask,
                old_logp=old,
                cu_seqlens=cu_seqlens,
                surrogate=AVERAGED.surrogate,
                kl=AVERAGED.kl,
                ref_logp=old,
                regularizer=AVERAGED.regularizer,
                mean=AVERAGED.mean,
                backend=backend,
            ),
        )
        return out.value * 2.0, out.statistics.sums + 0

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (40, 64):
        *tensors, offsets = inputs(tokens, seed=tokens)
        rows = [x.detach().view(4, -1) for x in tensors]
        for arguments in ((*tensors, offsets), (rows[0].requires_grad_(), *rows[1:], None)):
            (value, sums), (wanted, like) = compiled(*arguments), step(*arguments, backend="torch")
            torch.testing.assert_close(value, wanted)
            assert_near(sums, like, torch.float32)
            (one,), (other,) = (torch.autograd.grad(x, arguments[0]) for x in (value, wanted))
            torch.testing.assert_close(one, other)


def test_a_surrogate_changed_outside_is_not_stale():
    new, old, advantages, mask, offsets = inputs()

    def value(surrogate, backend="triton"):
        return rc.policy_loss(
            new, advantages, loss=rc.Loss(surrogate), mask=mask, cu_seqlens=offsets, old_logp=old, backend=backend
        ).value

    compiled = torch.compile(value, fullgraph=True, backend="eager")
    surrogates = [rc.PPO(0.2, high) for high in (0.01, 0.2, 0.4)]
    found = [compiled(surrogate) for surrogate in surrogates]
    torch.testing.assert_close(found, [value(surrogate, "torch") for surrogate in surrogates])
    assert found[0] != found[1] != found[2]


# --- what is launched ---


# Their gradient needs a sum of the sequence.
TWO_PASSES = ("gspo", "gmpo", "rec_sequence", "vespo", "dro_sequence")


@pytest.mark.parametrize("name", LOSS_VARIANTS)
def test_a_constant_number_of_launches_and_nothing_else(name):
    """On meta tensors nothing has a value, so whoever reads one fails. Backward is the last."""
    variant = LOSS_VARIANTS[name]
    variant.launches()  # its numbers are on the device from here on
    for tokens, sequences in ((64, 1), (4096, 4), (1_000_000, 100_000)):
        given = variant.given(tokens, sequences)
        with Operations() as operations:
            found = [launch.kernel.__name__ for launch in variant.launches(given)]
        # The variant makes the upstream gradient of ones itself.
        allowed = {"ones"} if variant.differentiable else set()
        assert set(operations.names) - FREE <= allowed
        second = "gradient_kernel" if variant.name.startswith(TWO_PASSES) else "sequences_kernel"
        assert found == ["gradient_kernel", second, *(["scale_kernel"] if variant.differentiable else [])]


def test_sizes_beyond_32_bits():
    for tokens, sequences in ((3 << 30, 7), (1 << 31, 1 << 20)):
        for name in ("ppo_packed", "gspo"):
            launches = LOSS_VARIANTS[name].launches(LOSS_VARIANTS[name].given(tokens, sequences))
            assert all(0 < launch.programs < 2**31 for launch in launches)
            tiles = tokens >> launches[0].arguments["tile_bits"]
            assert launches[0].programs == tiles + 1 and launches[0].arguments["slots"] == tiles + sequences + 2


@pytest.mark.parametrize("name", ["ppo_packed", "ppo_padded", "gspo", "ppo_short"])
def test_no_length_is_in_a_compile_key(name):
    variant = LOSS_VARIANTS[name]
    sizes = ((4096, 3), (8192, 2), (70_001, 5)) if variant.packed else ((6144, 3), (4096, 1), (8192 * 70, 70))
    if variant.length == SHORT:
        sizes = ((4096, 100), (8192, 200), (70_001, 700))
    keys = [[key(launch) for launch in variant.launches(variant.given(*size))] for size in sizes]
    assert keys[0] == keys[1] == keys[2]


def test_numbers_are_not_in_a_compile_key():
    def keys(objective):
        variant = dataclasses.replace(LOSS_VARIANTS["ppo_packed"], objective=objective)
        return [key(launch) for launch in variant.launches()]

    one = keys(Objective(rc.PPO(0.2, 0.28), regularizer=rc.SquaredLogRatio(0.1)))
    assert one == keys(Objective(rc.PPO(0.1, 0.5, clamp=3.0), regularizer=rc.SquaredLogRatio(7.0)))
    assert one != keys(Objective(rc.PPO(0.2, 0.28, dual=3.0), regularizer=rc.SquaredLogRatio(0.1)))
