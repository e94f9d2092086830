"""Sequences split over ranks give what whole ones give, to the bit. Here one process plays the ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out, random_sequences, rounded, spoil, wild
from builders.calls import bundled, example
from builders.kernel_cases import INTERPRETED
from builders.launches import key
from builders.rounding import near
from builders.same_bits import assert_same_results, assert_same_statistics, outcome
from builders.split_cases import SPECS, WAYS, cases, lockstep, outcomes, picked, tokens_of
from builders.threaded_ranks import Rank, Ranks
from builders.unit_cases import random_spec
from rollout_corr.backends.split import from_limbs, to_limbs
from rollout_corr.kernels import grid, launches
from rollout_corr.kernels.grid import Shape

pytestmark = INTERPRETED


def test_any_split_equals_the_whole():
    for seed in range(24):
        rng = random.Random(seed)
        batch = random_sequences(seed, [rng.choice((0, 1, 2, 5, 9, 17)) for _ in range(rng.randint(0, 5))])
        batch = spoil(batch, seed) if seed % 3 == 0 else wild(batch) if seed % 3 == 1 else batch
        spec = random_spec(rng, ("token", "sequence", "sequence"), normalize=(None,))
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        batch = rounded(batch, dtype)
        laid = lay_out(batch, "packed", dtype)
        whole, layout = outcome(laid, laid.correct(spec)), rng.choice(LAYOUTS)
        layout = "packed" if layout in ("packed_gaps", "list", "jagged") and not batch else layout
        found = lockstep(batch, spec, rng.choice(sorted(WAYS)), rng.randint(1, 5), dtype, layout)
        assert_same_results(found, whole)
        if layout != "packed_gaps":
            assert_same_statistics(found[3], whole[3], rounds_means=True, most=1e15)


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_spec_in_every_split(name):
    for case, batch, spec, way, layout, dtype in cases():
        if case.startswith(f"{name}, "):
            laid = lay_out(batch, "packed", dtype)
            whole = outcome(laid, laid.correct(spec))
            found = lockstep(batch, spec, way, 3, dtype, layout)
            assert_same_results(found, whole)
            if spec.nonfinite != "propagate":
                assert_same_statistics(found[3], whole[3], rounds_means=True)


def test_tokens_outside_are_counted_where_they_lie():
    batch = random_sequences(3, (5, 4, 0))
    found = lockstep(batch, rc.Spec(), "zigzag", 3, torch.float32, "packed_gaps")
    gap = lay_out([], "packed_gaps", torch.float32).mask.numel()
    assert found[3].metrics()["tokens_outside"] == 3 * gap


def test_an_entropy_gap_of_a_sequence_is_of_the_tokens_of_all_ranks():
    batch = random_sequences(3, (5, 4, 0, 6))

    def measured(laid, **more):
        return laid.correct(rc.Spec(), entropy=laid.external["entropy"], **more).statistics

    def of_rank(rank):
        held = tokens_of(batch, "zigzag", 2, rank)
        laid = lay_out(picked(batch, held), "packed", torch.float32)
        return measured(laid, sequence_group=Rank(rank=rank, ranks=2))

    found = rc.Statistics.sum(Ranks(2).run(of_rank)).metrics_async().values()
    wanted = measured(lay_out(batch, "packed", torch.float32)).metrics_async().values()
    for name in (name for name in wanted if name.startswith("entropy_gap")):
        assert wanted[name] != 0.0 and found[name] == near(wanted[name], torch.float32), name


def test_sums_travel_to_the_nearest_76th_bit():
    sums = torch.tensor([3.75, -0.25, 0.75, -1e18, math.pi]) * torch.tensor([1, 2.0**-76, 2.0**-76, 1, 1]).double()
    wanted = [3.75, 0.0, 2.0**-76, float(sums[3]), float(sums[4])]
    assert from_limbs(to_limbs(sums, 2)).tolist() == wanted


def test_what_a_rank_adds_is_of_its_tokens_or_of_whole_sequences():
    batch = random_sequences(3, (5, 4, 6))
    spec = rc.Spec(rc.Weight.product(), detail="full")
    first, other = (one[3].metrics_async().values() for one in outcomes(batch, spec, "contiguous", 2, torch.float32))
    valid = sum(sum(q.mask) for q in batch)
    assert (first["tokens"], other["tokens"], other["sequences"]) == (valid, 0.0, 0.0)
    assert 0.0 < other["abs_d"] < first["abs_d"] + other["abs_d"]
    assert other["max_raw"] == -math.inf
    assert math.isfinite(other["max_d"])


# Tiles so short that even short sequences have several slots: gathering adds them up.
NARROW = ((0, Shape(tile=16, lanes=2, sequences=2, chunk=2, parts=1)),)


@pytest.mark.parametrize("name", ["survivors", "poisoned"])
def test_the_kernels_split_too(name, device, monkeypatch):
    for case, batch, spec, way, layout, dtype in cases():
        if case.startswith(f"{name}, ") and way == "zigzag":
            monkeypatch.setattr(grid, "SHAPES", NARROW)
            laid = lay_out(batch, layout, dtype).to(device)
            whole = outcome(laid, laid.correct(spec, backend="triton"))
            found = lockstep(batch, spec, way, 2, dtype, layout, backend="triton", device=device)
            assert_same_results(found, whole)
            if spec.nonfinite != "propagate":
                assert_same_statistics(found[3], whole[3], rounds_means=True)


@pytest.mark.parametrize("name", ["measure", "token", "survivors"])
def test_labels_of_sequences(name):
    batch, spec = wild(random_sequences(5, (9, 1, 12, 0, 5, 17, 3))), SPECS[name]
    labels = {"labels": {"e": torch.tensor([[0], [1], [1], [0], [7], [2], [0]])}, "label_names": {"e": 3}}
    whole = lay_out(batch, "packed", torch.float32).correct(spec, **labels).metrics(by="e")
    found = lockstep(batch, spec, "zigzag", 2, torch.float32, "packed", **labels)[3].metrics(by="e")
    assert list(found) == list(whole)
    for name_of_metric, value in found.items():
        power = 2 if name_of_metric.endswith("std") else 1
        wanted = whole[name_of_metric] ** power
        if not name_of_metric.rpartition("/")[2].startswith(("tokens", "sequences")):
            wanted = near(wanted, torch.float32)
        assert value**power == wanted, name_of_metric


SENT = {
    "measured": (rc.Spec(), 12),
    "product": (rc.Spec(rc.Weight.product(upper=2.0)), 12),
    "mean ratio": (rc.Spec(None, (rc.Criterion("ratio", over="sequence", reduce="mean", upper=1.1),)), 12),
    "token": (rc.Spec(rc.Weight.token(upper=2.0)), 20),
    "mean k3": (rc.Spec(None, (rc.Criterion("k3", over="sequence", reduce="mean", upper=1.1),)), 14),
    "veto": (rc.Spec(None, (rc.Criterion("ratio", over="sequence", reduce="min", lower=0.1),)), 12 + 4),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_sequence_sends(name):
    spec, columns = SENT[name]
    tables = []
    batch = random_sequences(3, (5, 4, 6))
    outcomes(batch, spec, "zigzag", 4, torch.float32, sent=tables)
    assert [(table.dtype, table.numel()) for table in tables] == [(torch.int64, columns * 3)] * 4


@pytest.mark.usefixtures("quick_interpreter")
def test_warmup_compiles_what_a_split_batch_launches(alone, monkeypatch):
    monkeypatch.setattr(grid, "SHAPES", ((32, Shape(64, 16, 2, 2)), (0, Shape(32, 16, 2, 2))))
    launched = []
    run = launches.Launch.run
    monkeypatch.setattr(launches.Launch, "run", lambda launch: (launched.append(key(launch)), run(launch)))
    spec = rc.Spec(rc.Weight.product(upper=2.0))
    like = example(ranks=rc.Ranks(sequence=alone))
    assert rc.warmup(*like, spec=spec, loss=rc.Loss(rc.GSPO())) == 4
    signed = rc.Spec(criteria=(rc.Criterion("k1", "sequence", "mean", upper=1.0, when="negative_advantage"),))
    assert rc.warmup(*like, spec=signed, advantages=torch.zeros(2, 1), aligned=True) == 2
    known, launched[:] = set(launched), []
    zeros, mask, offsets = torch.zeros(192), torch.ones(192, dtype=torch.bool), torch.tensor([0, 80, 192]).int()
    batch = rc.Batch(mask=mask, cu_seqlens=offsets, ranks=rc.Ranks(sequence=alone))
    rc.correct(zeros, zeros, batch, spec=spec, backend="triton")
    assert len(launched) == 4 and set(launched) <= known
    options = {"mask": mask, "cu_seqlens": offsets, "advantages": torch.zeros(2, 1), "backend": "triton"}
    launched.clear()
    rc.correct(zeros, zeros, **bundled(spec=signed, sequence_group=alone, **options))
    assert launched and set(launched) <= known
