"""The kernels of the policy loss: against the third oracle, against the reference, and in their own right.

In Triton's interpreter on the CPU, or compiled where `-m gpu` asks for it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import pytest
import torch

import rollout_corr as rc
from batches import GARBAGE, LAYOUTS, one_thread
from kernel_cases import MIDDLE, NARROW, REAL, WIDE, between_fences, bits, fenced, shaped, unchecked, watched
from loss_cases import SURROGATES, LaidLoss, arguments_of, compare, objective, only, random_batch
from rollout_corr import loss_metrics, loss_run
from rollout_corr.cuts import float32_at_least, float32_at_most
from rollout_corr.kernels import policy_loss as kernels
from rollout_corr.kernels.loss_variants import LOSS_VARIANTS
from rollout_corr.kernels.variant import LONG, LONGEST, MEDIUM, SHORT
from rollout_corr.layout import Batch
from rollout_corr.loss_run import Tensors
from rollout_corr.surrogates import LOSS_REDUCTIONS

INF, NAN = math.inf, math.nan
DECOUPLED = ("old", "weights", "train_mask")
SHAPES = {LONGEST: NARROW, LONG: NARROW, MEDIUM: MIDDLE, SHORT: WIDE}


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


# --- against the third oracle, in float64 ---


def check(sequences, wanted, layout, device, by=3e-8, **options):
    """The kernels between fences: what they read and should not have read shows in the result."""
    laid = LaidLoss(sequences, layout)
    laid.laid = between_fences(laid.laid, device)
    laid.new = laid.leaf(laid.laid.train)
    laid.arguments = {name: fenced(x, device) for name, x in laid.arguments.items()}
    with unchecked(), watched():
        out = laid(**(arguments_of(wanted) | options), backend="triton")
        case, given = f"{layout} {wanted}", options.get("denominator")
        compare(out, laid, sequences, wanted, case, given=given, by=by)
    return out


BATCHES = [random_batch(0), random_batch(1, advantages="sequence"), random_batch(3, broken=True)]


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates(name, device):
    by_sequence = objective(name, reduction="sequence_mean_token_mean", denominator="kept")
    with shaped(NARROW):
        check(only(BATCHES[0], *DECOUPLED), objective(name), "packed", device)
        check(only(BATCHES[1], "rollout", "train_mask"), by_sequence, "padded_strided", device)
        check(only(BATCHES[2], *DECOUPLED), objective(name), "padded_holes", device)
    with shaped(WIDE):
        check(only(BATCHES[2], "weights"), by_sequence, "packed_gaps", device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    with shaped(MIDDLE):
        for name, batch in (("ppo dual", BATCHES[0]), ("gspo", BATCHES[1]), ("gmpo", BATCHES[2])):
            wanted = objective(name, reduction="sequence_mean_token_mean")
            check(only(batch, *DECOUPLED), wanted, layout, device)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_reductions(reduction, device):
    length = 16.0 if reduction == "token_sum_norm" else None
    for name, counted in itertools.product(("ppo", "gspo"), ("original", "kept")):
        if (reduction, counted) != ("sum", "kept"):
            wanted = objective(name, reduction=reduction, denominator=counted, max_length=length)
            with shaped(NARROW):
                check(only(BATCHES[2], *DECOUPLED), wanted, "packed", device)


def test_denominators_of_the_caller(device):
    batch, wanted = only(BATCHES[0], *DECOUPLED), objective("ppo", reduction="sequence_mean_token_sum")
    with shaped(NARROW):
        check(batch, wanted, "packed", device, denominator=7.0)
        laid = LaidLoss(batch, "packed")
        options = arguments_of(wanted) | {"backend": "triton"}
        laid.laid, laid.new = laid.laid.to(device), laid.leaf(laid.laid.to(device).train)
        laid.arguments = {name: None if x is None else x.to(device) for name, x in laid.arguments.items()}
        seven = laid(**options | {"denominator": torch.tensor(7, device=device)})
        assert seven.value == laid(**options | {"denominator": 7.0}).value
        assert (
            laid(**options | {"denominator": 0.0}).value
            == laid(**options | {"reduction": "sum", "denominator": "original"}).value
        )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_and_regulariser(kind, device):
    terms = (
        rc.KL(kind, 0.3, weight="ratio", weight_upper=1.1),
        rc.KL(kind, 0.3, gradient="k2", weight="stopped_ratio", scope="all"),
        rc.KL(kind, 0.3, gradient="k3", weight="weights", log_clamp=0.4, value_clamp=0.06),
        rc.KL(kind, 0.3, gradient="abs", scope="all"),
        rc.KL("k3", 0.3, gradient=kind, log_clamp=0.3),
    )
    for i, term in enumerate(terms):
        wanted = objective(("ppo", "gspo", "gmpo", "score", "ppo")[i], kl=term,
                           regulariser=rc.SquaredLogRatio(0.2, ("all", "kept")[i % 2]))  # fmt: skip
        with shaped((NARROW, WIDE)[i % 2]):
            check(only(BATCHES[2 * (i % 2)], *DECOUPLED, "ref"), wanted, ("packed", "padded_left")[i % 2], device)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_squares_and_penalties_saturate(kind, device):
    """Differences of thousands: squares and KL terms run within +-1024, and pull no further beyond."""
    far = [
        replace(q, new=[x - (3000.0 if t % 2 else 2.0) * m for t, (x, m) in enumerate(zip(q.new, q.mask, strict=True))])
        for q in BATCHES[0]
    ]
    wanted = objective("dro", kl=rc.KL(kind, 0.1), regulariser=rc.SquaredLogRatio(0.1))
    with shaped(WIDE):
        check(only(far, *DECOUPLED, "ref"), wanted, "packed", device, by=1e-3)


# --- against the reference, in every dtype ---


def tensors_of(variant, seed=0, lengths=(5, 1, 9, 0, 7, 8, 17, 1, 16, 30)):
    """A batch of a variant on the CPU: D spread by a few tenths, garbage behind the mask, some tokens broken."""
    generator = torch.Generator().manual_seed(seed)
    sequences, width = len(lengths), 48
    given = variant.given(sum(lengths) if variant.packed else width * sequences, sequences, "cpu")
    shape = given.new.shape
    valid = torch.rand(shape, generator=generator) < 0.85
    if not variant.packed:
        valid &= torch.arange(width) < torch.tensor(lengths)[:, None]
    if variant.mask is None:
        valid[:] = True

    def noise(scale, shape=shape):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    new = -noise(1.0).abs() - 0.01
    made = {
        "new": new,
        "base": new + noise(0.3),
        "ref": new + noise(0.3),
        "weights": noise(1.0).abs(),
        "trains": (torch.rand(shape, generator=generator) < 0.8).double() * 2.0,
        "advantages": noise(1.0, given.advantages.shape),
    }
    for name in ("new", "base", "ref", "weights"):
        if variant.objective.nonfinite != "propagate" and new.numel():
            made[name].view(-1)[torch.randint(0, new.numel(), (2,), generator=generator)] = -INF if seed % 2 else NAN
        made[name][~valid] = GARBAGE[seed % len(GARBAGE)]
    if not given.per_sequence:
        made["advantages"][~valid] = NAN
    made["mask"] = valid.double() * (2.0 if variant.mask not in (None, torch.bool) else 1.0)
    for name, values in made.items():
        x = getattr(given, name)
        if x is not None:
            x.copy_(values)
    if variant.packed:
        given.offsets.copy_(torch.tensor([0, *itertools.accumulate(lengths)]))
    if variant.counted:
        given.divisor.fill_(13.0)
    return given


def on(given, device):
    """The same between fences on a device."""
    made = {f.name: getattr(given, f.name) for f in fields(given)}
    return replace(given, **{name: fenced(x, device) for name, x in made.items() if isinstance(x, torch.Tensor)})


def by_reference(given, wanted, dtype, differentiable=True):
    """What plain torch makes of it, computing in a dtype."""
    cast = {
        name: None if x is None else x.to(dtype)
        for name, x in ((name, getattr(given, name)) for name in ("new", "base", "ref", "weights", "advantages"))
    }
    count = given.new.shape[0] if given.offsets is None else given.offsets.shape[0] - 1
    offsets = None if given.offsets is None else given.offsets.long()
    batch = Batch(cast["new"], cast["new"], given.mask, offsets, count, lambda x: x, given.mask)
    batch.advantages, batch.per_sequence = cast["advantages"], given.per_sequence
    tensors = Tensors(cast["advantages"], cast["base"], cast["weights"], cast["ref"], given.trains)
    done = loss_run.run_whole(batch, tensors, wanted, differentiable, given.divisor)
    slope = None if done.gradient is None else loss_run.scaled(done.gradient, torch.ones(()), done.divisor, dtype)
    return done, slope


def by_kernels(given, wanted, device, differentiable=True):
    """What the kernels make of it, and the gradient that backward gives."""
    placed = on(given, device)
    with watched():
        found = kernels.run(placed, wanted, differentiable)
        if found.gradient is None:
            return found, None
        one = torch.ones((), device=device)
        kind = found.gradient.dtype
        return found, kernels.scale(found.gradient, found.inners, one, found.divisor, placed.offsets, kind).cpu()


# Counts are equal. The rest is as far from float64 as the float32 reference is: over these variants 1.8e-7 of a
# gradient and 8e-8 of a value for the reference, 1.7e-7 and 9e-8 for the kernels (of 1 where it is smaller, of 0.01
# for gradients), and 2.8e-7 of a sum, of what adds up at random. In float64 3e-15.
COUNTS = {"loss_valid_tokens", "loss_valid_sequences", "loss_tokens", "loss_sequences", "loss_tokens_nonfinite"}
COUNTS |= {"clip_low", "clip_high", "clip_dual"}
WITHIN = {torch.float32: (4e-7, 5e-7), torch.float64: (1e-13, 1e-13)}


def assert_close(got, wanted, within, floor, case):
    """Equal where infinite or NaN; otherwise off by a part of the wanted value, or of the floor."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    apart = (got - wanted).abs() / wanted.abs().clamp(min=floor)
    wrong = ~(same | (apart <= within))
    assert not wrong.any(), f"{got[wrong]} for {wanted[wrong]}, off by {apart[wrong]}: {case}"


