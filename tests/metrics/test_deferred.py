"""Statistics of labels wait until somebody asks for them: nothing that the caller does meanwhile changes a bit."""

from __future__ import annotations

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.launches import Operations
from rollout_corr.metrics import label_collector
from rollout_corr.metrics.deferred import Later
from rollout_corr.metrics.statistics import Statistics

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (40, 1, 300, 7, 90, 25)
SPECS = [
    rc.Spec(),
    rc.Spec(rc.Weight("token", upper=1.01, normalize="batch"), (rc.Criterion("k3", upper=1e-3),)),
    rc.Spec(
        rc.Weight("product", upper=2.0), (rc.Criterion("ratio", "sequence", "mean", lower=0.999),), rejected="both"
    ),
    rc.Spec(rc.Weight("geometric"), (rc.Criterion("external", upper=0.9, name="x"),)),
    rc.Spec(rc.Weight("prefix", upper=2.0)),
    rc.Spec(rc.Weight("token", normalize="sequence"), (rc.Criterion("prob_diff", "sequence", "max", upper=0.1),)),
]


def given(layout, nonfinite=False):
    """Make a call's arguments, all of them tensors of its own."""
    generator = torch.Generator().manual_seed(7)
    size, count = sum(LENGTHS), len(LENGTHS)
    train = -torch.rand(size, generator=generator)
    rollout = train + 0.05 * torch.randn(size, generator=generator)
    if nonfinite:
        rollout[[3, 200]] = torch.nan
    tokens = {"rollout_logp": rollout, "x": torch.rand(size, generator=generator), "age": torch.arange(size) % 3}
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = {"train_logp": train, **tokens, "mask": torch.rand(size, generator=generator) < 0.8}
    if layout == "packed":
        found |= {"cu_seqlens": offsets, "mask": None}
    else:
        width = max(LENGTHS)
        place = torch.cat([torch.arange(n) + width * i for i, n in enumerate(LENGTHS)])
        valid = torch.zeros(count * width, dtype=torch.bool).scatter_(0, place, found["mask"])
        found = {
            name: x.new_zeros(count * width).scatter_(0, place, x).view(count, width)
            for name, x in found.items()
            if name != "mask"
        }
        found["mask"] = valid.view(count, width)
    return found | {"environment": torch.tensor([0, 2, 1, 0, 5, 1])[:, None]}


def correct(tensors, spec):
    labels = {name: tensors[name] for name in ("environment", "age")}
    return rc.correct(
        tensors["train_logp"],
        tensors["rollout_logp"],
        mask=tensors["mask"],
        cu_seqlens=tensors.get("cu_seqlens"),
        spec=spec,
        external={"x": tensors["x"]},
        labels=labels,
        label_names={"environment": ["a", "b", "c"], "age": 3},
    )


def at_once(tensors, spec):
    """Correct with nothing that waits."""
    out = correct(tensors, spec)
    out.statistics.sums.clone()
    return out


def overwrite(x):
    """Write garbage into a tensor."""
    if x is not None:
        x.copy_(torch.full(x.shape, 77)) if x.dtype != torch.bool else x.logical_not_()


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_what_the_caller_writes_meanwhile_changes_nothing(spec, layout, nonfinite):
    tensors = given(layout, nonfinite)
    now, later = at_once(tensors, spec), correct(tensors, spec)
    metrics = later.metrics()
    for x in (*tensors.values(), later.weights, later.mask, later.keep):
        overwrite(x)
    assert metrics == now.metrics() == later.metrics() and metrics["environment/outside/sequences"] == 1
    for name in ("environment", "age"):
        assert later.metrics(by=name) == now.metrics(by=name)
    assert torch.equal(later.statistics.sums, now.statistics.sums)
    assert torch.equal(later.statistics.maxima, now.statistics.maxima)
    assert later.metrics(by="age") == now.metrics(by="age") and later.metrics() == metrics


