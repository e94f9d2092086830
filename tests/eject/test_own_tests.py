"""Frameworks' own tests, with files that were ejected in place of their function: one file for the settings of a call.

They need the frameworks' code and tests in the folder PEERS (make test-peers). TRL makes the ratio in the middle of a
method that no test of its reaches without vLLM: there a file stands next to the statements themselves.
"""

from __future__ import annotations

import functools
import sys
import types
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders import ejected
from conformance import campaign, patched
from conformance.batches import batch
from conformance.peers.skyrl import registry_of
from conformance.peers.trl import MODES, Trainer
from rollout_corr.eject import eject
from rollout_corr.frameworks.skyrl import dropin as skyrl

pytestmark = pytest.mark.peers

SKYRL = "tests/train/algorithms/test_off_policy_correction.py"
VERL = "tests/trainer/ppo/test_rollout_corr.py"
HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
CORRECTION = "compute_rollout_correction_and_rejection_mask"


@functools.cache
def module_of(framework, spec):
    """The module that a file is."""
    module = types.ModuleType("ejected")
    with mock.patch.dict(sys.modules, ejected.FRAMEWORKS):
        exec(compile(eject(spec, framework).source, "ejected", "exec"), module.__dict__)
    return module


def sources(framework, test):
    return [source for source in campaign.sources_of(framework) if (source.root / test).is_file()]


@pytest.mark.parametrize("source", sources("skyrl", SKYRL), ids=lambda source: source.version)
def test_skyrl(source):
    calls = []

    def by_settings(old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
        calls.append(off_policy_correction)
        settings = {name: getattr(off_policy_correction, name) for name in skyrl.FIELDS}
        spec = skyrl.config.spec(**settings)
        # SkyRL returns before it corrects.
        if not spec.acts:
            return None, {}, loss_mask
        correct = module_of("skyrl", spec).compute_off_policy_correction
        return correct(old_log_probs, rollout_logprobs, loss_mask, off_policy_correction)

    given = registry_of(source, compute_off_policy_correction=by_settings)
    assert patched.run(source.root, source.root / SKYRL, given) >= 20
    assert len(calls) >= 6


@pytest.mark.parametrize("source", sources("verl", VERL), ids=lambda source: source.version)
def test_verl(source):
    calls = []

    def by_settings(old_log_prob, rollout_log_prob, response_mask, **settings):
        calls.append(settings)
        try:
            spec = rc.spec("verl", settings)
        except TypeError:  # verl refuses a wrong type itself
            return theirs(old_log_prob, rollout_log_prob, response_mask, **settings)
        correct = vars(module_of("verl", spec))[CORRECTION]
        return correct(old_log_prob, rollout_log_prob, response_mask, **settings)

    theirs = source.cut(HELPER, CORRECTION)
    assert patched.run(source.root, source.root / VERL, {CORRECTION: by_settings}) >= 10
    assert len(calls) >= 8


@pytest.mark.parametrize("source", campaign.sources_of("trl"), ids=lambda source: source.version)
@pytest.mark.parametrize("mode", MODES)
def test_trl(source, mode):
    theirs = Trainer(source).ratio
    for clip_max, clip_min in ((3.0, None), (None, 0.5), (1.05, 0.9)):
        settings = {"mode": mode, "clip_max": clip_max, "clip_min": clip_min}
        made = module_of("trl", rc.spec(f"trl.{mode}", clip_max=clip_max, clip_min=clip_min))
        for kind in ("mild", "ties", "holes", "empty_rows", "one_token"):
            given = batch(kind, 1)
            ratio = made.vllm_importance_sampling_ratio(given.old, given.rollout, given.mask.long(), **settings)
            torch.testing.assert_close(ratio, theirs(given, **settings))
