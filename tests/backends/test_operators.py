"""The kernels as an operator: what a compiler sees, what is launched, and what is in a compile key."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.launches import FREE, Operations, key
from builders.rounding import assert_near
from rollout_corr.backends import operators
from rollout_corr.backends.batch import external_names
from rollout_corr.backends.operators import beyond_kernels
from rollout_corr.kernels.correct import launch as kernels
from rollout_corr.kernels.correct.planner import plan_of
from rollout_corr.kernels.correct.units import thinning_bit
from rollout_corr.specs.encode import decode, encode
from rollout_corr.specs.operands import CorrectOperands

C = rc.Criterion
GEOMETRIC = C("ratio", over="sequence", reduce="mean", lower=0.9, upper=1.1)
SPECS = {
    "metrics": rc.Spec(),
    "token": rc.Spec(weight=rc.Weight.token(upper=1.3), criteria=(GEOMETRIC,), rejected="both"),
    "normalized": rc.Spec(weight=rc.Weight.product(upper=2.0, normalize="batch"), detail="full"),
    "decided": rc.Spec(rc.Weight.token(upper=rc.Quantile(0.9)), (C("abs", upper=rc.Quantile(0.8)),)),
    "external": rc.Spec(criteria=(C("external", name="entropy", upper=0.1), C("abs", upper=math.inf, label='a"\\'))),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """The functions that these tests compile share their code, and a code has a limit of recompilations."""
    torch.compiler.reset()


def inputs(tokens=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(tokens, generator=generator)
    train = rollout + 0.3 * torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.2
    return train, rollout, mask, torch.tensor([0, 7, 7, tokens // 2, tokens])


def given(spec, device="cpu", tokens=40, sequences=4, packed=True):
    """Make the input of the kernels, with everything on a device."""
    shape = (tokens,) if packed else (sequences, tokens)
    empty = torch.zeros(shape, device=device)
    offsets = torch.arange(sequences + 1, device=device) * (tokens // sequences) if packed else None
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    return CorrectOperands(empty, empty, mask, offsets, None, False, [empty for _ in external_names(spec)])


def prepared(spec, **batch):
    return kernels.prepare(given(spec, **batch), spec)[1]


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_the_operator(name):
    assert decode(*encode(SPECS[name])) == SPECS[name]


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if beyond_kernels(spec) is None])
def test_operator_keeps_its_promises(name):
    train, rollout, mask, offsets = inputs()
    spec = SPECS[name]
    external = [torch.zeros(40) for _ in external_names(spec)]
    text = encode(spec)
    rows = [x.view(4, 10) for x in (train, rollout, *external)]
    for arguments in (
        (train, rollout, mask, offsets, None, False, external, None, None, False, None, *text),
        (train, rollout, mask, offsets, None, False, external, None, None, False, TURNS, *text),
        (*rows[:2], None, None, None, False, rows[2:], None, -rows[0].abs(), True, None, *text),
    ):
        torch.library.opcheck(torch.ops.rollout_corr.correct, arguments)


@pytest.mark.parametrize("packed", [True, False])
def test_a_compiler_is_told_what_the_kernels_give(packed, device):
    """Shapes and dtypes, with a mask and without one, which the kernels then write for packed sequences."""
    for spec in (SPECS["metrics"], SPECS["token"]):
        operands = given(spec, device, tokens=16, packed=packed)
        for one in (operands, replace(operands, mask=None)):
            found, told = operators._kernels(one, spec), operators._shapes(one, spec)
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in told]


@pytest.mark.slow  # a loss, whose graph has a backward pass, is compiled so in test_loss_operators.py
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["normalized", "token", "metrics"])
def test_no_graph_break(name, backend):
    """A whole training step's worth of it, packed and padded, with lengths that change."""
    spec = SPECS[name]

    def step(train, rollout, mask, cu_seqlens):
        out = rc.correct(train, rollout, mask=mask, cu_seqlens=cu_seqlens, spec=spec)
        weights = torch.zeros(1) if out.weights is None else out.weights * 2
        return weights, out.mask & True, out.keep, out.statistics.sums + 0

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (40, 64):
        train, rollout, mask, offsets = inputs(tokens, seed=tokens)
        for arguments in ((train, rollout, mask, offsets), (*(x.view(4, -1) for x in (train, rollout, mask)), None)):
            for got, wanted in zip(compiled(*arguments), step(*arguments), strict=True):
                assert torch.equal(got, wanted)


