"""The kernels of the policy loss as operators: what a compiler sees, what is launched, and what is in a compile key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rollout_corr as rc
from aot.loss_variants import LOSS_FEW, LOSS_VARIANTS
from aot.variant import LONG, LONGEST, MEDIUM, SHORT
from builders.calls import bundled_loss, example
from builders.cases import one_in
from builders.launches import FREE, Operations, key
from builders.loss_cases import SURROGATES
from rollout_corr.backends.batch import LOGP_DTYPES, external_names
from rollout_corr.backends.loss_operators import beyond_kernels
from rollout_corr.kernels import grid, launches
from rollout_corr.specs import ratio_losses, score_losses, signed_losses, surrogate, surrogates, terms
from rollout_corr.specs.encode import decode, encode
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


@pytest.mark.parametrize("name", SURROGATES)
def test_an_objective_survives_the_operator(name):
    for objective in (
        Objective(SURROGATES[name]),
        Objective(
            SURROGATES[name],
            rc.KL("k3", 0.1, weight="ratio"),
            rc.SquaredLogRatio(0.5),
            rc.Mean("sequence_sum", length=7.0),
            nonfinite="neutral",
        ),
    ):
        assert decode(*encode(objective)) == objective


@pytest.mark.parametrize("objective", [PPO, AVERAGED])
def test_operators_keep_their_promises(objective):
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
    # Of the objectives one with what is given, one with turns: to trace each takes two seconds.
    for operands in (packed, given if objective.kl else turned):
        torch.library.opcheck(torch.ops.rollout_corr.policy_loss, (), operands)
    value, gradient, inners, divisor, _ = torch.ops.rollout_corr.policy_loss(**packed)
    arguments = (gradient, inners, torch.ones_like(value), divisor, offsets, torch.bfloat16)
    torch.library.opcheck(torch.ops.rollout_corr.scale_gradient, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", one_in(2, [AVERAGED, PPO]))
def test_no_graph_break(objective, backend):
    """Forward and backward through the operators, packed and padded, with lengths that change."""

    def step(new, old, advantages, mask, cu_seqlens, backend="triton"):
        out = rc.policy_loss(
            new * 1.0,
            advantages,
            **bundled_loss(
                mask=mask,
                old_logp=old,
                cu_seqlens=cu_seqlens,
                surrogate=objective.surrogate,
                kl=objective.kl,
                ref_logp=None if objective.kl is None else old,
                regularizer=objective.regularizer,
                mean=objective.mean,
                backend=backend,
            ),
        )
        return out.value * 2.0, out.statistics.sums + 0

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for tokens in (40, 64, 52):
        *tensors, offsets = inputs(tokens, seed=tokens)
        rows = [x.detach().view(4, -1) for x in tensors]
        for arguments in ((*tensors, offsets), (rows[0].requires_grad_(), *rows[1:], None)):
            (value, sums), (wanted, like) = compiled(*arguments), step(*arguments, backend="torch")
            torch.testing.assert_close(value, wanted)
            torch.testing.assert_close(sums, like, rtol=1e-5, atol=1e-5)
            (one,), (other,) = (torch.autograd.grad(x, arguments[0]) for x in (value, wanted))
            torch.testing.assert_close(one, other)


def test_a_number_changed_inside_a_compiled_function_is_not_stale():
    new, old, advantages, mask, offsets = inputs()

    def value(high, backend="triton"):
        surrogate = rc.PPO(0.2, high)
        return rc.policy_loss(
            new, advantages, loss=rc.Loss(surrogate), mask=mask, cu_seqlens=offsets, old_logp=old, backend=backend
        ).value

    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    found = [compiled(high) for high in (0.01, 0.2, 0.4)]
    torch.testing.assert_close(found, [value(high, "torch") for high in (0.01, 0.2, 0.4)])
    assert found[0] != found[1] != found[2]


def test_a_surrogate_changed_outside_is_not_stale():
    new, old, advantages, mask, offsets = inputs()

    def value(surrogate, backend="triton"):
        return rc.policy_loss(
            new, advantages, loss=rc.Loss(surrogate), mask=mask, cu_seqlens=offsets, old_logp=old, backend=backend
        ).value

    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")
    surrogates = [rc.PPO(0.2, high) for high in (0.01, 0.2, 0.4)]
    found = [compiled(surrogate) for surrogate in surrogates]
    torch.testing.assert_close(found, [value(surrogate, "torch") for surrogate in surrogates])
    assert found[0] != found[1] != found[2]


# --- what is launched ---


# Their gradient needs a sum of the sequence.
TWO_PASSES = ("gspo", "gmpo", "rec_sequence", "score_average", "score_geometric", "vespo", "dro_sequence", "real")
# And what each token adds to that of the others depends on a first one.
THREE_PASSES = ("ppo_average", "ppo_geometric")


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
        passes = 3 if variant.name in THREE_PASSES else 2 if variant.name.startswith(TWO_PASSES) else 1
        names = ["gradient_kernel", "sequences_kernel"] * passes
        assert found == [*names, *(["scale_kernel"] if variant.differentiable else [])]


def test_memory_is_the_gradient_and_little_else():
    variant = LOSS_VARIANTS["ppo_packed"]
    tokens = 1 << 20
    given = variant.given(tokens, 256)
    launches = variant.launches(given)
    arguments = [x for launch in launches for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
    mine = list(given)
    known = {x.untyped_storage()._cdata for x in mine if isinstance(x, torch.Tensor)}
    others = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in arguments}
    extra = sum(size for storage, size in others.items() if storage not in known)
    # The gradient, and in backward the one that autograd gets.
    assert extra <= 2 * 4 * tokens * 1.03


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


@pytest.mark.parametrize(("decoupled", "loss"), [
    (True, rc.Loss(kl=rc.KL("k3", 0.1))),
    (True, rc.Loss(rc.GSPO())),
    (False, rc.Loss()),
])  # fmt: skip
def test_warmup_compiles_what_the_loop_launches(decoupled, loss, device, monkeypatch):
    """A step with other lengths, counts and numbers finds every kernel compiled."""
    shapes = ((32, grid.Shape(64, 16, 2, 2)), (0, grid.Shape(32, 16, 2, 2)))
    monkeypatch.setattr(grid, "SHAPES", shapes)
    launched = []
    run = launches.Launch.run
    monkeypatch.setattr(launches.Launch, "run", lambda launch: (launched.append(key(launch)), run(launch)))
    of_sequences, fused = isinstance(loss.surrogate, rc.GSPO), loss.kl is None
    spec = rc.Spec(rc.Weight.token(upper=2.0))
    if not decoupled:
        spec = rc.Spec(criteria=(rc.Criterion("external", name="entropy", upper=1.0),))
    like = example("padded", device, external=None if decoupled else {"entropy": torch.zeros(2, 4, device=device)})
    advantages = torch.ones(2 if of_sequences else (2, 4), device=device)
    assert rc.warmup(*like, spec=spec, loss=loss, decoupled=decoupled, advantages=advantages) == 4
    known, launched[:] = set(launched), []
    new, old, rollout = (torch.full((3, 64), -1.0, device=device) for _ in range(3))
    given = torch.ones(3 if of_sequences else (3, 64), device=device)
    external = None if decoupled else dict.fromkeys(external_names(spec), rollout)
    batch = rc.Batch(mask=torch.ones(3, 64, dtype=torch.bool, device=device), external=external)
    how = {"backend": "triton", "old_logp": old if decoupled else None, "ref_logp": None if fused else old}
    how |= {"spec": spec} if fused else {"correction": rc.correct(old, rollout, batch, spec=spec, backend="triton")}
    rc.policy_loss(new.requires_grad_(), given, batch, loss, rollout_logp=rollout, **how).value.backward()
    assert launched and set(launched) <= known


def test_warmup_refuses(device):
    with pytest.raises(TypeError, match=r"loss: expected a rollout_corr\.Loss, got PPO; write rc\.Loss\(PPO"):
        rc.warmup(*example(device=device), loss=rc.PPO())


# --- the variants ---

OBJECTIVES = [variant.objective for variant in LOSS_VARIANTS.values()]
PENALTIES = [x.kl for x in OBJECTIVES if x.kl is not None]
USED = {
    "RATIOS": {"new/old", "new/rollout"},  # which log-probs are the base: all one to the kernels
    "THROUGH": {x.surrogate.through for x in OBJECTIVES if isinstance(x.surrogate, rc.GSPO)},
    "DIVERGENCES": {x.surrogate.divergence for x in OBJECTIVES if isinstance(x.surrogate, rc.DPPO)},
    "STRETCHES": {"sequence", "turn"},  # losses of turns run in plain torch
    "GATES": {x.surrogate.gate for x in OBJECTIVES if isinstance(x.surrogate, rc.SAPO)},
    # Averages of ratios run in plain torch.
    "BETWEEN": {"average", "geometric_average"},
    "LEVELS": {x.surrogate.ratio_level for x in OBJECTIVES} | {"average", "geometric_average"},
    "SQUARED": {x.surrogate.level for x in OBJECTIVES if isinstance(x.surrogate, rc.DRO)},
    "MASKS": {x.surrogate.mask for x in OBJECTIVES if isinstance(x.surrogate, rc.REC)},
    "FACTORS": {x.surrogate.weight for x in OBJECTIVES if isinstance(x.surrogate, rc.REC)},
    "REC_LEVELS": {x.surrogate.level for x in OBJECTIVES if isinstance(x.surrogate, rc.REC)},
    "KL_KINDS": {x.kind for x in PENALTIES},
    "KL_WEIGHTS": {x.weight for x in PENALTIES} - {None},
    "SCOPES": {x.scope for x in PENALTIES} | {x.regularizer.scope for x in OBJECTIVES if x.regularizer},
    "OUTSIDE": {x.surrogate.outside for x in OBJECTIVES if isinstance(x.surrogate, rc.Score)},
    "MEANS": {x.mean.of for x in OBJECTIVES},
    # "rows" is a number that is known before the kernels run.
    "MEANS_OVER": {x.mean.over for x in OBJECTIVES} | {"rows"},
}


def test_every_option_is_in_a_variant():
    """A new option, or a new value of one, is missed here until a variant has it."""
    choices = {}
    for module in (surrogate, ratio_losses, score_losses, signed_losses, surrogates, terms):
        choices |= vars(module)
    options = {name: set(x) for name, x in choices.items() if name.isupper() and isinstance(x, tuple)}
    looking = options.pop("OF_BATCH")
    looking = {kind for kind in looking | options.pop("SURROGATES") if beyond_kernels(kind(), False) is None}
    assert looking == {type(x.surrogate) for x in OBJECTIVES}
    assert options == USED
    variants = LOSS_VARIANTS.values()
    assert {x.new for x in variants} == set(LOGP_DTYPES)
    for name in ("base", "ref", "weights", "trains", "mask"):
        assert None in {getattr(x, name) for x in variants} and len({getattr(x, name) for x in variants}) > 2
    assert {x.mass for x in variants} == {None, "train", "rollout"}
    for name in ("packed", "counted", "differentiable", "aligned", "unit"):
        assert {getattr(x, name) for x in variants} == {True, False}, name
    assert {x.advantages for x in variants} == {"token", "sequence"}
    assert {x.length for x in variants} == {LONGEST, LONG, MEDIUM, SHORT}
    assert {x.objective.nonfinite for x in variants} == {"reject", "neutral", "propagate"}
    assert len(LOSS_VARIANTS) <= 48 and set(LOSS_FEW) <= set(LOSS_VARIANTS)
