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

SPECS = (rc.Spec(), rc.Spec(weight=rc.Weight.token(upper=2.0)))
EMPTY = rc.Criterion("ratio", over="sequence", reduce="mean", lower=3.0)


def warned(batch, spec=rc.Spec(), **changed):  # noqa: B008  (frozen)
    given = batch._replace(**changed)
    return rc.correct(*given[:2], mask=given[2], cu_seqlens=given.cu_seqlens, spec=spec).warnings()


def false_alarms(count):
    found = [(seed, text) for seed in range(count) for spec in SPECS for text in warned(at_random(seed), spec)]
    return len({seed for seed, _ in found}), found


def test_healthy_batches_of_every_length_are_silent():
    alarms, found = false_alarms(40)
    assert not alarms, found


@pytest.mark.slow
def test_a_thousand_healthy_batches_are_silent():
    alarms, found = false_alarms(1000)
    assert alarms == 0, found  # what docs/metrics.md says


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


def garbage(name):
    """The arguments of `correct` for a kind of garbage."""
    batch = healthy(0)
    train, rollout, mask, cu_seqlens, lengths = batch
    noise = torch.randn(train.shape, generator=torch.Generator().manual_seed(1))
    given = {"train_logp": train, "rollout_logp": rollout, "mask": mask, "cu_seqlens": cu_seqlens}
    changed = {
        "random": lambda: {"rollout_logp": -8.0 * noise.abs()},
        "a shift": lambda: {"rollout_logp": rollout.roll(1)},
        "negative log-likelihoods": lambda: {"train_logp": -train, "rollout_logp": -rollout},
        "negative log-likelihoods of one side": lambda: {"rollout_logp": -rollout},
        "probabilities": lambda: {"train_logp": train.exp(), "rollout_logp": rollout.exp()},
        "probabilities of one side": lambda: {"rollout_logp": rollout.exp()},
        "mask in place of rollout": lambda: {"rollout_logp": mask.float(), "mask": rollout},
        "rollout is 0": lambda: {"rollout_logp": torch.zeros_like(rollout)},
        "rollout is -1": lambda: {"rollout_logp": torch.full_like(rollout, -1.0)},
        "both are 0": lambda: {"train_logp": torch.zeros_like(rollout), "rollout_logp": torch.zeros_like(rollout)},
        "rollout is -9999": lambda: {"rollout_logp": torch.full_like(rollout, -9999.0)},
        "identical": lambda: {"rollout_logp": train},
        "all masked": lambda: {"mask": torch.zeros_like(mask)},
        "NaN": lambda: {"rollout_logp": rollout.where(noise < 3.0, torch.nan)},
        "everything rejected": lambda: {"spec": rc.Spec(criteria=(EMPTY,))},
        "one weight for all": lambda: {
            "train_logp": train.index_fill(0, torch.tensor([700]), -0.0),
            "rollout_logp": rollout.index_fill(0, torch.tensor([700]), -9.5),
            "spec": rc.Spec(weight=rc.Weight.token()),
            "mask": torch.ones_like(mask),
        },
        # On the CPU these offsets are refused; on a device they are not read.
        "offsets that are lengths": lambda: {"cu_seqlens": lengths.sort().values[:8]},
    }
    if name in changed:
        return given | changed[name]()
    return sampled(**{"temperature": {"temperature": 0.6}, "top-p": {"temperature": 1.0, "top_p": 0.9}}[name])


# Words that one sentence has to hold.
NAMED = {
    "random": (
        ("kl_rollout_train_k3", "other weights"),
        ("chi2_train_rollout",),
        ("logratio_abs_max",),
        ("ratio_mean",),
    ),
    "a shift": (("kl_rollout_train_k3", "shifted by a token"), ("ratio_mean", "a shift")),
    "negative log-likelihoods": (("train_logp", "negative log-likelihoods"), ("rollout_logp", "likelihoods")),
    "negative log-likelihoods of one side": (("rollout_logp", "negative log-likelihoods"),),
    "probabilities": (("train_logp", "probabilities"), ("rollout_logp", "probabilities")),
    "probabilities of one side": (("rollout_logp", "probabilities"),),
    "mask in place of rollout": (("rollout_logp", "a mask in their place"),),
    "rollout is 0": (("rollout_logp", "0 at every token", "placeholder"),),
    "rollout is -1": (("rollout_logp", "-1 at every token", "placeholder"),),
    "both are 0": (("train_logp", "with the trainer"), ("rollout_logp", "ask the engine")),
    "rollout is -9999": (("logratio_abs_max", "placeholders", "-9999"),),
    "identical": (("identical", "same tensor"),),
    "all masked": (("no valid token", "mask is 0"),),
    "NaN": (("NaN", "no log-prob"),),
    "everything rejected": (("everything is rejected", "bounds"),),
    "one weight for all": (("effective sample size",),),
    "offsets that are lengths": (("cu_seqlens", "offsets, which add lengths up"),),
    "temperature": (("kl_rollout_train_k3", "temperature"),),
    "top-p": (("ratio_mean", "top-p"),),
}


@pytest.mark.parametrize("name", NAMED)
def test_garbage_is_named(name):
    given = garbage(name)
    spec = given.pop("spec", rc.Spec())
    found = rc.correct(**given, spec=spec).warnings()
    for words in NAMED[name]:
        assert any(all(word in text for word in words) for text in found), (words, found)


def test_one_token_and_no_finite_token():
    x = -torch.rand(5)
    (outside,) = rc.correct(x, x - 0.01, cu_seqlens=torch.tensor([0, 2, 4])).warnings()
    assert outside.startswith("1 valid token belongs to no sequence")
    found = rc.correct(x[None] * torch.nan, x[None]).warnings()
    assert found[0].startswith("5 valid tokens have a NaN") and not any("ratio_mean" in text for text in found)


def test_values_that_are_no_log_probs_are_named_alone():
    """How far they are apart would send the reader after the wrong cause."""
    for name in ("negative log-likelihoods", "probabilities", "rollout is 0", "rollout is -1", "identical"):
        assert not re.search(
            "kl_rollout_train_k3|chi2|logratio_abs_max|ratio_mean", " ".join(rc.correct(**garbage(name)).warnings())
        )


def test_a_few_certain_tokens_are_no_filler():
    certain = torch.zeros(1, 8)
    assert rc.correct(certain, certain).warnings() == []
    some = torch.zeros(4, 100).index_fill(1, torch.tensor([5]), -1e-4)
    assert rc.correct(some, torch.zeros(4, 100)).warnings() == []


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
    logp = -torch.rand(2, 5)
    for spec in (None, rc.Spec()):
        given = {"old_logp": logp, "rollout_logp": logp - 0.01, "spec": spec}
        fine, broken = (rc.policy_loss(logp, torch.tensor([x, 1.0]), **given) for x in (1.0, float("nan")))
        assert fine.warnings() == []
        (said,) = broken.warnings()
        assert said.startswith("5 valid tokens have NaN or infinity in what the loss needs: look at new_logp,")