def compare_with_reference(given, wanted, device, case, differentiable=True):
    """Kernels, reference in the same dtype, reference in float64."""
    found, slope = by_kernels(given, wanted, device, differentiable)
    kind = torch.float64 if given.double else torch.float32
    like, like_slope = by_reference(given, wanted, kind, differentiable)
    exact, exact_slope = by_reference(given, wanted, torch.float64, differentiable)
    of_gradient, of_sums = WITHIN[kind]
    names = (*loss_metrics.sum_names(wanted), *loss_metrics.max_names())
    for name, got, same, true in zip(names, found.statistics.cpu(), like.statistics, exact.statistics, strict=True):
        if name in COUNTS:
            assert got == same, f"{name}: {got} for {same}: {case}"
        else:
            size = max(1.0, exact.statistics[names.index("loss_valid_tokens")].item() ** 0.5)
            assert_close(got, true, of_sums, size, f"{name}: {case}")
    assert found.value.shape == () and found.divisor.item() == like.divisor.item()
    assert_close(found.value, exact.value, of_sums, 1.0, f"value: {case}")
    if slope is not None:
        assert torch.equal(slope == 0, like_slope == 0), case
        assert_close(slope, exact_slope, of_gradient, 0.01, f"gradient: {case}")


@pytest.mark.parametrize("name", LOSS_VARIANTS)
def test_variants(name, device):
    variant, seed = LOSS_VARIANTS[name], list(LOSS_VARIANTS).index(name)
    with shaped(SHAPES[variant.length]):
        given = tensors_of(variant, seed)
        compare_with_reference(given, variant.objective, device, f"{name} {seed}", variant.differentiable)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("name", LOSS_VARIANTS)
