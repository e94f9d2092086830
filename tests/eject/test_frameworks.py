"""Files with `--for` against the functions of the frameworks that are installed or in PEERS (make test-peers)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from builders.files_to_copy import loaded
from conformance import campaign
from conformance.batches import FINITE, batch
from conformance.peers import skyrl, verl
from conformance.peers.trl import Trainer
from conformance.verl_parts import Proto
from rollout_corr.eject import FRAMEWORKS, eject, wanted

pytestmark = pytest.mark.peers

# NaN behind the mask reaches verl's and SkyRL's own results: upstream/verl-nan-behind-mask.md.
KINDS = [kind for kind in FINITE if kind != "nan_behind_mask"]


def cases():
    """Each version of the three frameworks that can be had, and each of its presets that a file can say."""
    for source in (source for framework in ("verl", "skyrl", "trl") for source in campaign.sources_of(framework)):
        if source.framework == "verl" and verl.is_that_old(source):
            continue  # its settings are others
        for name in (name for name in rc.spec_names() if name.startswith(f"{source.framework}.")):
            try:
                wanted.of_correction(rc.spec(name))
                rc.spec(name).to_config(source.framework)
            except ValueError:
                continue
            yield pytest.param(name, source, id=f"{name}-{source.version}")


def verls(name, source, file, given):
    theirs = source.cut(verl.HELPER, verl.MAIN, DataProto=Proto)
    protocol = ModuleType("verl.protocol")
    protocol.DataProto = Proto
    found = []
    with pytest.MonkeyPatch.context() as put:
        put.setitem(sys.modules, "verl", ModuleType("verl"))
        put.setitem(sys.modules, "verl.protocol", protocol)
        for correct in (getattr(file, FRAMEWORKS["verl"]), theirs):
            try:
                proto, mask, _ = correct(given.old, given.rollout, given.mask, **file.CONFIG)
            except (ValueError, ZeroDivisionError):
                assert correct is theirs  # verl raises on a batch of nothing, and where everything is rejected
                return None
            found.append((None if proto is None else proto.batch["rollout_is_weights"], mask))
    return found


def skyrls(name, source, file, given):
    settings = dict.fromkeys(("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high", "geo_mask_high",
                              "geo_mask_low", "product_mask_high", "product_mask_low")) | file.CONFIG  # fmt: skip
    config, found = SimpleNamespace(**settings), []
    for correct in (getattr(file, FRAMEWORKS["skyrl"]), source.cut(skyrl.CORRECTION, skyrl.COMPUTE)):
        ratio, _, mask = correct(given.old, given.rollout, given.mask.float(), config)
        found.append((ratio, mask))
    return found


def trls(name, source, file, given):
    mode, clip_max, clip_min = (
        file.CONFIG[f"vllm_importance_sampling_{key}"] for key in ("mode", "clip_max", "clip_min")
    )
    mine, _ = getattr(file, FRAMEWORKS["trl"])(given.old, given.rollout, given.mask.long(), mode, clip_max, clip_min)
    return [(mine, given.mask), (Trainer(source).ratio(given, mode, clip_max, clip_min), given.mask)]


@pytest.mark.parametrize(("name", "source"), [*cases()])
def test_a_file_gives_what_the_frameworks_own_function_gives(name, source):
    framework = name.partition(".")[0]
    file, run = loaded(eject(name, framework=framework)), {"verl": verls, "skyrl": skyrls, "trl": trls}[framework]
    compared = 0
    for kind in KINDS:
        for seed in range(6):
            given = batch(kind, seed)
            found = run(name, source, file, given)
            if found is None:
                continue
            (weights, mask), (their_weights, their_mask) = found
            assert torch.equal(mask != 0, their_mask != 0), (kind, seed)
            assert (weights is None) == (their_weights is None)
            if weights is not None:
                assert weights.shape == their_weights.shape
                counts = given.mask if weights.shape == given.mask.shape else given.mask.any(1, keepdim=True)
                mine, theirs = (torch.where(counts, x.double(), 0.0) for x in (weights, their_weights))
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)
            compared += 1
    assert compared >= 30
