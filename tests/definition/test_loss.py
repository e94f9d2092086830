"""`policy_loss` against the third oracle: every surrogate, mode, term, reduction, denominator and layout."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.loss_cases import COUNTED, SURROGATES, LaidLoss, check, compare, objective, only, random_batch
from builders.rounding import FORMULA, assert_near, near
from oracles import correction as oracle
from rollout_corr.specs.terms import KL_KINDS

pytestmark = pytest.mark.usefixtures("one_thread")

DECOUPLED = ("old", "weights", "train_mask")


BATCHES = [random_batch(0), random_batch(1, advantages="sequence"), random_batch(2, (3, 8, 2), scale=0.8)]


@pytest.mark.parametrize("name", ["ppo average", "ppo geometric", "score average", "score geometric"])
def test_both_ratios_of_an_average_are_clamped(name):
    """Log-ratios of 24 and 0 with a mean of 12: e^20 and e^12 are averaged, and not e^24 and e^12."""
    new = torch.tensor([[0.0, -24.0]], dtype=torch.float64)
    loss = rc.Loss(replace(SURROGATES[name], clamp=20.0))
    out = rc.policy_loss(new, torch.ones(1), loss=loss, old_logp=torch.full_like(new, -24.0))
    wanted = math.exp(16.0) if "geometric" in name else (math.exp(20.0) + math.exp(12.0)) / 2.0
    assert out.metrics()["surrogate_ratio_max"] == near(wanted, size=0.0)


def test_a_kl_over_micro_batches_has_a_call_of_its_own():
    """Its own mean is counted in each call, so the means of micro-batches are not parts of that of the batch."""
    torch.manual_seed(0)
    new, old, ref = (-torch.rand(6, 20, dtype=torch.float64) for _ in range(3))
    advantages, mask = torch.randn(6, 20, dtype=torch.float64), torch.rand(6, 20) < 0.8

    def sum_of_gradients(size, *calls):
        leaf = new.clone().requires_grad_()
        for rows in torch.arange(6).split(size):
            for factor, options in calls:
                given = {"mask": mask[rows], "old_logp": old[rows], "ref_logp": ref[rows], **options}
                rc.policy_loss(leaf[rows], factor * advantages[rows], **bundled_loss(**given)).value.backward()
        return leaf.grad

    by_rows = {"mean": rc.Mean("sequence", over="rows")}
    wanted = sum_of_gradients(6, (1.0, {"kl": rc.KL("k3", 0.3, **by_rows)}))
    apart = (1.0, {"kl": rc.KL("k3", 0.0), "total": mask.sum()})
    penalty = (0.0, {"kl": rc.KL("k3", 0.3), "mean": rc.Mean("sequence"), "total": 6})
    assert_near(sum_of_gradients(2, apart, penalty), wanted)
    inside = (1.0, {"kl": rc.KL("k3", 0.3, **by_rows), "total": mask.sum()})
    assert (sum_of_gradients(2, inside) - wanted).abs().max() > 0.1 * wanted.abs().max()


@pytest.mark.parametrize("layout", ["packed", "padded_right", "packed_gaps"])
def test_a_scale_per_sequence_is_a_denominator_of_each(layout):
    """PipelineRL divides by the tokens of a group of samples."""
    groups = [3.0, 3.0, 3.0, 5.0, 5.0, 5.0]
    batch = only(BATCHES[0], *DECOUPLED, "ref")
    wanted = objective("gspo", kl=rc.KL("k3", 0.3), mean=rc.Mean("sum"))
    scaled = [replace(q, scale=[1 / g] * len(q)) for q, g in zip(batch, groups, strict=True)]
    laid, options = LaidLoss(batch, layout), {"surrogate": SURROGATES["gspo"], "kl": wanted.kl, "mean": rc.Mean("sum")}
    by_group = 1.0 / torch.tensor(groups, dtype=torch.float64)
    for scale in (by_group, by_group[:, None]):
        out = laid(scale=scale, **options)
        compare(out, laid, scaled, wanted, layout)


def test_squares_and_penalties_saturate():
    """Differences of thousands: squares and KL terms run within +-1024, and pull no further beyond."""
    far = [
        replace(q, new=[x - (3000.0 if t % 2 else 2.0) * m for t, (x, m) in enumerate(zip(q.new, q.mask, strict=True))])
        for q in BATCHES[0]
    ]
    for name, kind in itertools.product(("dro", "dro sequence", "vespo"), KL_KINDS):
        wanted = objective(name, kl=rc.KL(kind, 0.1), regularizer=rc.SquaredLogRatio(0.1))
        check(only(far, *DECOUPLED, "ref"), wanted)


def test_tiny_steps_do_not_cancel():
    """After one small step k3 is 1e-9, far below the rounding of e^D: in the metric, the KL's value and its slope."""
    new = (-torch.rand(1, 64, generator=torch.Generator().manual_seed(0)) - 0.5).requires_grad_()
    ref = new.detach() + 2.0**-15
    k = (new.detach() - ref).double()
    term = rc.KL("k3", 1.0)
    out = rc.policy_loss(new, torch.zeros(1), loss=rc.Loss(mean=rc.Mean("sum"), kl=term), old_logp=ref, ref_logp=ref)
    assert_near(out.value.double(), (torch.expm1(-k) + k).sum(), torch.float32, FORMULA)
    slope = torch.autograd.grad(out.value, new)[0].double()
    assert_near(slope, -torch.expm1(-k), torch.float32, FORMULA)
    wanted = (torch.expm1(k) - k).mean().item()
    assert out.metrics()["kl_old_new_k3"] == near(wanted, torch.float32, size=0.0)