def test_variants_in_every_layout_and_shape(name, seed, device):
    variant = LOSS_VARIANTS[name]
    for packed, shapes in itertools.product((True, False), (NARROW, MIDDLE, WIDE, REAL)):
        with shaped(shapes):
            given = tensors_of(replace(variant, packed=packed), seed)
            compare_with_reference(given, variant.objective, device, f"{name} {seed}", variant.differentiable)


PLAIN = LOSS_VARIANTS["ppo_packed"]
OF_SEQUENCES = LOSS_VARIANTS["gspo"]


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0), (1,), (8,), (15, 1), (16, 16), (17, 0, 31), (300, 1, 2)])
def test_edges_of_tiles(lengths, device):
    for variant in (PLAIN, OF_SEQUENCES):
        for packed, shapes in ((True, NARROW), (False, WIDE), (True, REAL)):
            with shaped(shapes):
                given = tensors_of(replace(variant, packed=packed), 1, lengths)
                compare_with_reference(given, variant.objective, device, f"{variant.name} {lengths} {packed}")


def test_many_sequences(device):
    lengths = [(7 * i) % 5 for i in range(700)]
    for variant in (PLAIN, OF_SEQUENCES):
        with shaped(REAL):
            compare_with_reference(tensors_of(variant, 3, lengths), variant.objective, device, variant.name)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1, 1)])
