"""Metrics by label: those of the sequences that have it, taken alone, by the oracle and by a call of their own."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, compare_metrics, compare_some, lay_out, random_sequences, run_as, spoil, wild
from builders.calls import bundled
from builders.rounding import margin, near
from oracles import correction as oracle
from rollout_corr.metrics.labels import LabelSet
from rollout_corr.metrics.native import metrics_of
from rollout_corr.metrics.on_tensors import metrics_of as of_label
from rollout_corr.metrics.on_tensors import names_of, read
from rollout_corr.metrics.statistics import Statistics

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("math", "code", "web", "never")
IDS = (0, 1, 1, 2, 7, 0, -1, 2, 1, 0)
OF_TOKENS = rc.Spec(
    rc.Weight.token(lower=0.7, upper=1.3),
    (rc.Criterion("k3", upper=0.1), rc.Criterion("ratio", "sequence", "mean", lower=0.8, upper=1.3)),
)
SPECS = [
    rc.Spec(),
    OF_TOKENS,
    rc.Spec(rc.Weight.token(upper=1.2, outside="zero", token_clamp=0.3), nonfinite="neutral", clamp=0.5),
    rc.Spec(rc.Weight.product(lower=0.5, upper=2.0, normalize="batch"), (rc.Criterion("abs", upper=0.5),)),
    rc.Spec(rc.Weight.geometric(upper=1.1), (rc.Criterion("external", "sequence", "max", upper=1, name="entropy"),)),
]


def sequences_of(seed):
    made = random_sequences(seed, (5, 1, 7, 0, 4, 6, 2, 9, 3, 8))
    return spoil(wild(made), seed, share=0.2) if seed % 2 else made


def split(metrics, name):
    """The metrics of a label by their own names."""
    found = {}
    for key, value in metrics.items():
        label, of, *own = key.split("/", 2)
        assert label == "environment"
        if of == name:
            found[own[0]] = value
    return found


def labeled(laid, spec, ids=IDS, names=NAMES, **more):
    return laid.correct(spec, labels={"environment": torch.tensor(ids)}, label_names={"environment": names}, **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_label_has_the_metrics_of_its_sequences(layout):
    way = ("blocks", "small blocks", "whole")[LAYOUTS.index(layout) % 3]
    for number, spec in enumerate(SPECS):
        sequences = sequences_of(number)
        laid = lay_out(sequences, layout)
        with run_as(way):
            out = labeled(laid, spec)
        found = out.metrics(by="environment")
        for place, name in enumerate(NAMES):
            chosen = [q for q, label in zip(sequences, IDS, strict=True) if label == place]
            mine = split(found, name)
            assert not {"tokens_outside", "sequences_padded"} & set(mine) and {
                "kl_rollout_train_k3",
                "sequence_train_ppl_mean",
                "tokens_kept",
            } <= set(mine)
            alone = lay_out(chosen, "packed") if chosen else lay_out([], "packed")
            answer = oracle.correct(chosen, spec)
            mine |= {"tokens_outside": 0.0, "sequences_padded": 0.0}
            compare_metrics(alone, mine, answer, spec, margin(), f"{name} {layout} {spec}")


@pytest.mark.parametrize("spec", SPECS)
def test_a_label_has_the_statistics_of_a_call_of_its_own(spec):
    """Counts and extrema equal, sums within rounding: float32 sums of 64 tokens are off by 1e-7 of their sizes."""
    sequences = random_sequences(5, (40, 700, 3, 0, 90, 1200, 64, 65, 2000, 128), scale=0.05)
    laid = lay_out(sequences, "packed", torch.float32)
    found = labeled(laid, spec).metrics(by="environment")
    for place, name in enumerate(NAMES[:3]):
        chosen = [q for q, label in zip(sequences, IDS, strict=True) if label == place]
        alone, mine = lay_out(chosen, "packed", torch.float32).correct(spec).metrics(), split(found, name)
        assert set(alone) - set(mine) == {"tokens_outside", "sequences_padded"}
        counts = {key for key in mine if key.startswith(("tokens", "sequences")) or key.endswith("rejected_fraction")}
        assert {key: mine[key] for key in counts} == {key: alone[key] for key in counts}
        compare_some(mine, alone, spec, margin(torch.float32), name)


@pytest.mark.parametrize("units", ["sequences", "tokens"])
@pytest.mark.parametrize("spec", SPECS[1:4], ids=range(3))
def test_all_labels_at_once_have_the_numbers_of_each(spec, units):
    """Of counts of nothing, infinite sums and NaN too."""
    names, generator, many = names_of(spec, units), torch.Generator().manual_seed(0), len(NAMES) + 1
    counts = {row.over.units for row in metrics_of(spec)} | {"tokens", "sequences"}
    for bad in (False, True):
        table = torch.randn(len(names), many, generator=generator, dtype=torch.float64)
        if bad:
            table.masked_fill_(torch.rand(table.shape, generator=generator) < 0.1, torch.nan)
            table.masked_fill_(torch.rand(table.shape, generator=generator) < 0.1, torch.inf)
        for place, name in enumerate(names):
            if name in counts:
                table[place] = torch.randint(1 if bad else 3, (many,), generator=generator) + bad
        found = read(LabelSet("environment", NAMES, units), spec, table)
        held = dict(zip(names, table.tolist(), strict=True))
        wanted = {f"environment/{units}_outside": held[units][-1]}
        for place, name in enumerate(NAMES):
            values = {column: of_labels[place] for column, of_labels in held.items()}
            for row in of_label(spec, units):
                wanted[f"environment/{name}/{row.key}"] = row.read(values)
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            # Square roots of vectors may be off by a rounding.
            close = near(value, terms=1, size=0.0)
            assert found[key] == close if key.endswith("std") else repr(found[key]) == repr(value), key


def test_labels_change_nothing_else_and_outside_is_counted():
    sequences = sequences_of(2)
    laid = lay_out(sequences, "padded_left")
    plain, out = laid.correct(OF_TOKENS), labeled(laid, OF_TOKENS)
    assert torch.equal(plain.weights, out.weights) and torch.equal(plain.mask, out.mask)
    metrics = out.metrics()
    outside = [q for q, label in zip(sequences, IDS, strict=True) if label in (7, -1) and any(q.mask)]
    assert outside and metrics.pop("environment/sequences_outside") == len(outside)
    assert metrics == plain.metrics() and list(metrics) == list(plain.metrics())
    by = out.metrics_async().result(prefix="mismatch/", by="environment")
    assert by == {f"mismatch/{key}": value for key, value in out.metrics(by="environment").items()}
    assert by["mismatch/environment/never/tokens"] == 0.0
    counts = [by[f"mismatch/environment/{name}/sequences"] for name in NAMES]
    assert sum(counts) + len(outside) == metrics["sequences"]


def test_labels_have_no_metrics_of_other_frameworks():
    spec = rc.spec("verl.decoupled_token_is")
    out = labeled(lay_out(sequences_of(2), "packed"), spec)
    with pytest.raises(ValueError, match="by: expected None with names='verl', got 'environment': only nat"):
        out.metrics(names="verl", by="environment")
    assert out.metrics(names="verl") and out.metrics(by="environment")


def test_micro_batches_merge():
    sequences = sequences_of(4)
    parts = [lay_out(sequences[:4], "packed"), lay_out(sequences[4:], "packed")]
    found = [labeled(part, OF_TOKENS, IDS[:4] if i == 0 else IDS[4:]).statistics for i, part in enumerate(parts)]
    nothing = Statistics.nothing(OF_TOKENS, extra=found[0].extra)
    whole = labeled(lay_out(sequences, "packed"), OF_TOKENS)
    merged = Statistics.sum([nothing, *found])
    assert merged.metrics(by="environment") == near(whole.metrics(by="environment"))
    with pytest.raises(ValueError, match="other: expected statistics of the same arguments"):
        merged.merge(labeled(parts[0], OF_TOKENS, IDS[:4], ("other", "names")).statistics)


def test_several_labels_beside_versions_and_turns():
    laid = lay_out(sequences_of(2), "packed")
    ids = torch.tensor(IDS)
    given = {"labels": {"environment": ids, "level": (ids % 2).to(torch.uint8)[:, None]}}
    names = {"environment": list(NAMES), "level": 2}
    versions = {"versions": laid.versions, "current_version": 7, "turns": "runs"}
    out = laid.correct(OF_TOKENS, **given, label_names=names, **versions)
    assert out.metrics(by="environment") == labeled(laid, OF_TOKENS).metrics(by="environment")
    assert out.metrics()["age_max"] == laid.correct(OF_TOKENS, **versions).metrics()["age_max"]
    both = sum(out.metrics(by="level")[f"level/{i}/tokens"] for i in "01")
    assert both == out.metrics()["tokens"]


def test_in_a_loss():
    laid = lay_out(random_sequences(8, advantages="sequence"), "padded_right")
    batch = rc.Batch(mask=laid.mask, labels={"e": rc.Labels(torch.tensor([0, 1, 1, 0, 1, 0]), 2)})
    given = {"old_logp": laid.train, "rollout_logp": laid.rollout}
    loss = rc.policy_loss(laid.train, laid.advantages, batch, spec=OF_TOKENS, **given)
    assert loss.metrics(by="e") == rc.correct(laid.train, laid.rollout, batch, spec=OF_TOKENS).metrics(by="e")
    assert "surrogate_loss_mean" in loss.metrics()
    # Without a Spec nothing reads them.
    assert "surrogate_loss_mean" in rc.policy_loss(laid.train, laid.advantages, batch, **given).metrics()


def test_what_is_wrong_is_named():
    x, ids = torch.zeros(2, 3), torch.tensor([0, 1])

    def refused(message, labels, names, kind=ValueError, **more):
        with pytest.raises(kind) as raised:
            rc.correct(x, x, **bundled(labels=labels, label_names=names, **more))
        assert str(raised.value).startswith(message), raised.value

    refused("labels['e'].names: expected a list of names or a count above 0, got ()", {"e": ids}, None)
    refused("labels['e']: expected a tensor or a list of tensors, got NoneType", None, {"e": 2}, TypeError)
    for labels in ([ids], {"e": ids}):
        with pytest.raises(TypeError, match=r"^labels.*: expected .*rc\.Labels\(ids, names\)"):
            rc.Batch(labels=labels)
    refused(
        "labels['e']: expected shape [2, 3] (per token), [2] or [2, 1] (per sequence), got [3]",
        {"e": torch.zeros(3, dtype=torch.int64)},
        {"e": 2},
    )
    refused("labels['e']: expected", {"e": ids.float()}, {"e": 2})
    refused("labels['e']: expected a tensor or a list of tensors, got tuple", {"e": (0, 1)}, {"e": 2}, TypeError)
    refused("labels['e'].names: expected a list of names or a count above 0, got 0", {"e": ids}, {"e": 0})
    refused("labels['e'].names: expected different names", {"e": ids}, {"e": ["a", "a"]})
    refused("labels['e'].names: expected strings without '/'", {"e": ids}, {"e": ["a/b"]})
    refused("labels: expected names that are strings without '/' and '='", {"a/b": ids}, {"a/b": 2})
    out = rc.correct(x, x, rc.Batch(labels={"e": rc.Labels(ids, 2)}))
    with pytest.raises(ValueError, match=r"by: expected one of \['e'\]"):
        out.metrics(by="f")
