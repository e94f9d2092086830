"""The kernels on prefixes: against the definition and the oracle in loops, and bit by bit against one another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, error, lay_out, random_sequences, spoil
from builders.kernel_cases import (
    INTERPRETED,
    MIDDLE,
    NARROW,
    WIDE,
    assert_like_reference,
    between_fences,
    bits,
    check,
    flat,
    shaped,
    unchecked,
    watched,
)
from builders.prefixes import made
from builders.turns import loss_of, offsets_of, random_turns
from rollout_corr.aot.prefix_variants import PREFIX_VARIANTS
from rollout_corr.backends import operators
from rollout_corr.backends.whole import run_whole
from rollout_corr.spec.choices import PREFIX_REDUCTIONS

pytestmark = INTERPRETED

SHAPES = (NARROW, MIDDLE, WIDE)
C, W = rc.Criterion, rc.Weight
DIVERGENCE = C("abs", "prefix", "max", upper=0.3, drop="rest", label="divergence")
BUDGET = C("tv", "prefix", "mean", upper=0.05, label="budget")
# Every way in which a prefix decides: a weight, single tokens, the rest, sequences, by sums, means and extrema.
SPECS = (
    rc.Spec(W("prefix", 0.8, 1.25, growth="sqrt"), rejected="zero"),
    rc.Spec(W("prefix", 0.9, 1.1, outside="zero", reduce="min"), (DIVERGENCE, BUDGET), rejected="both"),
    rc.Spec(
        W("prefix", reduce="mean"),
        (C("ratio", "prefix", "sum", upper=1.1, growth="sqrt"), replace(DIVERGENCE, when="negative_advantage")),
    ),
    rc.Spec(
        W("product", upper=2.0),
        (C("k3", "prefix", "sum", upper=0.3, drop="rest"), C("k1", upper=0.3), C("k2", "sequence", "sum", upper=0.9)),
        rejected="both",
        sums_over="kept",
    ),
    rc.Spec(W("token", upper=2.0), (C("ratio", "prefix", "min", lower=0.6, drop="sequence"), DIVERGENCE)),
    # A token rejects its sequence, whose prefixes then run over nothing, also those on tiles before it.
    rc.Spec(
        W("prefix", 0.9, 1.1, growth="sqrt"),
        (
            C("abs", upper=0.75, drop="sequence", label="veto"),
            C("k1", upper=0.3, label="token"),
            C("ratio", "prefix", "mean", upper=1.1, drop="rest", label="mean"),
            C("k2", "prefix", "max", upper=0.2, label="max"),
        ),
        sums_over="kept",
    ),
)


def by_kernels(laid, spec, device, shapes=WIDE, seed=0, **given):
    """A correction by the kernels, between fences, programs in an order that the seed decides."""
    with shaped(shapes), watched(seed=seed):
        return between_fences(laid, device).correct(spec, backend="triton", **given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_random_specs_in_every_layout(layout, seed, device):
    """Weights, masks, verdicts and statistics, also of NaN, infinity and outliers, in every dtype."""
    batch, spec = made(100 + 10 * LAYOUTS.index(layout) + seed)
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.float16)[seed]
    laid = lay_out(batch, layout, dtype)
    out = by_kernels(laid, spec, device, SHAPES[seed % 3], seed)
    assert_like_reference(out, laid.correct(spec), f"{layout} {dtype} {spec!r}")


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_against_the_oracle_in_loops(number, device):
    """Decisions exactly, weights and metrics to the error of float32; sequences of one token, of many tiles, empty."""
    batch = spoil(random_sequences(number, (5, 1, 9, 0, 7, 8, 17, 1, 16, 30), advantages="token"), number)
    layout = ("packed_gaps", "padded_left", "packed", "padded_right")[number % 4]
    with shaped(SHAPES[number % 3]):
        check(batch, SPECS[number], layout, device)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_the_last_prefix_has_the_bits_of_the_sequence(reduce, device):
    batch = random_sequences(7, (5, 1, 40, 0, 17), invalid=0.0)
    laid = lay_out(batch, "packed", torch.float32)
    level = {"sum": "product", "mean": "geometric"}[reduce]
    one = by_kernels(laid, rc.Spec(W("prefix", 0.5, 2.0, reduce=reduce)), device).weights.cpu()
    other = by_kernels(laid, rc.Spec(W(level, 0.5, 2.0)), device).weights.cpu()
    last = [places[-1] for places in laid.places if places]
    assert bits(one[last]).equal(bits(other[last]))


def test_the_last_prefix_of_a_turn_has_its_bits(device):
    batch = random_sequences(7, (5, 1, 40, 0, 17), invalid=0.0)
    laid, turns = lay_out(batch, "packed", torch.float32), random_turns(batch, 7)
    offsets = offsets_of(laid, turns)
    one = by_kernels(laid, rc.Spec(W("prefix", 0.5, 2.0, over="turn")), device, turns=offsets).weights.cpu()
    other = by_kernels(laid, rc.Spec(W("product", 0.5, 2.0, over="turn")), device, turns=offsets).weights.cpu()
    last = [end - 1 for begin, end in itertools.pairwise(offsets.tolist()) if begin < end]
    assert bits(one[last]).equal(bits(other[last]))


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_no_bit_depends_on_tiles_or_neighbours(number, device):
    """Another tile, another order of programs, another start: the same weights, masks and verdicts."""
    spec, batch = SPECS[number], random_sequences(number, (3, 40, 1, 18), advantages="token")
    laid = lay_out(batch, "packed", torch.float32)
    one, other = by_kernels(laid, spec, device, NARROW), by_kernels(laid, spec, device, MIDDLE, seed=5)
    for got, wanted in ((other.weights, one.weights), (other.mask, one.mask), (other.keep, one.keep)):
        assert bits(got).equal(bits(wanted))
    turned = lay_out([batch[1], batch[3], batch[0], batch[2]], "packed_gaps", torch.float32)
    other = by_kernels(turned, spec, device, WIDE)
    for name in ("weights", "mask"):
        got, wanted = getattr(other, name).cpu(), getattr(one, name).cpu()
        for here, there in ((0, 1), (1, 3), (2, 0), (3, 2)):
            assert bits(got[turned.places[here]]).equal(bits(wanted[laid.places[there]]))


def test_a_sequence_of_more_tiles_than_are_added_up_at_a_time(device):
    """The first tile's failure takes the last one's tokens, and sums of 40 tiles come to the last."""
    batch = random_sequences(3, (3, 330, 2), scale=0.02)
    for layout, spec in (
        ("packed", rc.Spec(W("prefix", 0.9, 1.1), (replace(DIVERGENCE, upper=0.05, when="any"),))),
        (
            "padded_right",
            rc.Spec(W("prefix", reduce="min"), (replace(DIVERGENCE, upper=0.03, when="any"),), rejected="both"),
        ),
    ):
        laid = lay_out(batch, layout, torch.float32)
        assert_like_reference(by_kernels(laid, spec, device, WIDE), laid.correct(spec), layout)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 3, 0)])
def test_nothing_to_train_on(lengths, device):
    batch = random_sequences(3, lengths, invalid=1.0, advantages="token")
    for layout in ("packed_gaps", "padded_right"):
        laid = lay_out(batch, layout, torch.float32)
        for spec in SPECS[1:3]:
            assert_like_reference(by_kernels(laid, spec, device), laid.correct(spec), layout)


@pytest.mark.parametrize("offsets", [[0, 20, 3, 29], [29, 0, 7, 29], [-4, 3, 60, 70], [5, 9, 9, 2**31 - 1]])
def test_wrong_offsets_stay_within_the_batch(offsets, device):
    """Nobody reads offsets of a device: what falls, overlaps or lies outside gives wrong numbers and nothing else."""
    laid = lay_out(random_sequences(2, (5, 1, 7, 0, 4, 12), advantages="token"), "packed", torch.float32)
    wrong = replace(laid, cu_seqlens=torch.tensor(offsets, dtype=laid.cu_seqlens.dtype))
    for spec in SPECS[1:4]:
        with shaped(WIDE), unchecked(), watched(races=False):
            out = between_fences(wrong, device).correct(spec, backend="triton")
        assert set(bits(out.keep.cpu()).tolist()) <= {0, 1}


@pytest.mark.parametrize("name", PREFIX_VARIANTS)
def test_prefixes_take_one_pass_more(name):
    launches = PREFIX_VARIANTS[name].launches()
    names = [launch.kernel.__name__ for launch in launches]
    applies = launches[-1].arguments["PLAN"].applies
    gather = ["gather_kernel"] * launches[0].arguments["PLAN"].rejects_before
    assert names == ["read_kernel", *gather, "read_kernel", "decide_kernel", *["apply_kernel"] * applies]
    ahead = launches[0].arguments["PLAN"]
    assert (
        ahead.carries
        and not ahead.token_sums
        and not ahead.token_maxima
        and ahead == launches[1 + len(gather)].arguments["PLAN"].ahead
    )


def test_criteria_of_one_quantity_share_its_scan():
    """CTPO's three clips test one running sum; a weight that sums up the same runs along with them."""
    clips = [
        C("ratio", "prefix", "sum", upper=1.2, when="positive_advantage", label="high"),
        C("ratio", "prefix", "mean", lower=0.8, when="negative_advantage", label="low"),
        C("k1", "prefix", "sum", upper=0.2, label="other"),
    ]
    for weight, columns in ((None, ("0/along", "2/along")), (W("prefix"), ("weight", "2/along"))):
        plan = operators_plan(rc.Spec(weight, clips))
        assert plan.ahead.integers == columns and plan.ahead.counts == ("valid", "places0")
    assert operators_plan(rc.Spec(W("prefix", token_clamp=2.0), clips)).ahead.integers == (
        "weight",
        "0/along",
        "2/along",
    )
    assert operators_plan(rc.Spec(W("token"), (C("k1", upper=0.2),))).ahead is None