def test_sizes_of_zero(shape, device):
    empty = torch.zeros(shape, device=device)
    offsets = torch.zeros(3, dtype=torch.int32, device=device) if len(shape) == 1 else None
    for variant in (PLAIN, OF_SEQUENCES):
        given = kernels.LossGiven(empty, empty, None, empty, False, empty, None, None, offsets, None)
        found, slope = by_kernels(given, variant.objective, device)
        assert found.value == 0.0 and slope.shape == empty.shape


# --- bits ---


def cut_out(given, s):
    """One sequence of a packed batch alone."""
    start, end = given.offsets[s].item(), given.offsets[s + 1].item()
    tokens = {name: getattr(given, name) for name in ("new", "base", "weights", "trains", "mask", "advantages")}
    cut = {name: x if x is None else x[start:end].clone() for name, x in tokens.items()}
    if given.per_sequence:
        cut["advantages"] = given.advantages[s : s + 1]
    return replace(given, **cut, offsets=torch.tensor([0, end - start], dtype=given.offsets.dtype)), start, end


@pytest.mark.parametrize("name", ["ppo_packed", "gspo", "gspo_token", "gmpo", "dppo_tv", "sapo"])
def test_a_gradient_does_not_hang_on_what_is_packed_around_it(name, device):
    """Before it is divided: to the bit, whatever the neighbours, the place and the tiles."""
    variant = replace(LOSS_VARIANTS[name], ref=None)
    wanted = replace(variant.objective, kl=None)
    given = tensors_of(variant, 5)
    with shaped(NARROW):
        together = kernels.run(on(given, device), wanted, True)
        again = kernels.run(on(given, device), wanted, True)
    for one, other in zip(vars(together).values(), vars(again).values(), strict=True):
        assert one is other is None or torch.equal(bits(one), bits(other))
    for s, shapes in itertools.product((0, 2, 6, 9), (MIDDLE, WIDE, REAL)):
        alone, start, end = cut_out(given, s)
        with shaped(shapes):
            found = kernels.run(on(alone, device), wanted, True)
        assert torch.equal(bits(found.gradient), bits(together.gradient[start:end])), (name, s)


