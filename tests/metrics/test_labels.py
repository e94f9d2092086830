"""What labels are made of and where they appear; their numbers are judged in test_random_calls.py."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near

pytestmark = pytest.mark.usefixtures("one_thread")

X, IDS = torch.zeros(2, 3), torch.tensor([0, 1])
ROLLOUT = -torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
TRAIN = ROLLOUT + 0.2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
SPEC = rc.Spec(
    rc.Weight.token(lower=0.7, upper=1.3),
    (rc.Criterion("k3", upper=0.1), rc.Criterion("ratio", "sequence", "mean", lower=0.8, upper=1.3)),
)
# The last sequence but one has no valid token, and two ids name no label.
MASK = torch.tensor([[1, 1, 0, 1]] * 4 + [[0] * 4] + [[1] * 4])
NAMES, OF = ("math", "code", "never"), torch.tensor([0, 1, 7, 0, -1, -1])


def labeled(rows=slice(None), names=NAMES, spec=SPEC):
    batch = rc.Batch(mask=MASK[rows], labels={"environment": rc.Labels(OF[rows], names)})
    return rc.correct(TRAIN[rows], ROLLOUT[rows], batch, spec=spec)


def test_labels_change_nothing_else_and_outside_is_counted():
    plain, out = rc.correct(TRAIN, ROLLOUT, mask=MASK, spec=SPEC), labeled()
    assert torch.equal(plain.weights, out.weights) and torch.equal(plain.mask, out.mask)
    metrics = out.metrics()
    assert metrics.pop("environment/sequences_outside") == 2
    assert metrics == plain.metrics() and list(metrics) == list(plain.metrics())
    by = out.metrics_async().result(prefix="mismatch/", by="environment")
    assert by == {f"mismatch/{key}": value for key, value in out.metrics(by="environment").items()}
    assert [by[f"mismatch/environment/{name}/sequences"] for name in NAMES] == [2, 1, 0]
    assert by["mismatch/environment/never/tokens"] == 0.0


def test_labels_have_no_metrics_of_other_frameworks():
    out = labeled(spec=rc.spec("verl.decoupled_token_is"))
    with pytest.raises(ValueError, match="by: expected None with names='verl', got 'environment': only nat"):
        out.metrics(names="verl", by="environment")
    assert out.metrics(names="verl") and out.metrics(by="environment")


def test_micro_batches_merge():
    parts = [labeled(slice(4)).statistics, labeled(slice(4, None)).statistics]
    merged = rc.Statistics.sum([rc.Statistics.nothing(SPEC, extra=parts[0].extra), *parts])
    assert merged.metrics(by="environment") == near(labeled().metrics(by="environment"), torch.float32)
    with pytest.raises(ValueError, match="other: expected statistics of the same arguments"):
        merged.merge(labeled(names=("other", "names")).statistics)


def test_in_a_loss():
    batch = rc.Batch(mask=MASK, labels={"e": rc.Labels(torch.tensor([0, 1, 1, 0, 1, 0]), 2)})
    given = {"old_logp": TRAIN, "rollout_logp": ROLLOUT}
    loss = rc.policy_loss(TRAIN, torch.ones(6), batch, spec=SPEC, **given)
    assert loss.metrics(by="e") == rc.correct(TRAIN, ROLLOUT, batch, spec=SPEC).metrics(by="e")
    assert "surrogate_loss_mean" in loss.metrics()
    # Without a Spec nothing reads them.
    assert "surrogate_loss_mean" in rc.policy_loss(TRAIN, torch.ones(6), batch, **given).metrics()


def test_a_list_without_samples_has_labels_without_ids():
    out = rc.correct([], [], rc.Batch(labels={"place": rc.Labels([], ["a", "b"])}), spec=rc.Spec())
    assert out.metrics()["tokens"] == 0


@pytest.mark.parametrize("weight", [rc.Weight.token(), rc.Weight.token(upper=3.0), rc.Weight.product()], ids=str)
def test_weights_of_a_label_with_one_token_have_no_spread(weight):
    logp = torch.linspace(-1.0, 0.5, 40).view(4, 10)
    batch = rc.Batch(labels={"token": rc.Labels(torch.arange(40).view(4, 10), 40)})
    found = rc.correct(logp, torch.zeros_like(logp), batch, spec=rc.Spec(weight)).metrics(by="token")
    spreads = [value for name, value in found.items() if name.endswith(("/weight_std", "/weight_raw_std"))]
    # The root of what float64 leaves between a square and the square of a mean.
    assert len(spreads) >= 40 and max(spreads) <= 1e-7


VERSIONS = torch.tensor([[7, 7, 6], [3, 9, 6]])


@pytest.mark.parametrize(
    ("versions", "labels", "by", "wanted"),
    [
        (VERSIONS, {"age": rc.Labels(names=["0", "1", "2+"])}, "age", {"0/tokens": 2, "1/tokens": 2, "2+/tokens": 1}),
        (VERSIONS, {"age": rc.Labels(names=["0", "1", "2+"])}, "age", {"tokens_outside": 1}),  # of the future
        (VERSIONS, {"age": rc.Labels(names=2)}, "age", {"1/tokens": 2, "tokens_outside": 2}),
        (VERSIONS[:, 2], {"age": rc.Labels(names=2)}, "age", {"1/sequences": 2, "1/tokens": 6}),
        (VERSIONS, {"age": rc.Labels(names=8), "e": rc.Labels(IDS, 2)}, "age", {"4/tokens": 1}),
        (VERSIONS, {"age": rc.Labels(names=8), "e": rc.Labels(IDS, 2)}, "e", {"1/tokens": 3}),
        (VERSIONS, {"age": rc.Labels(torch.tensor([0, 2]), ["0", "1", "2+"])}, "age", {"2+/sequences": 1}),
    ],
)
def test_ages_are_labels(versions, labels, by, wanted):
    batch = rc.Batch(versions=rc.Versions(versions, 7), labels=labels)
    found = rc.correct(X, X, batch).metrics(by=by)
    assert {key: found[f"{by}/{key}"] for key in wanted} == wanted
    assert rc.policy_loss(X, X, batch, old_logp=X, rollout_logp=X, spec=rc.Spec()).metrics(by=by) == found


def test_a_loss_labels_tokens_by_the_sign_of_its_advantages():
    """Also where its Spec reads no advantage, and in the layout of the call."""
    new, old = torch.full((2, 3), -1.0), torch.tensor([[-1.0, -1.5, -2.0], [-1.0, -1.0, -1.0]])
    rollout, advantages = old - torch.tensor([0.1, 0.2, 0.3]), torch.tensor([[1.0, -1.0, 0.0], [2.0, 0.0, 0.0]])
    spec, by_sign = rc.Spec(rc.Weight.token(upper=1.15)), rc.Batch(labels={"advantage": rc.Labels()})
    loss = rc.policy_loss(new, advantages, by_sign, old_logp=old, rollout_logp=rollout, spec=spec).metrics(
        by="advantage"
    )
    assert loss["advantage/positive/logratio_mean"] == pytest.approx(0.1)
    assert loss["advantage/positive/weight_above_upper_fraction"] == 0.0
    assert loss["advantage/negative/logratio_mean"] == pytest.approx(0.2)
    assert loss["advantage/negative/weight_above_upper_fraction"] == 1.0
    assert loss["advantage/zero/tokens"] == 3
    own = rc.correct(old, rollout, rc.Batch(labels={"advantage": rc.Labels(IDS, ["low", "high"])}), spec=spec)
    assert own.metrics(by="advantage")["advantage/low/sequences"] == 1  # ids of one's own need no advantages


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
    batch = rc.Batch(cu_seqlens=torch.tensor([0, 30_000, 30_001, 65_600, size]), labels={"label": rc.Labels(ids, 4)})
    found = rc.correct(d, torch.zeros(size), batch, spec=spec).metrics(by="label")
    assert found["label/tokens_outside"] == (ids == 4).sum()
    for label in range(4):
        x = d[ids == label]
        alone = rc.correct(x, torch.zeros_like(x), cu_seqlens=torch.tensor([0, len(x)]), spec=spec).metrics()
        mine = {key.removeprefix(f"label/{label}/"): x for key, x in found.items() if key.startswith(f"label/{label}/")}
        assert len(mine) > 15 and mine == near({key: alone[key] for key in mine}, torch.float32)


@pytest.mark.parametrize("turns", [None, "runs"])
@pytest.mark.parametrize("weight", [None, rc.Weight.token(upper=1.2, outside="zero"), rc.Weight.product(lower=0.5)])
def test_no_valid_token(weight, turns):
    found = []
    for rows in (2, 0):
        ids = torch.zeros(rows, 3, dtype=torch.int64)
        batch = rc.Batch(mask=X[:rows], turns=turns, labels={"label": rc.Labels(ids, NAMES)})
        spec = rc.Spec(weight, (rc.Criterion("k3", upper=0.1),))
        found.append(rc.correct(X[:rows], X[:rows], batch, spec=spec).metrics(by="label"))
    assert found[0] == found[1] and set(found[0].values()) == {0.0}


V, T = ValueError, TypeError


def wrong(labels, **given):
    return lambda: rc.correct(X, X, rc.Batch(labels=labels), **given)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (wrong({"e": rc.Labels(IDS)}), V, "labels['e'].names: expected a list of names or a count above 0, go"),
        (wrong({"e": rc.Labels(names=2)}), T, "labels['e']: expected a tensor or a list of tensors, got NoneTyp"),
        (wrong([IDS]), T, "labels: expected a mapping of names to rc.Labels(ids, names)"),
        (wrong({"e": IDS}), T, "labels['e']: expected rc.Labels(ids, names)"),
        (wrong({"e": rc.Labels(torch.zeros(3).long(), 2)}), V, "labels['e']: expected shape [2, 3] (per token), "
         "[2] or [2, 1] (per sequence), got [3]"),
        (wrong({"e": rc.Labels(IDS.float(), 2)}), V, "labels['e']: expected"),
        (wrong({"e": rc.Labels((0, 1), 2)}), T, "labels['e']: expected a tensor or a list of tensors, got tuple"),
        (wrong({"e": rc.Labels(IDS, 0)}), V, "labels['e'].names: expected a list of names or a count above 0, g"),
        (wrong({"e": rc.Labels(IDS, ["a", "a"])}), V, "labels['e'].names: expected different names"),
        (wrong({"e": rc.Labels(IDS, ["a/b"])}), V, "labels['e'].names: expected strings without '/'"),
        (wrong({"a/b": rc.Labels(IDS, 2)}), V, "labels: expected names that are strings without '/' and '='"),
        (wrong({"age": rc.Labels(names=2)}), V, "labels['age']: expected ids, or versions= to make ages of"),
        (wrong({"advantage": rc.Labels()}), V, "labels['advantage']: expected ids, or advantages= of the call"),
        (wrong({"advantage": rc.Labels(names=["a"])}, advantages=X), V, "labels['advantage'].names: expected "
         "none without ids, got ['a']"),
        (lambda: labeled().metrics(by="f"), V, "by: expected one of ['environment']"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        call()