def operators_plan(spec):
    return replace(PREFIX_VARIANTS["prefix_mixed"], spec=spec).launches()[-1].arguments["PLAN"]


def test_the_operator_runs_them(device):
    """The operator that a compiler calls with tensors of a GPU gives what the reference gives."""
    laid = lay_out(random_sequences(2, (5, 1, 7, 0, 4, 12), advantages="token"), "packed", torch.float32).to(device)
    given = laid.train, laid.rollout, laid.mask, laid.cu_seqlens, laid.advantages, False, [], None, None, False, None
    operands = operators.CorrectOperands(*given)
    for spec in SPECS[1:3]:
        found, wanted = operators._kernels(operands, spec), operators._plain(operands, spec, run_whole)
        assert found.mask.equal(wanted.mask) and found.keep.equal(wanted.keep)
        assert torch.allclose(found.weights, wanted.weights, rtol=3e-7, atol=0)
        assert torch.allclose(found.statistics, wanted.statistics, rtol=1e-5, atol=1e-6)


def test_labels_beside_them_come_from_the_definition(device):
    laid = lay_out(random_sequences(2, (5, 1, 7, 0, 4, 12), advantages="token"), "packed", torch.float32)
    labels = {"labels": {"task": torch.tensor([0, 1, 0, 1, 1, 0])}, "label_names": {"task": 2}}
    out, wanted = by_kernels(laid, SPECS[1], device, **labels), laid.correct(SPECS[1], **labels)
    assert out.mask.cpu().equal(wanted.mask)
    found, by = out.metrics(by="task"), wanted.metrics(by="task")
    assert {key: (found[key], x) for key, x in by.items() if error(found[key], x) > 1e-5} == {}