@pytest.mark.parametrize("name", ["ppo_packed", "gspo", "gmpo"])
def test_garbage_behind_the_masks(name, device):
    """Nothing of it reaches a value, a statistic or a gradient, which is 0 there."""
    variant = LOSS_VARIANTS[name]
    made = tensors_of(variant, 5)
    found = []
    for garbage in GARBAGE:
        given = replace(made, **{f: getattr(made, f).clone() for f in ("new", "base", "weights")})
        for name in ("new", "base", "weights"):
            getattr(given, name)[given.mask == 0] = garbage
        with shaped(WIDE):
            found.append(kernels.run(on(given, device), variant.objective, True))
        assert not found[-1].gradient.cpu()[given.mask == 0].any()
    for other in found[1:]:
        for a, b in zip(vars(found[0]).values(), vars(other).values(), strict=True):
            assert a is b is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("nonfinite", ["neutral", "propagate"])
def test_nonfinite_policies(nonfinite, device):
    """A base that is not finite is read as new_logp, or poisons the value and the gradients that it has a part in."""
    for name in ("ppo_packed", "gspo", "gmpo", "dppo_tv", "dro"):
        variant = LOSS_VARIANTS[name]
        given = tensors_of(variant, 7)
        broken = (given.mask != 0).nonzero()[3]
        given.base[tuple(broken)] = -INF
        wanted = replace(variant.objective, nonfinite=nonfinite)
        with shaped(WIDE):
            found, slope = by_kernels(given, wanted, device)
        like, like_slope = by_reference(given, wanted, torch.float32)
        assert found.value.isfinite() == like.value.isfinite() and torch.equal(slope.isfinite(), like_slope.isfinite())
        known = slope.isfinite()
        assert_close(slope[known], like_slope[known], 1e-6, 0.01, name)


def test_odd_advantages(device):
    """A token whose advantage is NaN or infinite is left out and counted; so is a whole sequence of one."""
    for variant in (PLAIN, OF_SEQUENCES):
        given = tensors_of(variant, 5)
        plain = loss_metrics.sum_names(variant.objective).index("loss_tokens_nonfinite")
        before = by_reference(given, variant.objective, torch.float32)[0].statistics[plain]
        valid = (given.mask != 0).nonzero().squeeze(1)
        for place, odd in ((0, NAN), (2, INF)):
            given.advantages[place if given.per_sequence else valid[7 * place]] = odd
        assert by_reference(given, variant.objective, torch.float32)[0].statistics[plain] > before
        with shaped(WIDE):
            compare_with_reference(given, variant.objective, device, variant.name)


# --- as autograd and compilers meet them ---


def inputs(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    new = (-torch.rand(4, 48, generator=generator)).to(device, dtype).requires_grad_()
    old = new.detach() + 0.3 * torch.randn(4, 48, generator=generator).to(device, dtype)
    mask = (torch.rand(4, 48, generator=generator) < 0.8).to(device)
    return new, torch.randn(4, 48, generator=generator).to(device), mask, old


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_upstream_gradients(dtype, device):
    new, advantages, mask, old = inputs(device, dtype)
    options = {"old_logp": old, "backend": "triton", "reduction": "sequence_mean_token_mean"}
    value = rc.policy_loss(new, advantages, mask, **options).value
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    (one,) = torch.autograd.grad(value, new, retain_graph=True)
    assert one.dtype == dtype and torch.equal(torch.autograd.grad(value, new, retain_graph=True)[0], one)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0}
    for scaled, factor in ((value * 3.0, 3.0), (value.double() * 3.0, 3.0), (value.expand(5).sum(), 5.0)):
        (slope,) = torch.autograd.grad(scaled, new, retain_graph=True)
        torch.testing.assert_close(slope, one * factor, **close)
    (slope,) = torch.autograd.grad(value, new, torch.full((3,), 2.0, device=device, dtype=value.dtype)[1],
                                   retain_graph=True)  # fmt: skip
    assert torch.equal(slope, one * 2)
    with pytest.raises(RuntimeError, match="policy_loss: expected a backward pass without create_graph=True"):
        torch.autograd.grad(value, new, create_graph=True)
    with torch.no_grad():
        out = rc.policy_loss(new, advantages, mask, **options)
    assert torch.equal(out.value, value) and not out.value.requires_grad


