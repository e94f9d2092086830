"""Random calls over ranks, with bounds that the batch decides, in every way to run, and on tensors without values.

Single calls of Specs whose bounds are numbers are judged in tests/definition. Ranks are threads that this process
plays: each has its tokens of every sequence, or sequences of its own.
"""

from __future__ import annotations

import copy
import math
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

import rollout_corr as rc
from builders import judges, parts
from builders.judges import Told
from builders.kernel_cases import INTERPRETED, NARROW, WIDE, shaped
from builders.parts import bounds_of, corrected
from builders.same_bits import in_hex
from builders.threaded_ranks import Rank, Ranks
from frozen.generator import SURROGATES
from frozen.runners import run_as
from oracles import correction as oracle
from oracles.correction import kept
from oracles.numbers import exp, log

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("one_thread", "quick_interpreter")]

# `make test-all` has as many again, twenty times.
BLOCKS = [*range(2), *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 40))]

# --- over ranks ---


def on_ranks(together, run):
    """Run the call of every rank; return the results, and how often the ranks exchanged something."""
    group = Ranks(together.parts.count)
    found = group.run(lambda rank: run(together.call(rank, Rank(rank=rank, ranks=together.parts.count))))
    return found, group.rounds


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sequences_split_over_ranks(backend, block):
    """The bits of one call, labels and kept mass included, whatever units there are."""
    each = 3 if backend == "triton" else 30
    for seed in range(each * block, each * block + each):
        together = parts.correction(f"split {backend} {seed}", "sequence", backend)
        with shaped((NARROW, WIDE)[seed % 2]):
            wanted = corrected(together.call(), backend)
            found, rounds = on_ranks(together, lambda call: corrected(call, backend))
        parts.assert_one_correction(together, found, wanted)
        more = ("entropy" in together.call().drawn.batch) + (together.normalize in ("sequence", "group"))
        assert rounds == 1 + more, together


@pytest.mark.parametrize("block", BLOCKS)
def test_a_batch_spread_over_ranks(block):
    """Means and bounds are of all ranks, and nothing else is exchanged."""
    for seed in range(40 * block, 40 * block + 40):
        together = parts.correction(f"spread {seed}", "batch")
        found, rounds = on_ranks(together, corrected)
        parts.assert_one_correction(together, found, corrected(together.call()))
        if not together.spec.asks_batch and together.spec.apply:
            assert rounds == (together.normalize in ("batch", "group")), together


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("block", BLOCKS)
def test_losses_over_ranks(block, name):
    for seed in range(4 * block, 4 * block + 4):
        together = parts.loss(f"loss {name} {seed}", name)
        found, _ = on_ranks(together, parts.lost)
        parts.assert_one_loss(together, found, parts.lost(together.call()))


# --- bounds that the batch decides ---


def changed(frozen, **given):
    """A frozen value with other fields, unchecked: the numbers of two rules may have crossed."""
    made = copy.copy(frozen)
    vars(made).update(given)
    return made


def number(rule, side, values):
    """The value at which a rule stops, moved outward by a rounding; infinite if it loses none. A NaN passes neither."""
    good = [x for x, keep in zip(values, kept(rule, side, values), strict=True) if keep]
    sign, end = (1.0, max) if side == "upper" else (-1.0, min)
    if len(good) == sum(not math.isnan(x) for x in values):
        return sign * math.inf
    return end(good) + sign * 1e-11 * max(1.0, abs(end(good)))


def of_numbers(spec, sequences, groups):
    """For each group the Spec with the numbers that its rules find.

    Criteria of tokens come first, because sums over what is kept depend on them.
    """
    specs = {group: changed(spec, weight=None, criteria=()) for group in groups}
    for criterion in sorted(spec.criteria, key=lambda x: x.over != "token"):
        open_ended = changed(criterion, lower=None, upper=math.inf)
        answers = {
            group: oracle.correct(sequences, changed(one, criteria=(*one.criteria, open_ended)), groups).outcomes[-1]
            for group, one in specs.items()
        }
        for group, one in specs.items():
            ends = {}
            for side, rule in criterion.rules.items():
                pool = []
                for s, own in enumerate(groups):
                    if own == group or rule.within == "batch":
                        tested = zip(answers[own].values[s], answers[own].tested[s], strict=True)
                        pool += [x for x, some in tested if some]
                end = number(rule, side, pool)
                ends[side] = exp(end) if criterion.stat == "ratio" else end
            specs[group] = changed(one, criteria=(*one.criteria, changed(criterion, **ends)))
    order, weight = [criterion.label for criterion in spec.criteria], spec.weight
    specs = {
        group: changed(one, criteria=tuple(sorted(one.criteria, key=lambda x: order.index(x.label))))
        for group, one in specs.items()
    }
    if weight is not None:
        open_ended = changed(weight, **dict.fromkeys(weight.rules))
        units = {
            group: oracle.correct(sequences, changed(x, weight=open_ended), groups).units for group, x in specs.items()
        }
        logs = [log(raw) for s, own in enumerate(groups) for raw, _ in units[own][s]]
        weight = changed(weight, **{side: exp(number(rule, side, logs)) for side, rule in weight.rules.items()})
    return {group: changed(one, weight=weight) for group, one in specs.items()}