@pytest.mark.parametrize("spec", SPECS[:3], ids=repr)
def test_tokens_that_are_not_kept_give_the_same(spec, monkeypatch):
    tensors = given("padded")
    later = correct(tensors, spec)
    monkeypatch.setattr(label_collector, "SMALL", 0)
    now = correct(tensors, spec)
    assert torch.equal(later.statistics.sums, now.statistics.sums)
    assert torch.equal(later.statistics.maxima, now.statistics.maxima) and later.metrics() == now.metrics()


def test_copies_merges_threads_and_losses_have_them():
    tensors, spec = given("packed"), SPECS[1]
    wanted = at_once(tensors, spec).metrics(by="environment")
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu")):
        assert again(correct(tensors, spec).statistics).metrics(by="environment") == wanted
    merged = Statistics.sum([correct(tensors, spec).statistics for _ in range(2)])
    assert merged.metrics()["tokens"] == 2 * sum(LENGTHS)
    pending = correct(tensors, spec).metrics_async()
    for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert again(pending).result(by="environment") == wanted
    with ThreadPoolExecutor(4) as threads:
        assert all(found == wanted for found in threads.map(lambda _: pending.result(by="environment"), range(8)))
    with torch.inference_mode():
        inside = correct(tensors, spec)
    assert inside.metrics(by="environment") == wanted
    labels = {"labels": {"environment": tensors["environment"]}, "label_names": {"environment": ["a", "b", "c"]}}
    loss = rc.policy_loss(
        tensors["train_logp"],
        torch.ones(sum(LENGTHS)),
        cu_seqlens=tensors["cu_seqlens"],
        old_logp=tensors["train_logp"],
        rollout_logp=tensors["rollout_logp"],
        spec=spec,
        entropy=tensors["x"],
        **labels,
    )
    assert loss.statistics._waits is not None and loss.metrics()["entropy_mean"] > 0.0
    assert loss.metrics(by="environment") == wanted
    names = len(loss.statistics.sums)
    assert names == len(Statistics.nothing(spec, loss.statistics.objective, extra=loss.statistics.extra).sums)


def test_sums_are_the_callers_once_they_are_given():
    """As without labels: who reduces them in place reads metrics of all ranks."""
    tensors = given("packed")
    out, wanted = correct(tensors, SPECS[1]), correct(tensors, SPECS[1]).statistics
    out.statistics.sums.mul_(2.0)
    for name in (None, "environment", "age"):
        assert out.metrics(by=name) == (wanted + wanted).metrics(by=name)
    assert torch.equal(out.statistics.join(rc.Statistics.nothing(None)).sums, 2.0 * wanted.sums)


def test_the_default_device_of_the_reader_has_no_part():
    # Nothing that lies on the meta device can be read.
    tensors = given("packed")
    out, wanted = correct(tensors, SPECS[1]), at_once(tensors, SPECS[1])
    with torch.device("meta"):
        found = [out.metrics(by=name) for name in ("environment", "age")]
    assert found == [wanted.metrics(by=name) for name in ("environment", "age")]


@pytest.mark.parametrize("weight", ["token", "product"])
def test_log_probs_of_the_caller_are_not_kept(weight):
    tensors = given("packed")
    out = correct(tensors, rc.Spec(rc.Weight(weight)))
    seen = [weakref.ref(tensors.pop(name)) for name in ("train_logp", "rollout_logp")]
    assert [one() for one in seen] == [None, None] and out.metrics(by="age")


def test_metrics_of_the_batch_take_none_and_the_sums_are_taken_once():
    out, found = correct(given("packed"), rc.Spec()), []
    with mock.patch.object(Later, "found", lambda self: found.append(1) or real(self)):
        out.metrics()
        out.warnings()
        assert not found
        out.metrics(by="age")
    assert found == [1]
    with Operations() as counted:
        out.metrics(by="age")
    assert counted.names.count("segment_reduce") == 0


real = Later.found