def test_what_they_leave_to_plain_torch_is_refused_by_name():
    laid = lay_out(random_sequences(2, (5, 1, 7), advantages="token"), "packed", torch.float32)
    before = C("k1", upper=0.3, drop="sequence", label="before")
    turns = {"turns": laid.cu_seqlens}
    cases = (
        (rc.Spec(W("prefix"), (before,), sums_over="kept"), turns, "beside turns criterion 'before' rejects sequences"),
    )
    for spec, given, why in cases:
        with pytest.raises(ValueError, match=f"backend: expected 'auto' or 'torch', got 'triton': .*{why}"):
            laid.correct(spec, backend="triton", **given)
    assert operators.beyond_kernels(rc.Spec(W("prefix", over="turn"))) is None
    assert operators.beyond_kernels(rc.Spec(W("prefix"), (before,))) is None


# Along turns, along sequences past their turns, and along both; with empty turns wherever they can be. What fails may
# pass again behind, so that a rest is more than the tokens that fail.
TURNS = (
    rc.Spec(W("prefix", 0.8, 1.25, over="turn", growth="sqrt"), rejected="zero"),
    rc.Spec(
        W("prefix", 0.9, 1.1, outside="zero", reduce="min"),
        (C("ratio", "prefix", "mean", upper=1.1, within="turn", drop="sequence"), C("k3", "turn", "max", upper=0.2)),
        rejected="both",
    ),
    rc.Spec(
        W("prefix", reduce="mean", over="turn"),
        (
            C("ratio", "prefix", "sum", upper=1.2, growth="sqrt", label="sequence"),
            C("ratio", "prefix", "sum", upper=1.1, growth="sqrt", within="turn", label="turn"),
            C("abs", "prefix", "max", upper=0.5, when="negative_advantage", label="max"),
            C("k1", upper=0.4, label="token"),
        ),
        rejected="both",
        sums_over="kept",
    ),
    rc.Spec(W("product", over="turn"), (C("k2", "prefix", "mean", upper=0.1, label="mean"), BUDGET)),
    rc.Spec(
        W("token", upper=2.0),
        (
            replace(DIVERGENCE, within="turn", when="negative_advantage", upper=0.5),
            C("k1", "prefix", "sum", upper=0.5, drop="rest", label="sum"),
            C("ratio", "turn", "mean", upper=1.3, label="mean"),
            C("k2", "sequence", "sum", upper=0.9, drop="token", when="negative_advantage", label="late"),
        ),
        rejected="both",
    ),
    rc.Spec(
        W("geometric", over="turn"),
        (replace(DIVERGENCE, when="negative_advantage", upper=0.5), C("k1", upper=0.6)),
        sums_over="kept",
    ),
    rc.Spec(
        criteria=(
            C("k1", "prefix", "mean", upper=0.3, drop="rest", within="turn", label="turn"),
            replace(BUDGET, drop="rest", when="positive_advantage", upper=0.12),
        )
    ),
)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 21))])
def test_beside_turns(seed, device):
    spec, place = TURNS[seed % 7], seed % 3
    batch = spoil(random_sequences(seed, (5, 1, 9, 0, 40, 17, 2), advantages="token"), seed)
    lengths = [[0, *row, 0, 0] for row in random_turns(batch, seed)]
    layout = LAYOUTS[seed % len(LAYOUTS)]
    laid = lay_out(batch, layout, (torch.float32, torch.bfloat16, torch.float64)[place])
    turns = offsets_of(laid, lengths)
    out, wanted = by_kernels(laid, spec, device, SHAPES[place], seed, turns=turns), laid.correct(spec, turns=turns)
    assert_like_reference(out, wanted, f"{layout} {spec!r}")
    assert out.keep_turns.cpu().equal(wanted.keep_turns)