def together(answers, groups):
    """The answer in which each sequence has its group's."""

    def chosen(of):
        """By name, what is of each sequence: a list of one length in every answer."""
        parts = {group: vars(of(answer)) for group, answer in answers.items()}
        first = next(iter(parts.values()))
        names = [name for name, x in first.items() if isinstance(x, list) and name != "outcomes"]
        return {name: [parts[group][name][s] for s, group in enumerate(groups)] for name in names}

    first = answers[groups[0]]
    outcomes = [changed(one, **chosen(lambda x, i=i: x.outcomes[i])) for i, one in enumerate(first.outcomes)]
    return changed(first, **chosen(lambda x: x), outcomes=outcomes)


@pytest.mark.parametrize("block", BLOCKS)
def test_bounds_that_the_batch_decides(block):
    """Those of groups too, by loops, in float64: equal values are equal there."""
    seen = 0
    for seed in range(90 * block, 90 * block + 90):
        call = judges.correction(f"rules {seed}", rules=True, dtypes=(torch.float64,) * 2)
        told = Told(call)
        if told.groups:
            # The generator's are of the batch.
            own = [{side: replace(x, within="group") for side, x in one.rules.items()} for one in call.spec.criteria]
            criteria = [replace(one, **x) for one, x in zip(call.spec.criteria, own, strict=True)]
            call.spec = replace(call.spec, criteria=tuple(criteria))
        if not call.spec.asks_batch or not told.count or isinstance(getattr(call.spec.weight, "upper", 0), rc.KeepESS):
            continue
        sequences, groups = judges.sequences_of_correction(call, told), told.groups or [0] * told.count
        specs = of_numbers(call.spec, sequences, groups)
        answers = {group: oracle.correct(sequences, one, told.groups) for group, one in specs.items()}
        with run_as(("blocks", "small blocks", "whole")[seed % 3]):
            out = call.corrected(call.spec, "torch")
        # Its bounds are off by 1e-11.
        judges.compare_correction(specs[groups[0]], told, out, together(answers, groups), computes=torch.float32)
        seen += 1
    assert seen > 20


# --- ways to run ---


@pytest.mark.parametrize("block", BLOCKS)
def test_every_way_to_run_gives_the_same_bits(block):
    for seed in range(20 * block, 20 * block + 20):
        call = judges.correction(f"ways {seed}", rules=True)
        found = []
        for way in ("blocks", "small blocks", "whole"):
            with run_as(way):
                weights, *rest, out = corrected(call)
            means = call.spec.weight is not None and call.spec.weight.normalize == "batch"
            found.append((None if weights is None or means else in_hex(weights), rest, bounds_of(out)))
        if call.drawn.dtypes[0] != torch.float64:
            assert found[0] == found[1] == found[2], f"{seed} {call.spec!r}"


def on_meta(x):
    """An argument without values."""
    if isinstance(x, torch.Tensor):
        return x.to("meta")
    if isinstance(x, dict):
        return {name: on_meta(value) for name, value in x.items()}
    if is_dataclass(x):
        return replace(x, **{one.name: on_meta(getattr(x, one.name)) for one in fields(x)})
    return x._replace(**on_meta(x._asdict())) if hasattr(x, "_asdict") else x


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_reads_a_value_on_a_device(block):
    """Meta tensors have no values: whatever would wait for a device raises on them."""
    for seed in range(20 * block, 20 * block + 20):
        call = judges.correction(f"meta {seed}", rules=True)
        if call.drawn.laid.layout.kind in ("list", "jagged"):
            continue
        turns = call.drawn.batch.get("turns")
        if Told(call).turns is not call.drawn.laid.tokens.turns and not isinstance(turns, rc.TurnIds):
            # How many there are is a value.
            call.drawn.batch["turns"] = rc.TurnIds(turns, at_most=99)
        call.drawn.tensors, call.drawn.batch = on_meta(call.drawn.tensors), on_meta(call.drawn.batch)
        out = call.corrected(call.spec, "torch")
        assert {x.device.type for x in (out.keep, out.mask, out.statistics.sums)} == {"meta"}
    for name in SURROGATES:
        call = judges.loss(f"meta {name} {block}", name, True)
        if call.drawn.laid.layout.kind not in ("list", "jagged"):
            call.drawn.tensors, call.drawn.batch = on_meta(call.drawn.tensors), on_meta(call.drawn.batch)
            call.given, call.correction = on_meta(call.given), "nothing"
            out, new, _ = call.lost("torch", call.loss)
            (slopes,) = torch.autograd.grad(out.value, [new])
            assert {x.device.type for x in (out.value, out.mask, out.statistics.sums, slopes)} == {"meta"}


@pytest.fixture
def unwritten_memory_is_nan():
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_slot_is_written(block, unwritten_memory_is_nan):
    """Slots before, between and behind sequences too, of weights, masks and gradients."""
    for seed in range(10 * block, 10 * block + 10):
        call = judges.correction(f"written {seed}")
        judges.judge_correction(call, call.corrected(call.spec, "torch"))
        for name in ("PPO", "GSPO", "KLCov"):
            judges.judge_loss(judges.loss(f"written {name} {seed}", name, seed % 2 == 1), "torch")