TURNS = torch.tensor([0, 3, 7, 7, 12, 20, 40])
# What a compiled function may be given beyond a mask and offsets.
GIVEN = {
    "turns": (
        rc.Spec(
            rc.Weight.geometric(over="turn"),
            (C("k3", "turn", "mean", upper=0.05), C("abs", "sequence", "max", upper=0.9, drop="token")),
            rejected="both",
        ),
        {"turns": TURNS},
    ),
    "labels": (SPECS["metrics"], {"labels": {"task": rc.Labels(torch.tensor([0, 1, 1, 0]), 2)}}),
    "a bound of the batch": (SPECS["decided"], {}),
    "groups": (
        rc.Spec(rc.Weight.token(upper=2.0, normalize="group"), (C("ratio", lower=0.6),), rejected="both"),
        {"groups": rc.Groups(index=torch.tensor([0, 1, 0, 1]))},
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_compiled_function_gives_the_same(name):
    """And torch says nothing: it would warn of a cache that it follows, which is an error in these tests."""
    (train, rollout, mask, offsets), (spec, more) = inputs(), GIVEN[name]

    def step(train, rollout, mask):
        out = rc.correct(train, rollout, rc.Batch(mask=mask, cu_seqlens=offsets, **more), spec=spec)
        return out.mask, out.keep, out.statistics.sums, torch.zeros(1) if out.weights is None else out.weights

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for found, wanted in zip(compiled(train, rollout, mask), step(train, rollout, mask), strict=True):
        assert_near(found.double(), wanted.double(), torch.float32)


def test_a_spec_made_or_changed_inside_a_compiled_function_is_not_stale():
    train, rollout, mask, offsets = inputs()

    def made(upper):
        spec = rc.Spec(weight=rc.Weight.token(upper=upper))
        return rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec).weights

    def taken(spec):
        return rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec).weights

    inside, outside = (torch.compile(f, fullgraph=True, backend="eager") for f in (made, taken))
    for upper in (2.0, 1.05, 1.2):
        assert torch.equal(inside(upper), made(upper))
        assert torch.equal(outside(rc.Spec(weight=rc.Weight.token(upper=upper))), made(upper))
    assert not torch.equal(made(2.0), made(1.05))


@pytest.mark.parametrize("name", SPECS)
def test_two_launches_or_three_and_nothing_else(name):
    """A third where sequences are weighed or thinned. On meta tensors nothing has a value, so who reads one fails."""
    spec = SPECS[name]
    for packed in (True, False):
        for tokens, sequences in ((64, 1), (4096, 4), (1_000_000, 100_000)):
            if not packed:
                tokens, sequences = 64, sequences
            batch = given(spec, "meta", tokens, sequences, packed)
            kernels.prepare(batch, spec)  # the thresholds are on the device from here on
            with Operations() as operations:
                launches = kernels.prepare(batch, spec)[1]
            weighs = spec.weight is not None and spec.weight.over != "token"
            third = weighs or any(criterion.thins for criterion in spec.criteria)
            names = ["read_kernel", "decide_kernel", *["apply_kernel"] * third]
            assert [launch.kernel.__name__ for launch in launches] == names
            assert set(operations.names) - FREE <= ({"zeros", "zero_"} if spec.detail == "full" else set())


def test_sizes_beyond_32_bits():
    """More than 2^31 tokens, and more sequences than a second grid axis would hold, in one axis."""
    for tokens, sequences in ((3 << 30, 7), (1 << 31, 1 << 20)):
        read, decide, apply = prepared(SPECS["normalized"], device="meta", tokens=tokens, sequences=sequences)
        assert all(0 < launch.programs < 2**31 for launch in (read, decide, apply))
        tiles = tokens >> read.arguments["tile_bits"]
        assert read.programs == tiles + 1 and read.arguments["slots"] == tiles + sequences + 2
        assert apply.programs == read.programs


def test_no_length_is_in_a_compile_key():
    for packed, pairs in ((True, ((4096, 3), (8192, 2), (70_001, 5))), (False, ((2048, 3), (4096, 1), (8192, 70)))):
        keys = [
            [key(launch) for launch in prepared(SPECS["token"], device="meta", tokens=t, sequences=s, packed=packed)]
            for t, s in pairs
        ]
        assert keys[0] == keys[1] == keys[2]