# --- modes and specs --------------------------------------------------------------------------------------------------

TIS = rc.Weight.token(upper=1.5)
GEOMETRIC = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.8, upper=1.3)
TOKEN = rc.Criterion("ratio", lower=0.6, upper=1.7)


def pair(sequences, numerator, denominator, criteria, spec):
    """The oracle's answer for one pair of policies."""
    rows = [oracle.Sequence(getattr(q, numerator), getattr(q, denominator), q.mask, q.advantages) for q in sequences]
    return oracle.correct(rows, replace(spec, criteria=criteria))


def corrected(sequences, spec, train, apply_weights):
    """Sequences with the weights and the training mask that the oracle of `correct` gives them."""
    names = {"train/rollout": (train, "rollout"), "new/rollout": ("new", "rollout"), "new/old": ("new", "old")}
    answers = [
        pair(sequences, *names[of], tuple(c for c in spec.criteria if c.of == of), spec)
        for of in names
        if of == "train/rollout" or any(c.of == of for c in spec.criteria)
    ]
    made = []
    for s, q in enumerate(sequences):
        alive = [not any(answer.rejected[s][t] for answer in answers) for t in range(len(q))]
        main = answers[0].weights
        weights = None
        if main is not None and apply_weights:
            zeroes = spec.rejected != "mask"
            weights = [w if alive[t] or not zeroes else 0.0 for t, w in enumerate(main[s])]
        elif spec.rejected != "mask":
            weights = [float(x) for x in alive]
        trains = alive if spec.rejected != "zero" else [True] * len(q)
        made.append(replace(q, weights=weights, train_mask=trains))
    return made


SPECS = {
    "metrics": rc.Spec(),
    "weight": rc.Spec(TIS),
    "product": rc.Spec(rc.Weight.product(lower=0.5, upper=2.0), (GEOMETRIC,)),
    "icepop": rc.Spec(rc.Weight.token(lower=0.7, upper=1.4, outside="zero"), rejected="both"),
    "zero": rc.Spec(TIS, (TOKEN, GEOMETRIC), "zero"),
    "both": rc.Spec(None, (TOKEN,), "both"),
    "new": rc.Spec(
        TIS, (GEOMETRIC, replace(TOKEN, of="new/rollout", label="a"), replace(TOKEN, of="new/old", label="b"))
    ),
    "opsm": rc.Spec(
        TIS,
        (
            rc.Criterion(
                "k1", over="sequence", reduce="mean", upper=0.05, when="negative_advantage", of="new/old", label="opsm"
            ),
        ),
        "zero",
    ),
}


def check_spec(batch, name, surrogate, train, **options):
    """The fused call equals the oracle's loss on the oracle's correction."""
    spec = SPECS[name]
    laid = LaidLoss(batch, options.pop("layout", "packed"))
    kind = SURROGATES[surrogate]
    multiplied = train == "old" or isinstance(kind, (rc.Score, rc.GPG, rc.DRO, rc.DPPO))
    ready = corrected(batch, spec, train, multiplied)
    in_place = train == "new" and isinstance(kind, (rc.Score, rc.DPPO)) and spec.weight is not None
    out = laid(spec=spec, surrogate=kind, **options)
    wanted = objective(surrogate, weights_are_the_ratio=in_place, **options)
    compare(out, laid, ready, wanted, (name, surrogate, train))
    return laid, out


