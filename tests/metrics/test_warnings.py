"""`warnings()` is silent about healthy batches of every length and names each kind of garbage."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders import metrics_page
from builders.healthy import at_random, healthy
from rollout_corr.metrics.limits import BY_KEY, LIMITS
from rollout_corr.metrics.native import metrics_of

WEIGHTED = rc.Spec(weight=rc.Weight.token(upper=2.0))
EMPTY = rc.Criterion("ratio", over="sequence", reduce="mean", lower=3.0)


def warned(batch, spec=rc.Spec(), **changed):  # noqa: B008  (frozen)
    given = batch._replace(**changed)
    return rc.correct(*given[:2], mask=given[2], cu_seqlens=given.cu_seqlens, spec=spec).warnings()


def false_alarms(count):
    """What is said of healthy batches, under a Spec that has all that `warnings()` reads but criteria."""
    return [(seed, text) for seed in range(count) for text in warned(at_random(seed), WEIGHTED)]


def test_healthy_batches_of_every_length_are_silent():
    assert not false_alarms(40)


@pytest.mark.slow
def test_a_thousand_healthy_batches_are_silent():
    assert not false_alarms(1000)  # what docs/metrics.md says


def sampled(temperature, top_p=1.0, vocabulary=64, tokens=8000):
    """Log-probs of tokens sampled with a temperature or a top-p, which the trainer does not know about."""
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(tokens, vocabulary, generator=generator)
    engine = (logits / temperature).log_softmax(1)
    ordered, places = engine.sort(1, descending=True)
    behind = ordered.exp().cumsum(1) - ordered.exp() > top_p
    engine = engine.masked_fill(behind.gather(1, places.argsort(1)), -torch.inf).log_softmax(1)
    chosen = torch.multinomial(engine.exp(), 1, generator=generator)
    train, rollout = (x.gather(1, chosen).view(16, -1) for x in (logits.log_softmax(1), engine))
    return {"train_logp": train, "rollout_logp": rollout}


B = healthy(0)
NOISE = torch.randn(B.train_logp.shape, generator=torch.Generator().manual_seed(1))
ZEROS = torch.zeros_like(B.rollout_logp)
PLACE = torch.tensor([700])
# What is changed of a healthy batch, and for each sentence the words that it has to hold.
GARBAGE = {
    "random": (
        {"rollout_logp": -8.0 * NOISE.abs()},
        [("kl_rollout_train_k3", "other weights"), ("chi2_train_rollout",), ("logratio_abs_max",), ("ratio_mean",)],
    ),
    "a shift": (
        {"rollout_logp": B.rollout_logp.roll(1)},
        [("kl_rollout_train_k3", "shifted by a token"), ("ratio_mean", "a shift")],
    ),
    "negative log-likelihoods": (
        {"train_logp": -B.train_logp, "rollout_logp": -B.rollout_logp},
        [("train_logp", "negative log-likelihoods"), ("rollout_logp", "likelihoods")],
    ),
    "negative log-likelihoods of one side": (
        {"rollout_logp": -B.rollout_logp},
        [("rollout_logp", "negative log-likelihoods")],
    ),
    "probabilities": (
        {"train_logp": B.train_logp.exp(), "rollout_logp": B.rollout_logp.exp()},
        [("train_logp", "probabilities"), ("rollout_logp", "probabilities")],
    ),
    "probabilities of one side": ({"rollout_logp": B.rollout_logp.exp()}, [("rollout_logp", "probabilities")]),
    "mask in place of rollout": (
        {"rollout_logp": B.mask.float(), "mask": B.rollout_logp},
        [("rollout_logp", "or a mask")],
    ),
    "rollout is 0": ({"rollout_logp": ZEROS}, [("rollout_logp", "0 at every token", "placeholder")]),
    "rollout is -1": ({"rollout_logp": ZEROS - 1.0}, [("rollout_logp", "-1 at every token", "placeholder")]),
    "both are 0": (
        {"train_logp": ZEROS, "rollout_logp": ZEROS},
        [("train_logp", "with the trainer"), ("rollout_logp", "ask the engine")],
    ),
    "rollout is -9999": ({"rollout_logp": ZEROS - 9999.0}, [("logratio_abs_max", "placeholders", "-9999")]),
    "identical": ({"rollout_logp": B.train_logp}, [("identical", "same tensor")]),
    "all masked": ({"mask": torch.zeros_like(B.mask)}, [("no valid token", "mask is 0")]),
    "NaN": ({"rollout_logp": B.rollout_logp.where(NOISE < 3.0, torch.nan)}, [("NaN", "no log-prob")]),
    "everything rejected": ({"spec": rc.Spec(criteria=(EMPTY,))}, [("every token is rejected", "bounds")]),
    "one weight for all": (
        {
            "train_logp": B.train_logp.index_fill(0, PLACE, -0.0),
            "rollout_logp": B.rollout_logp.index_fill(0, PLACE, -9.5),
            "spec": rc.Spec(weight=rc.Weight.token()),
            "mask": torch.ones_like(B.mask),
        },
        [("effective sample size",)],
    ),
    # On the CPU these offsets are refused; on a device they are not read.
    "offsets that are lengths": ({"cu_seqlens": B.lengths.sort().values[:8]}, [("cu_seqlens", "cumulative offsets")]),
    "temperature": (sampled(0.6), [("kl_rollout_train_k3", "temperature")]),
    "top-p": (sampled(1.0, top_p=0.9), [("ratio_mean", "top-p")]),
}


def said_of(name):
    """The sentences about a kind of garbage."""
    changed, _ = GARBAGE[name]
    healthy_one = {field: getattr(B, field) for field in ("train_logp", "rollout_logp", "mask", "cu_seqlens")}
    given = changed if name in ("temperature", "top-p") else healthy_one | changed
    return rc.correct(**{"spec": rc.Spec(), **given}).warnings()


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_named(name):
    said = said_of(name)
    for words in GARBAGE[name][1]:
        assert any(all(word in text for word in words) for text in said), (words, said)


def test_one_token_and_no_finite_token():
    x = -torch.rand(5)
    (outside,) = rc.correct(x, x - 0.01, cu_seqlens=torch.tensor([0, 2, 4])).warnings()
    assert outside.startswith("1 valid token belongs to no sequence")
    found = rc.correct(x[None] * torch.nan, x[None]).warnings()
    assert found[0].startswith("5 valid tokens have a NaN") and not any("ratio_mean" in text for text in found)


def test_values_that_are_no_log_probs_are_named_alone():
    """How far they are apart would send the reader after the wrong cause."""
    for name in ("negative log-likelihoods", "probabilities", "rollout is 0", "rollout is -1", "identical"):
        assert not re.search("kl_rollout_train_k3|chi2|logratio_abs_max|ratio_mean", " ".join(said_of(name)))


def test_a_few_certain_tokens_are_no_filler():
    certain = torch.zeros(1, 8)
    assert rc.correct(certain, certain).warnings() == []
    some = torch.zeros(4, 100).index_fill(1, torch.tensor([5]), -1e-4)
    assert rc.correct(some, torch.zeros(4, 100), mask=torch.ones(4, 100)).warnings() == []


def padded(left=False, dtype=torch.float32):
    """A healthy batch of rows, with zeros where they have no token, and its mask."""
    batch = healthy(0, median=60)
    shape = len(batch.lengths), int(batch.lengths.max())
    column, n = torch.arange(shape[1]), batch.lengths[:, None]
    mask = column >= shape[1] - n if left else column < n
    train, rollout = (torch.zeros(shape).masked_scatter(mask, x).to(dtype) for x in batch[:2])
    return train, rollout, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("left", [False, True])
def test_padding_without_a_mask_is_named(left, dtype):
    train, rollout, mask = padded(left, dtype)
    (said,) = rc.correct(train, rollout).warnings()
    assert said.startswith("31 of 32 rows begin or end with tokens that have one and the same value on both sides")
    assert rc.correct(train, rollout, mask=mask).warnings() == []
    # The engine's side alone is 0 there, or the rows are wide enough for their answers.
    assert not any("padding" in said for said in rc.correct(train - 0.01, rollout).warnings())
    # Any value fills; two tokens that are not 0 may be alike by chance.
    (said,) = rc.correct(train.where(mask, -1.0), rollout.where(mask, -1.0)).warnings()
    assert "have one and the same value on both sides" in said
    assert rc.correct(train[:, :8] - 1.0, rollout[:, :8] - 1.0).metrics()["sequences_padded"] == 0


def test_rows_that_end_in_certain_tokens_are_no_padding():
    """A fifth of the rows, 8 tokens at an end, and no narrower row than 4: each of the bounds of the count."""

    def padded_of(rows, zeros, width):
        x = torch.full((10, width), -1.0)
        x[:rows, width - zeros :] = 0.0
        return rc.correct(x, x + 1e-3 * torch.randn(x.shape) * (x < 0))

    assert [padded_of(5, n, 100).metrics()["sequences_padded"] for n in (7, 8, 60)] == [0, 5, 5]
    assert [padded_of(5, 3, n).metrics()["sequences_padded"] for n in (3, 4, 12, 16)] == [0, 5, 5, 0]
    assert [len(padded_of(rows, 9, 100).warnings()) for rows in (1, 2)] == [0, 1]
    one = rc.correct(*(torch.zeros(1, 40) - (torch.arange(40) < 20) * x for x in (1.0, 1.001)))
    assert one.metrics()["sequences_padded"] == 1 and one.warnings() == []


def noisy(spread, batch, **more):
    """The warnings of a healthy batch whose trainer has so much noise more."""
    noise = spread * torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2))
    train = batch.rollout_logp + noise * -batch.rollout_logp.expm1() - 0.3 * spread * spread
    of = rc.Batch(mask=batch.mask, cu_seqlens=batch.cu_seqlens, **more)
    return rc.correct(train, batch.rollout_logp, of, spec=rc.Spec(detail="full")).warnings()


def test_a_mismatch_between_watch_and_alarm_is_said_mildly():
    batch = healthy(0)
    (mild,) = noisy(0.35, batch)
    assert mild.startswith("watch: kl_rollout_train_k3 is 0.01") and "name the cause" in mild
    loud = noisy(0.9, batch)[0]
    assert loud.startswith("kl_rollout_train_k3 is 0.") and "the two probabilities correlate (0.9" in loud


def test_a_large_k3_names_low_precision_and_staleness_before_bugs():
    """Ages, where the call has them, exclude staleness."""
    logp, d = -torch.arange(1.0, 513.0).view(8, 64) / 100, 0.6 * torch.tensor([-1.0, 1.0]).repeat(8, 32)
    (said,) = [x for x in rc.correct(logp + d, logp).warnings() if x.startswith("kl_rollout_train_k3")]
    assert "likely causes: a low-precision or an older engine, which a correction is for; or a bug:" in said
    of = rc.Batch(versions=rc.Versions(torch.full((8,), 3), 3))
    (said,) = [x for x in rc.correct(logp + d, logp, of).warnings() if x.startswith("kl_rollout_train_k3")]
    assert "likely causes: a low-precision engine, which a correction is for; or a bug:" in said


def test_old_tokens_are_named_before_other_causes():
    batch = healthy(0)
    for version, said in ((0, "tokens are 8 versions old on average"), (8, "so it is not staleness")):
        versions = rc.Versions(torch.full((32,), version), 8)
        assert said in noisy(0.6, batch, versions=versions)[0]
    assert noisy(0.02, batch, versions=rc.Versions(torch.zeros(32, dtype=torch.long), 8)) == []


def test_the_full_detail_tells_fillers_and_shifts_apart():
    batch, full = healthy(0), rc.Spec(detail="full")
    some = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    for filler in (0.0, -1.0):
        said = warned(batch, full, rollout_logp=batch.rollout_logp.masked_fill(some, filler))
        assert said[0].startswith("rollout_logp is exactly 0 or -1 at ") and "placeholders" in said[0]
        said = warned(batch, full, train_logp=batch.train_logp.masked_fill(some, filler))
        assert said[0].startswith("train_logp is exactly 0 or -1 at ") and "with the trainer" in said[0]
    shifted = warned(batch, full, rollout_logp=batch.rollout_logp.roll(1))
    assert "hardly correlate" in shifted[0] and "shifted by a token" in shifted[0]
    # Certain tokens among others: exact zeros on both sides.
    certain = batch.rollout_logp.masked_fill(some, 0.0)
    assert not any(
        "placeholders where" in x for x in warned(batch, full, train_logp=certain.roll(1), rollout_logp=certain)
    )


def test_bounds_are_advised_where_the_policies_agree():
    batch = healthy(0)
    narrow = rc.Spec(criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.999, upper=1.001),))
    (said,) = warned(batch, narrow)
    assert said.startswith("only ") and "rc.suggest" in said and "find out" not in said
    *_, said = warned(batch, narrow, rollout_logp=batch.rollout_logp.roll(1))
    assert "first find out why" in said and said.endswith("name the cause") and "rc.suggest" not in said
    # A bound that the batch decides rejects by design.
    fifth = rc.Spec(criteria=(rc.Criterion("abs", over="sequence", reduce="mean", upper=rc.Quantile(0.8)),))
    assert warned(batch, fifth) == []


@pytest.mark.parametrize("length", [300, 600, 1000])
@pytest.mark.parametrize("far", [-7.0, 7.0])
def test_a_wrong_token_in_every_sequence_is_seen_at_any_length(length, far):
    """Each carries little of k3, which stays healthy: the engine has no log-prob of the last token."""
    generator = torch.Generator().manual_seed(1)
    rollout = -4.0 * torch.rand(64, length, generator=generator) - 8.0
    train = rollout + 0.01 * torch.randn(64, length, generator=generator)
    assert rc.correct(train, rollout).warnings() == []
    train[: 64 if far < 0.0 else 1, -1] += far
    assert any("logratio_abs_max" in text for text in rc.correct(train, rollout).warnings())


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.85, 1.0])
def test_raw_log_probs_of_another_temperature_are_seen_by_the_entropy(temperature):
    generator = torch.Generator().manual_seed(3)
    logits = 3.0 * torch.randn(4000, 64, generator=generator)
    logp = logits.log_softmax(1)
    chosen = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
    train, entropy = logp.gather(1, chosen).view(20, -1), -(logp.exp() * logp).sum(1).view(20, -1)
    rollout = train + 0.01 * torch.randn(train.shape, generator=generator) * train.expm1()
    batch = rc.Batch(entropy=entropy, mask=torch.ones_like(train))
    found = rc.correct(train, rollout, batch).warnings()
    assert [text.startswith("the mean entropy is") for text in found] == [True] * (temperature < 1.0)
    doctor = [one.name for one in rc.doctor(train, rollout, batch).findings]
    assert doctor == ["raw_log_probs"] * (temperature < 1.0)


def test_units_whose_id_names_no_label_are_named():
    x = -torch.rand(4, 30)
    labels = {"environment": rc.Labels(torch.tensor([0, 1, 2, -1]), ("math", "code"))}
    (said,) = rc.correct(x, x - 1e-3 * torch.rand(4, 30), rc.Batch(labels=labels)).warnings()
    assert said.startswith("2 sequences have an id of 'environment' without a label (ids are 0 to 1)")


def test_merged_statistics_speak_once():
    parts = [healthy(seed, sequences=4, median=30) for seed in range(8)]
    found = [rc.correct(*part[:2], mask=part[2], cu_seqlens=part.cu_seqlens).statistics for part in parts]
    total = found[0]
    for part in found[1:]:
        total = total + part
    assert total.warnings() == []


def test_every_limit_is_a_metric_and_says_why():
    specs = [rc.Spec(weight=weight) for weight in (rc.Weight.token(), rc.Weight.product())]
    keys = {row.key: row for spec in specs for row in metrics_of(spec)}
    for limit in LIMITS:
        assert keys[limit.key].healthy == limit.range and limit.reason and limit.hint
        beyond = 1e-6 if limit.beyond == "above" else -1e-6
        values = (limit.watch, limit.watch + beyond, limit.alarm, limit.alarm + beyond, float("nan"))
        between = "watch" if limit.alarm != limit.watch else "alarm"
        wanted = ["healthy", between, "watch" if between == "watch" else "healthy", "alarm", "healthy"]
        assert [limit.state(value) for value in values] == wanted
        assert f"| {limit.range} | {limit.beyond} {limit.alarm:g} |" in metrics_page.watched()
    assert len(BY_KEY) == len(LIMITS)


def test_a_loss_names_tokens_without_a_number():
    """Advantages that were divided by a spread of 0 left nothing to train, and nothing was said."""
    logp = -torch.rand(2, 5, requires_grad=True)
    for spec in (None, rc.Spec()):
        given = {"old_logp": logp} | ({} if spec is None else {"rollout_logp": logp - 0.01, "spec": spec})
        fine, broken = (rc.policy_loss(logp, torch.tensor([x, 1.0]), **given) for x in (1.0, float("nan")))
        assert fine.warnings() == []
        (said,) = broken.warnings()
        assert said.startswith("5 valid tokens have NaN or infinity in what the loss needs: look at new_logp,")


def test_a_bound_of_the_weight_on_the_wrong_side_of_1_is_named():
    """`Weight("token", upper=0.5)` halved every weight and nothing was said."""
    logp = -torch.rand(4, 16)
    for weight, side in (
        (rc.Weight("token", upper=0.5), "upper is 0.5, below 1"),
        (rc.Weight.product(lower=3), "lower is 3"),
    ):
        assert any(f"Weight.{side}" in said for said in rc.correct(logp, logp - 0.01, spec=rc.Spec(weight)).warnings())
    for weight in (rc.Weight.token(lower=0.5, upper=2.0), rc.Weight.token(lower=1.0, upper=1.0), rc.Weight.token()):
        said = rc.correct(logp, logp - 0.01, spec=rc.Spec(weight)).warnings()
        assert not any("Weight." in one for one in said)