def test_thresholds_and_labels_are_not_in_a_compile_key():
    one = rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(C("abs", upper=1.0),))
    other = rc.Spec(weight=rc.Weight.token(upper=5.0), criteria=(C("abs", upper=0.3, label="mine"),), clamp=7.0)
    third = rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(C("abs", lower=1.0, over="sequence", reduce="max"),))
    keys = [[key(launch) for launch in prepared(spec, device="meta")] for spec in (one, other, third)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.gpu
def test_graph_capture_stream_and_no_sync():
    """Captured after one call, replayed with other inputs, on a stream of its own, without waiting."""
    spec = SPECS["token"]
    static = [x.cuda() for x in inputs(50_000)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        rc.correct(*static[:2], mask=static[2], cu_seqlens=static[3], spec=spec)
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rc.correct(*static[:2], mask=static[2], cu_seqlens=static[3], spec=spec)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rc.correct(*static[:2], mask=static[2], cu_seqlens=static[3], spec=spec)
    for seed in (1, 2):
        for held, new in zip(static, inputs(50_000, seed), strict=True):
            held.copy_(new)
        graph.replay()
        expected = rc.correct(*static[:2], mask=static[2], cu_seqlens=static[3], spec=spec)
        assert torch.equal(out.weights, expected.weights) and torch.equal(out.mask, expected.mask)
        assert torch.equal(out.statistics.sums, expected.statistics.sums)
        train, rollout, mask, offsets = (x.cpu() for x in static)
        reference = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec)
        assert torch.equal(out.mask.cpu(), reference.mask) and torch.equal(out.keep.cpu(), reference.keep)
        assert_near(out.weights.cpu(), reference.weights, torch.float32, size=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "sequences"), [(1_000_000, 1), (4_000_000, 100_000), (16_000_000, 1000)])
def test_large_batches_against_the_reference(tokens, sequences):
    generator = torch.Generator(device="cuda").manual_seed(0)
    rollout = -torch.rand(tokens, device="cuda", generator=generator)
    train = rollout + 0.05 * torch.randn(tokens, device="cuda", generator=generator)
    mask = torch.rand(tokens, device="cuda", generator=generator) > 0.1
    offsets = torch.linspace(0, tokens, sequences + 1, dtype=torch.float64).round().long().cuda()
    spec = rc.Spec(weight=rc.Weight.product(upper=2.0), criteria=(GEOMETRIC,), detail="full")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec)
    extra = torch.cuda.max_memory_allocated() - before - 5 * tokens
    expected = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec, backend="torch")
    assert torch.equal(out.keep, expected.keep) and torch.equal(out.mask, expected.mask)
    assert_near(out.weights, expected.weights, torch.float32, size=0.0)
    got, wanted = out.metrics(), expected.metrics()
    assert not {k: (got[k], wanted[k]) for k in wanted if abs(got[k] - wanted[k]) > 2e-5 * max(1e-3, abs(wanted[k]))}
    again = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec)
    assert torch.equal(again.statistics.sums, out.statistics.sums)
    if sequences <= 1000:
        assert extra <= max(0.02 * 14 * tokens, 1 << 20)


@pytest.mark.parametrize("many", [28, 29])
def test_criteria_beyond_the_bits_of_a_state_run_on_plain_torch(many, device):
    """One that drops single tokens of sequences has a bit of an int32."""
    bounds = [0.001 * (1 + i) for i in range(many)]
    criteria = [C("k2", "sequence", "mean", upper=x, drop="token", label=f"mean_{x:g}") for x in bounds]
    spec, fits = rc.Spec(criteria=tuple(criteria)), many == 28
    assert (beyond_kernels(spec) is None) == fits
    assert thinning_bit(made_plan(spec), 27) == 2**29
    if not fits:
        train, rollout, mask, offsets = (x.to(device) for x in inputs())
        with pytest.raises(ValueError, match="got 'triton': more than 28 criteria drop single tokens"):
            rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec, backend="triton")


def made_plan(spec):
    writes = {"writes_weights": False, "writes_mask": True, "edits_mask": True}
    return plan_of(spec, packed=True, masked=True, advantages=None, **writes)