def test_nothing_to_train_on(device):
    """0, and gradients of 0 that keep the graph."""
    new, advantages, mask, old = inputs(device)
    for name in ("ppo", "gspo", "gmpo"):
        out = rc.policy_loss(new, advantages, mask & False, old_logp=old, surrogate=SURROGATES[name], backend="triton")
        assert out.value == 0.0 and not torch.autograd.grad(out.value, new)[0].any()


@pytest.mark.parametrize("far", [200.0, -200.0, INF])
def test_extreme_ratios(far, device):
    for name in SURROGATES:
        new, advantages, mask, old = inputs(device)
        old[0, :3] = new.detach()[0, :3] - far
        out = rc.policy_loss(new, advantages, mask, old_logp=old, surrogate=SURROGATES[name], backend="triton")
        (slope,) = torch.autograd.grad(out.value, new)
        assert out.value.isfinite() and slope.isfinite().all(), name


SPEC = rc.Spec(rc.Weight("token", upper=1.5), (rc.Criterion("ratio", "sequence", "mean", 0.9, 1.1),))


def test_with_a_spec(device):
    """Correction, loss and gradient in one call, decoupled and in bypass mode."""
    new, advantages, mask, old = inputs(device)
    rollout = old + 0.1
    for options in ({"old_logp": old, "rollout_logp": rollout}, {"rollout_logp": rollout}):
        for spec in (SPEC, replace(SPEC, rejected="zero"), replace(SPEC, nonfinite="neutral")):
            found = []
            for backend in ("triton", "torch"):
                out = rc.policy_loss(new, advantages, mask, spec=spec, backend=backend, **options)
                found.append((out, torch.autograd.grad(out.value, new)[0]))
            (out, slope), (like, like_slope) = found
            torch.testing.assert_close(out.value, like.value, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(slope, like_slope, rtol=1e-6, atol=1e-9)
            assert torch.equal(out.mask, like.mask) and torch.equal(out.keep, like.keep)
            assert out.metrics().keys() == like.metrics().keys()


C = rc.Criterion
NEW_OLD, NEW_ROLLOUT = {"of": "new/old"}, {"of": "new/rollout"}
MEAN = {"over": "sequence", "reduce": "mean"}
OF_NEW = {
    "tokens of one": rc.Spec(rc.Weight("token", upper=1.5), (C("ratio", lower=0.8, upper=1.2, label="a", **NEW_OLD),)),
    "tokens of both": rc.Spec(
        None,
        (
            C("tv", upper=0.05, label="a", when="outward", **NEW_ROLLOUT),
            C("binary_kl", upper=0.1, label="b", drop="sequence", when="negative_advantage", **NEW_OLD),
            C("external", upper=1.0, name="entropy", label="c", **NEW_OLD),
        ),
        "both",
    ),
    "sequences": rc.Spec(
        rc.Weight("product", upper=2.0),
        (
            C("ratio", lower=0.8, upper=1.25, label="a", **MEAN, **NEW_OLD),
            C("k1", upper=0.1, label="b", when="negative_advantage", **MEAN, **NEW_OLD),
            C("abs", "sequence", "max", upper=0.7, label="c", when="outward", **NEW_ROLLOUT),
            C("k3", "sequence", "sum", upper=0.6, label="d", **NEW_ROLLOUT),
        ),
    ),
    "sums over survivors": rc.Spec(
        rc.Weight("geometric"),
        (
            C("ratio", lower=0.7, upper=1.3, label="a"),
            C("abs", upper=0.5, label="b", drop="sequence", **NEW_OLD),
            C("ratio", lower=0.9, upper=1.1, label="c", **MEAN, **NEW_ROLLOUT),
            C("ratio", "sequence", "min", lower=0.6, label="d", **NEW_OLD),
        ),
        "zero",
        sums_over="kept",
    ),
}


@pytest.mark.parametrize("nonfinite", ["reject", "neutral", "propagate"])
@pytest.mark.parametrize("name", OF_NEW)
def test_criteria_of_the_policy_that_trains(name, nonfinite, device):
    """The kernels of `correct` with a third log-prob: as the reference, masks and counts exactly."""
    spec = replace(OF_NEW[name], nonfinite=nonfinite)
    for packed, shapes, dtype, per in (
        (True, NARROW, torch.float64, "token"),
        (False, WIDE, torch.float32, "sequence"),
    ):
        variant = replace(PLAIN, packed=packed, new=dtype, base=dtype, ref=dtype, advantages=per)
        given = tensors_of(variant, 5)
        if nonfinite == "propagate":
            for x in (given.new, given.base, given.ref):
                x.nan_to_num_(nan=-1.0, neginf=-1.0)
        tensors = [fenced(x, device) for x in (given.new, given.advantages, given.mask)]
        options = {"old_logp": given.base, "rollout_logp": given.ref, "cu_seqlens": given.offsets}
        options = {key: fenced(x, device) for key, x in options.items()}
        if any(criterion.stat == "external" for criterion in spec.criteria):
            options["external"] = {"entropy": fenced(given.weights.to(dtype), device)}
        with shaped(shapes), unchecked(), watched():
            out = rc.policy_loss(*tensors, spec=spec, backend="triton", **options)
        like = rc.policy_loss(*tensors, spec=spec, backend="torch", **options)
        assert torch.equal(out.keep, like.keep) and torch.equal(out.mask, like.mask)
        assert 0 < out.metrics()["sequences_kept_fraction"] < 1 or 0 < out.metrics()["tokens_kept_fraction"] < 1
        within = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 4e-7, "atol": 4e-7}
        assert (out.weights is None) == (like.weights is None)
        if out.weights is not None:
            torch.testing.assert_close(out.weights, like.weights, **within)
        for key, wanted in like.metrics().items():
            assert math.isclose(out.metrics()[key], wanted, rel_tol=1e-5, abs_tol=1e-5), (key, name, nonfinite)