OF_NEW = (
    C("ratio", "prefix", "mean", lower=0.9, upper=1.15, of="new/old", label="mean"),
    C("k3", "prefix", "max", upper=0.3, of="new/rollout", drop="rest", when="negative_advantage", label="rest"),
)


@pytest.mark.parametrize("layout", ["packed_gaps", "padded_right"])
def test_a_loss_corrects_by_prefixes(layout):
    laid = lay_out(random_sequences(4, (5, 1, 7, 0, 4, 12), advantages="token"), layout, torch.float32)
    spec = rc.Spec(W("prefix", 0.8, 1.25), (*OF_NEW, C("abs", upper=0.5)), rejected="both", sums_over="kept")
    with shaped(WIDE):
        found, slope = loss_of(laid, "triton", spec)
    wanted, wanted_slope = loss_of(laid, "torch", spec)
    assert found.mask.equal(wanted.mask) and not found.mask.equal(laid.mask)
    for got, expected in zip(flat(found.weights), flat(wanted.weights), strict=True):
        torch.testing.assert_close(got, expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope, wanted_slope, rtol=1e-5, atol=1e-8)


def test_every_reduction_of_a_weight_is_declared():
    weights = [variant.spec.weight or W("token") for variant in PREFIX_VARIANTS.values()]
    assert {weight.reduce for weight in weights if weight.level == "prefix"} == set(PREFIX_REDUCTIONS)
