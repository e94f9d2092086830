"""Likely mistakes are answered with the call that was meant."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch

import rollout_corr as rc

X = -torch.rand(2, 3)
WEIGHT, CRITERION = rc.Weight.token(upper=2.0), rc.Criterion("ratio", upper=2.0)
LOSS = rc.policy_loss(X, torch.ones(2), old_logp=X)

MISTAKES = {
    "a recipe's name": (lambda: rc.correct(X, X, spec="trl.dapo"), "rc.spec('trl.dapo')"),
    "the loss too": (lambda: rc.policy_loss(X, X, old_logp=X, rollout_logp=X, spec="verl.x"), "rc.spec('verl.x')"),
    "settings": (lambda: rc.correct(X, X, spec={"rollout_is": "token"}), "rc.spec(framework, settings)"),
    "a weight": (lambda: rc.correct(X, X, spec=WEIGHT), "write Spec(weight=Weight.token(upper=2.0))"),
    "a criterion": (lambda: rc.correct(X, X, spec=CRITERION), 'criteria=(Criterion("ratio", upper=2.0),)'),
    "sequence": (lambda: rc.Weight("sequence"), "expected 'sum', the product of the ratios, or 'mean', their"),
    "the old word": (lambda: rc.Weight("product"), "got 'product'; write Weight.product(...)"),
    "the old field": (lambda: rc.Weight(level="token"), "unknown argument 'level', expected some of ['over', 'reduce'"),
    "a bound by a framework's word": (lambda: rc.Weight.token(clip_max=2), "Weight.token: unknown argument 'clip_max'"),
    "logs of bounds": (lambda: rc.Weight.token(lower=-0.5, upper=0.5), "of the log -0.5 pass 0.606531"),
    "log of an upper bound": (lambda: rc.Criterion("ratio", upper=-0.1), "of the log -0.1 pass 0.904837"),
    "logits": (lambda: rc.correct(X[..., None], X), "logits.log_softmax(-1).gather(-1, token_ids[..., None])"),
    "mask second": (lambda: rc.correct(X, X < 0, mask=X), "is it the mask? Write mask=..., after train_logp"),
    "integers second": (lambda: rc.correct(X, (X < 0).long(), mask=X), "is it the mask? Write mask=..., after"),
    "a framework alone": (lambda: rc.spec("verl"), "rc.spec('verl', config), or one of its names: verl."),
    "threshold of a weight": (lambda: rc.Weight.token(threshold=2.0), "did you mean upper=?"),
    "an argument of a weight": (lambda: rc.Weight.token(uper=2.0), "expected some of ['lower', 'upper', 'outside'"),
    "threshold of a criterion": (lambda: rc.Criterion("ratio", threshold=2.0), "did you mean upper= (and lower=)?"),
    "weights of a Spec": (lambda: rc.Spec(weights=WEIGHT), "did you mean weight=Weight(...)?"),
    "PPO's clip": (lambda: rc.PPO(clip=0.2), "did you mean low= and high=?"),
    "an argument of a spec": (lambda: rc.spec("verl.decoupled_token_is", uper=2.0), "did you mean upper=?"),
    "arguments of a spec": (lambda: rc.spec("verl.decoupled_token_is", zzz=2.0), "; it takes ['upper'"),
    "a framework as a recipe": (lambda: rc.recipe("trl"), "rc.recipe('trl', config), or one of its names: trl.async_"),
    "a recipe as a spec": (lambda: rc.spec("trl.dapo"), "a whole loss: rc.recipe('trl.dapo')"),
    "a spec as a recipe": (lambda: rc.recipe("trl.default"), "a correction without a loss: rc.spec('trl.default')"),
    "verl's own name": (lambda: rc.recipe("verl.vanilla"), "'verl.vanilla'; verl has verl.bypass_pg_geo_rs, "),
    "a result for its statistics": (lambda: rc.Statistics.sum([rc.correct(X, X)]), "parts[0]: expected Statistics, got "
        "Correction; pass its .statistics"),
    "another report": (lambda: rc.correct(X, X).metrics("verl"), "ask for them by Spec(report=('native', 'verl'))"),
    "a report that is none": (lambda: rc.correct(X, X).metrics("trl"), "(Spec.report), got 'trl'"),
    "labels that were not given": (lambda: rc.correct(X, X).metrics(by="tool"), "(the labels of the Batch)"),
    "a loss that a framework lacks": (lambda: rc.recipe("prime_rl.ppo"), "'prime_rl.dppo' or 'prime_rl.ipo'"),
    "a loss without its framework": (lambda: rc.recipe("ppo"), ".ppo'"),
    "a misspelled setting": (lambda: rc.spec("verl", {"rollout_is_treshold": 2}), "'rollout_is_threshold'?"),
    "backward": (lambda: LOSS.backward(), "write .value.backward()"),
    "item": (lambda: LOSS.item(), "write .value.item()"),
}  # fmt: skip


def test_bounds_of_other_statistics_are_not_taken_for_logs():
    with pytest.raises(ValueError, match=r"expected a number >= 0, got -0\.1$"):
        rc.Criterion("k2", lower=-0.1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_was_meant(mistake):
    make, answer = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError), match=re.escape(answer)):
        make()


def test_a_framework_without_a_reader_names_its_specs():
    with pytest.raises(ValueError, match=r"spec: expected a framework .*by name there is megatron\.\w+"):
        rc.spec("megatron", {"x": 1})
    with pytest.raises(ValueError, match=r"spec: got the framework 'megatron' alone, expected one of its names: megat"):
        rc.spec("megatron")
    with pytest.raises(ValueError, match=r"got 'verll', did you mean 'verl'\?$"):
        rc.spec("verll", {})
    with pytest.raises(ValueError, match=r"'trl\.default' is built by name, .*such as clip_max=\.\.\., got a config"):
        rc.spec("trl.default", {"clip_max": 2.0})
    with pytest.raises(TypeError, match="expected a framework and one configuration, got 2"):
        rc.recipe("verl", {}, {})
    with pytest.raises(ValueError, match=r"got 'nobody'$"):
        rc.spec("nobody", {})


def test_a_loss_stays_an_ordinary_object():
    assert repr(pickle.loads(pickle.dumps(LOSS))) == repr(LOSS)
    assert not hasattr(LOSS, "__array__") and not hasattr(LOSS, "backward")
    with pytest.raises(AttributeError, match=r"no attribute 'values'$"):
        _ = LOSS.values


def test_a_mask_by_position_is_refused(tmp_path):
    """Row 25 of the users' review: mask and rollout_logp, swapped, passed silently."""
    mask, before = torch.ones(2, 3), {rc.dump: (tmp_path / "x.jsonl",)}
    for call in (rc.correct, rc.suggest, rc.policy_loss, rc.dump):
        given = (*before.get(call, ()), X, X - 0.01)
        with pytest.raises(TypeError, match=r"^batch: expected rc\.Batch\(mask=.*got Tensor; a mask is mask="):
            call(*given, mask)
    assert list(inspect.signature(rc.correct).parameters)[:3] == ["train_logp", "rollout_logp", "batch"]
    assert pickle.loads(pickle.dumps(rc.correct)) is rc.correct
