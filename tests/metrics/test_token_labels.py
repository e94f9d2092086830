"""Metrics by label of a token: those of its tokens as the oracle counts them, and what has no meaning left out."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, compare_some, lay_out, random_sequences, run_as, spoil, wild
from builders.calls import bundled, bundled_loss
from builders.rounding import margin, near
from builders.turns import offsets_of, random_turns
from builders.unit_cases import random_spec
from oracles import correction as oracle
from oracles import metrics as oracle_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {"label": ("old", "new", "never")}
WAYS = ("blocks", "small blocks", "whole")
SPECS = [
    rc.Spec(),
    rc.Spec(
        rc.Weight.token(lower=0.7, upper=1.3),
        (
            rc.Criterion("k3", upper=0.1, drop="sequence"),
            rc.Criterion("abs", upper=0.3),
            rc.Criterion("ratio", "sequence", "mean", lower=0.8, upper=1.3),
        ),
    ),
    rc.Spec(rc.Weight.token(upper=1.2, outside="zero", token_clamp=0.3), nonfinite="neutral", clamp=0.5),
    rc.Spec(rc.Weight.product(lower=0.5, upper=2.0), (rc.Criterion("abs", upper=0.5),), nonfinite="propagate"),
    rc.Spec(rc.Weight.geometric(upper=1.1), (rc.Criterion("external", "token", upper=1, name="entropy"),)),
]
# Of a label of tokens these are the metrics; all others are of sequences.
OF_TOKENS = {"tokens_differing", "tokens_differing_fraction"} | {
    "tokens", "tokens_nonfinite", "tokens_clamped", "tokens_kept", "tokens_kept_fraction", "logratio_mean"} | {
    "logratio_abs_mean", "logratio_std", "logratio_abs_max", "logratio_min", "logratio_max", "kl_rollout_train_k1",
    "kl_rollout_train_k2", "kl_rollout_train_k3", "ratio_mean", "ratio_std", "chi2_train_rollout",
}  # fmt: skip


def labeled_sequences(seed, long_runs):
    rng = random.Random(seed)
    made = random_sequences(seed, (60, 1, 70, 0, 40, 90) if long_runs else (5, 1, 7, 0, 4, 6, 2))
    made = spoil(wild(made), seed, share=0.1) if seed % 2 else made

    def ids(q):
        if not long_runs:
            return [rng.choice((0, 0, 1, -3, 9)) for _ in q.train]
        cuts = sorted(rng.choices(range(len(q) + 1), k=2))
        found = rng.sample((0, 1, 5), 3)
        return [found[sum(t >= cut for cut in cuts)] for t in range(len(q))]

    return [replace(q, versions=ids(q), current_version=0) for q in made]


def by_token(laid, spec, names=NAMES, **more):
    return laid.correct(spec, labels={"label": laid.versions}, label_names=names, **more)


def split(metrics, name):
    prefix = f"label/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_label_has_the_metrics_of_its_tokens(layout):
    way = WAYS[LAYOUTS.index(layout) % len(WAYS)]
    for number, spec in enumerate(SPECS):
        sequences = labeled_sequences(number, long_runs=number in (1, 4))
        laid, answer = lay_out(sequences, layout), oracle.correct(sequences, spec)
        with run_as(way):
            out = by_token(laid, spec)
        found, labels = out.metrics(by="label"), [q.versions for q in sequences]
        for place, name in enumerate(NAMES["label"]):
            mine = split(found, name)
            assert set(mine) >= OF_TOKENS
            assert not any("sequence" in key or "ppl" in key for key in mine if "/" not in key)
            wanted = oracle_metrics.metrics(oracle_metrics.of_label(answer, labels, place), spec)
            compare_some(mine, wanted, spec, margin(), (name, layout, way, spec))
        valid = [v for q in sequences for v, m in zip(q.versions, q.mask, strict=True) if m]
        assert found["label/tokens_outside"] == out.metrics()["label/tokens_outside"]
        assert found["label/tokens_outside"] == sum(v not in (0, 1, 2) for v in valid) > 0


def test_a_list_without_samples_has_labels_without_ids():
    out = rc.correct([], [], rc.Batch(labels={"place": rc.Labels([], ["a", "b"])}), spec=rc.Spec())
    assert out.metrics()["tokens"] == 0


def test_one_label_for_all_has_the_metrics_of_the_batch():
    """Of Specs with turns, prefixes and decay too; sums in another order are off by a rounding."""
    for seed in range(8):
        rng = random.Random(seed)
        sequences = random_sequences(seed, (40, 3, 0, 70))
        sequences = spoil(sequences, seed) if seed % 3 else sequences
        laid, spec = lay_out(sequences, ("packed", "padded_left")[seed % 2]), random_spec(rng)
        ids = torch.zeros(laid.shape, dtype=torch.uint8)
        given = {"turns": offsets_of(laid, random_turns(sequences, seed))}
        out = laid.correct(spec, labels={"label": ids}, label_names={"label": 1}, **given)
        found = split(out.metrics(by="label"), "0")
        assert set(found) >= OF_TOKENS
        compare_some(found, out.metrics(), spec, margin(), (seed, spec))


@pytest.mark.parametrize("weight", [rc.Weight.token(), rc.Weight.token(upper=3.0), rc.Weight.product()], ids=str)
def test_weights_of_a_label_with_one_token_have_no_spread(weight):
    logp = torch.linspace(-1.0, 0.5, 40).view(4, 10)
    batch = rc.Batch(labels={"token": rc.Labels(torch.arange(40).view(4, 10), 40)})
    found = rc.correct(logp, torch.zeros_like(logp), batch, spec=rc.Spec(weight)).metrics(by="token")
    spreads = [value for name, value in found.items() if name.endswith(("/weight_std", "/weight_raw_std"))]
    # The root of what float64 leaves between a square and the square of a mean.
    assert len(spreads) >= 40 and max(spreads) <= 1e-7


def test_a_turn_has_a_label():
    for seed, layout in enumerate(("packed", "padded_right", "list", "jagged", "packed_row")):
        sequences = random_sequences(seed)
        laid, turns = lay_out(sequences, layout), random_turns(sequences, seed)
        offsets = offsets_of(laid, turns)
        kinds = torch.arange(offsets.shape[0] - 1) % 3
        flat = kinds.repeat_interleave(offsets.diff())
        if layout == "list":
            spread = list(flat.split([len(q) for q in sequences]))
        elif layout == "jagged":
            spread = torch.nested.nested_tensor_from_jagged(flat, laid.train.offsets())
        else:
            spread = flat.view(laid.shape)
        more = {"label_names": {"kind": 3}, "turns": offsets}
        one, other = (laid.correct(SPECS[1], labels={"kind": ids}, **more) for ids in (kinds, spread))
        assert one.metrics(by="kind") == other.metrics(by="kind")
        assert one.metrics(by="kind")["kind/0/tokens"] > 0


def test_ages_are_labels():
    versions = torch.tensor([[7, 7, 6], [3, 9, 6]])
    x = torch.zeros(2, 3)
    given = {"versions": versions, "current_version": 7, "label_names": {"age": ["0", "1", "2+"]}}
    out = rc.correct(x, x, **bundled(**given))
    by = out.metrics(by="age")
    counts = [by[f"age/{name}/tokens"] for name in ("0", "1", "2+")]
    assert counts == [2, 2, 1] and by["age/tokens_outside"] == 1  # a version of the future
    assert not any("/sequences" in key for key in by) and out.metrics()["age_max"] == 4
    without = rc.correct(x, x, **bundled(**given | {"label_names": {"age": 2}})).metrics(by="age")
    assert without["age/1/tokens"] == 2 and without["age/tokens_outside"] == 2
    of_sequences = rc.correct(x, x, **bundled(**given | {"versions": versions[:, 2]})).metrics(by="age")
    assert of_sequences["age/1/sequences"] == 2 and of_sequences["age/1/tokens"] == 6
    both = rc.correct(
        x, x, **bundled(**given | {"label_names": {"age": 8, "e": 2}, "labels": {"e": torch.tensor([0, 1])}})
    )
    assert both.metrics(by="age")["age/4/tokens"] == 1
    assert both.metrics(by="e")["e/1/tokens"] == 3 and both.metrics()["age/tokens_outside"] == 1
    own = rc.correct(x, x, **bundled(**given | {"labels": {"age": torch.tensor([0, 2])}})).metrics(by="age")
    assert own["age/2+/sequences"] == 1
    with pytest.raises(ValueError, match=r"labels\['age'\]: expected ids, or versions= to make ages of"):
        rc.correct(x, x, rc.Batch(labels={"age": rc.Labels(names=2)}))
    loss = rc.policy_loss(x, x, **bundled_loss(old_logp=x, rollout_logp=x, spec=rc.Spec(), **given))
    assert loss.metrics(by="age") == by


def sign(advantage):
    """The place of its name among the labels; that behind them is of NaN."""
    if advantage < 0:
        return 0
    return 1 if advantage == 0 else 2 if advantage > 0 else 3


ADVANTAGES = (-2.0, 0.0, -math.inf, -0.0, 1e-30, math.nan)
BY_SIGN = {"labels": {"advantage": None}}
SIGNS = ("negative", "zero", "positive")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_signs_of_advantages_are_labels(layout):
    rng, spec = random.Random(layout), SPECS[1]
    sequences = [
        replace(q, advantages=[rng.choice(ADVANTAGES) for _ in q.train])
        for q in spoil(random_sequences(3, (12, 9, 0, 14, 20)), 3)
    ]
    laid, answer = lay_out(sequences, layout), oracle.correct(sequences, spec)
    signs = [[sign(x) for x in q.advantages] for q in sequences]
    found = laid.correct(spec, **BY_SIGN).metrics(by="advantage")
    for place, name in enumerate(SIGNS):
        mine = {key.split("/", 2)[2]: value for key, value in found.items() if key.startswith(f"advantage/{name}/")}
        assert mine["tokens"] > 0 and "token_abs/tokens_rejected_fraction" in mine and "sequences" not in mine
        wanted = oracle_metrics.metrics(oracle_metrics.of_label(answer, signs, place), spec)
        compare_some(mine, wanted, spec, margin(), (layout, name))
    valid = [s for q, row in zip(sequences, signs, strict=True) for s, m in zip(row, q.mask, strict=True) if m]
    assert found["advantage/tokens_outside"] == valid.count(3) > 0


def test_signs_of_advantages_of_sequences_label_sequences():
    spec = SPECS[3]
    sequences = [replace(q, advantages=a) for q, a in zip(random_sequences(5), ADVANTAGES, strict=True)]
    for layout in LAYOUTS:
        found = lay_out(sequences, layout).correct(spec, **BY_SIGN).metrics(by="advantage")
        assert found["advantage/sequences_outside"] == 1
        for place, name in enumerate(SIGNS):
            mine = {key.split("/", 2)[2]: value for key, value in found.items() if key.startswith(f"advantage/{name}/")}
            own = oracle.correct([q for q in sequences if sign(q.advantages) == place], spec)
            assert mine["sequences"] > 0
            compare_some(mine, oracle_metrics.metrics(own, spec), spec, margin(), (layout, name))


def test_a_loss_labels_tokens_by_the_sign_of_its_advantages():
    """Also where its Spec reads no advantage, and in the layout of the call."""
    new, old = torch.full((2, 3), -1.0), torch.tensor([[-1.0, -1.5, -2.0], [-1.0, -1.0, -1.0]])
    rollout, advantages = old - torch.tensor([0.1, 0.2, 0.3]), torch.tensor([[1.0, -1.0, 0.0], [2.0, 0.0, 0.0]])
    spec = rc.Spec(rc.Weight.token(upper=1.15))
    loss = rc.policy_loss(
        new, advantages, **bundled_loss(old_logp=old, rollout_logp=rollout, spec=spec, **BY_SIGN)
    ).metrics(by="advantage")
    assert loss["advantage/positive/logratio_mean"] == pytest.approx(0.1)
    assert loss["advantage/positive/weight_above_upper_fraction"] == 0.0
    assert loss["advantage/negative/logratio_mean"] == pytest.approx(0.2)
    assert loss["advantage/negative/weight_above_upper_fraction"] == 1.0
    assert loss["advantage/zero/tokens"] == 3
    own = rc.correct(old, rollout, **bundled(spec=spec, labels={"advantage": torch.tensor([0, 1])}, label_names=OWN))
    assert own.metrics(by="advantage")["advantage/low/sequences"] == 1  # ids of one's own need no advantages


OWN = {"advantage": ["low", "high"]}


def test_signs_need_advantages_and_no_names():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"labels\['advantage'\]: expected ids, or advantages= of the call"):
        rc.correct(x, x, **bundled(**BY_SIGN))
    with pytest.raises(ValueError, match=r"labels\['advantage'\]\.names: expected none without ids, got \['a'\]"):
        rc.correct(x, x, advantages=x, **bundled(label_names={"advantage": ["a"]}))


@pytest.mark.parametrize("spec", [rc.Spec(), rc.Spec(rc.Weight.token(lower=0.8, upper=1.12))])
@pytest.mark.parametrize("stretch", [1, 900])
def test_of_many_tokens(spec, stretch):
    """Most near D = 0 and a few far: each label has the metrics of its tokens alone, in more than one part of them."""
    generator, size = torch.Generator().manual_seed(3), 70_001
    d = 0.02 * torch.randn(size, generator=generator)
    d[::1700] *= 30.0
    d[[5, 700]] = torch.tensor([30.0, -30.0])
    ids = (torch.arange(size) // stretch) % 5 if stretch > 1 else torch.randint(5, (size,), generator=generator)
    ids[40_000:] = 1
    offsets = torch.tensor([0, 30_000, 30_001, 65_600, size])
    given = {"labels": {"label": ids}, "label_names": {"label": 4}}
    found = rc.correct(d, torch.zeros(size), **bundled(cu_seqlens=offsets, spec=spec, **given)).metrics(by="label")
    assert found["label/tokens_outside"] == (ids == 4).sum()
    for label in range(4):
        x = d[ids == label]
        alone = rc.correct(x, torch.zeros_like(x), cu_seqlens=torch.tensor([0, len(x)]), spec=spec).metrics()
        mine = split(found, str(label))
        assert set(mine) > OF_TOKENS - {"tokens"}
        for key, value in mine.items():
            assert value == near(alone[key], torch.float32), key


@pytest.mark.parametrize("turns", [None, "runs"])
@pytest.mark.parametrize("spec", SPECS[:4], ids=range(4))
def test_no_valid_token(spec, turns):
    zeros, ids = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    given = {"mask": zeros, "turns": turns, "labels": {"label": ids}, "label_names": NAMES}
    found = rc.correct(zeros, zeros, **bundled(spec=spec, **given)).metrics(by="label")
    assert set(found.values()) == {0.0}
    none = rc.correct(
        zeros[:0], zeros[:0], **bundled(spec=spec, **given | {"mask": zeros[:0], "labels": {"label": ids[:0]}})
    )
    assert none.metrics(by="label") == found