def test_bounds_are_inclusive_to_the_bit(device):
    """A log-ratio that is the bound's own is not clipped, the next one is: in float32, whatever its exponential."""
    low, high = float32_at_least(math.log(0.8)), float32_at_most(math.log(1.28))
    x = torch.tensor([high, low], dtype=torch.float32)
    beyond = torch.nextafter(x, x * 2)
    new = torch.cat([x, beyond]).to(device).requires_grad_()
    old, advantages = torch.zeros(4, device=device), torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    offsets = torch.tensor([0, 4], device=device)
    for surrogate, clipped in ((rc.PPO(0.2, 0.28), [0, 0, 1, 1]), (rc.Score(0.8, 1.28, "zero"), [0, 0, 1, 1])):
        for backend in ("triton", "torch"):
            out = rc.policy_loss(
                new, advantages, old_logp=old, cu_seqlens=offsets, surrogate=surrogate, backend=backend
            )
            (slope,) = torch.autograd.grad(out.value, new)
            assert (slope == 0).int().tolist() == clipped, (surrogate, backend)
            metrics = out.metrics()
            assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == 0.25


def test_what_the_kernels_cannot_do_is_refused(device):
    new, advantages, mask, old = inputs(device)
    far = C("ratio", upper=2.0, label="far", **NEW_OLD)
    late = rc.Spec(criteria=(replace(far, over="sequence", reduce="mean", drop="token"),))
    for spec, why in (
        (late, "criterion 'far' of new/old drops single tokens of sequences"),
        (rc.Spec(criteria=(far,), report=("native", "verl")), "criterion 'far' of new/old stands beside a peer's"),
    ):
        options = {"old_logp": old, "rollout_logp": old, "spec": spec}
        with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': {why}"):
            rc.policy_loss(new, advantages, mask, backend="triton", **options)
        assert rc.policy_loss(new, advantages, mask, **options).value.isfinite()