@pytest.mark.parametrize("over", COUNTED)
@pytest.mark.parametrize("name", SPECS)
def test_a_spec_corrects_from_old_and_rollout(name, over):
    for i, surrogate in enumerate(("ppo dual", "gspo", "score", "gmpo")):
        batch = BATCHES[i % 3]
        laid, out = check_spec(only(batch, "old", "rollout"), name, surrogate, "old", mean=rc.Mean(over=over))
        if name in ("new", "opsm"):
            continue
        apart = rc.correct(
            laid.arguments["old_logp"],
            laid.arguments["rollout_logp"],
            mask=laid.laid.mask,
            cu_seqlens=laid.laid.cu_seqlens,
            spec=SPECS[name],
        )
        options = {"rollout_logp": None, "surrogate": SURROGATES[surrogate], "mean": rc.Mean(over=over)}
        assert torch.equal(laid(correction=apart, **options).value, out.value)
        assert torch.equal(laid(weights=apart.weights, train_mask=apart.mask, **options).value, out.value)
        assert torch.equal(out.keep, apart.keep)
        assert (out.weights is None) == (apart.weights is None)
        assert out.weights is None or torch.equal(out.weights, apart.weights)
        assert out.mask.tolist() == apart.mask.tolist()
        assert apart.metrics().items() <= out.metrics().items()


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("new", "opsm")])
def test_bypass(name):
    """PPO and its kin are not multiplied by the weight, Score and DPPO take it as their ratio, GPG and DRO need it."""
    kinds = "ppo", "gspo", "reinforce", "sapo", "gmpo", "gpg", "dro", "score", "dppo tv"
    for i, surrogate in enumerate(kinds):
        check_spec(only(BATCHES[i % 3], "rollout"), name, surrogate, "new")


def test_in_bypass_mode_new_is_train():
    """A criterion of new/rollout is then one of train/rollout, under its own label."""
    criterion = replace(TOKEN, of="new/rollout", label="token")
    for batch in BATCHES:
        laid = LaidLoss(only(batch, "rollout"), "padded_right")
        one = laid(spec=rc.Spec(criteria=(criterion,)))
        other = laid(spec=rc.Spec(criteria=(replace(TOKEN, label="token"),)))
        assert torch.equal(one.value, other.value) and one.metrics() == other.metrics()
        assert one.statistics.spec == rc.Spec(criteria=(criterion,))


def test_sums_over_survivors_run_over_those_of_every_pair():
    """A token that a criterion of old/rollout drops is not in the sum of one of new/rollout."""
    rollout = torch.full((1, 4), -1.0)
    old, new = rollout.clone(), rollout.clone()
    old[0, 0], new[0, 0] = -3.0, -9.0
    mean = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.5, of="new/rollout", label="mean")
    for sums_over, kept in (("valid", False), ("kept", True)):
        spec = rc.Spec(criteria=(TOKEN, mean), sums_over=sums_over)
        out = rc.policy_loss(new, torch.ones(1), old_logp=old, rollout_logp=rollout, spec=spec)
        assert out.keep.tolist() == [kept] and out.mask.tolist() == [[False, kept, kept, kept]]


def test_of_overrules_the_mode():
    """With both log-probs there, of="new/rollout" anchors the ratio at the engine: MiniRL, SkyRL's cispo_anchor."""
    for batch in BATCHES:
        anchored = replace(SURROGATES["ppo"], of="new/rollout")
        laid, alone = LaidLoss(only(batch, "old", "rollout"), "packed"), LaidLoss(only(batch, "rollout"), "packed")
        assert torch.equal(laid(surrogate=anchored).value, alone().value)
        spec = rc.Spec(TIS, (replace(TOKEN, of="new/old"),))
        assert torch.isfinite(laid(surrogate=anchored, spec=spec).value)


def test_advantages_of_when_are_those_of_the_loss():
    batch = only(BATCHES[1], "rollout")
    criterion = rc.Criterion("prob_diff", lower=-0.05, upper=0.05, when="outward", of="new/rollout", label="dppo")
    laid = LaidLoss(batch, "padded_right")
    out = laid(spec=rc.Spec(criteria=(criterion,), rejected="zero"), surrogate=rc.Reinforce())
    assert 0.0 < out.metrics()["dppo/tokens_rejected_fraction"] < 1.0


@pytest.mark.parametrize("name", rc.spec_names())
def test_every_preset_runs_in_the_loss(name):
    """Those that need the policy being trained run here alone."""
    spec = rc.spec(name)
    generator = torch.Generator().manual_seed(0)
    new, old, rollout = (-torch.rand(3, 6, generator=generator) for _ in range(3))
    options = {"old_logp": old, "rollout_logp": rollout, "spec": spec}
    if spec.reads_versions:
        options |= {"versions": torch.tensor([3, 6, 7]), "current_version": 7}
    if spec.measures_turns:
        options["turns"] = "runs"
    out = rc.policy_loss(new.requires_grad_(), torch.tensor([1.0, -1.0, 0.5]), **bundled_loss(**options))
    out.value.backward()
    assert out.value.isfinite() and new.grad.isfinite().all()
    assert all(f"{criterion.label}/mean" in out.metrics() for criterion in spec.criteria)
    of_new = [criterion for criterion in spec.criteria if criterion.of != "train/rollout"]
    if of_new:
        with pytest.raises(ValueError, match=rf"^spec: criterion '{of_new[0].label}' compares {of_new[0].of}"):
            rc.correct(old, rollout, spec=spec)
