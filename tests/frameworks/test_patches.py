"""docs/patches: each carries what eject writes today, applies to its framework's code, and passes its own test there.

The second half needs the frameworks' files, installed or in the folder PEERS (make test-peers).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders.patches import CARRIED, carried, patch_of, remade, with_file
from conformance import campaign
from conformance import patched as on_patched
from conformance.batches import batch
from conformance.peers import skyrl
from conformance.peers.trl import GENERATE, TRAINER
from conformance.sources import Source
from conformance.verl_parts import Proto
from rollout_corr.eject import check

# What a patch goes on top of.
BELOW = {"verl-fused": "verl"}
# Where a file takes the first log-probs: other numbers there have to be noticed.
FIRST = {
    "verl": "old_log_prob.detach", "verl-fused": "old_log_prob.detach", "skyrl": "old_log_probs.detach",
    "trl": "old_per_token_logps.detach",
}  # fmt: skip
# The frameworks' own tests of what a patch changes. TRL's need vLLM and a GPU.
OWN = {
    "verl": "tests/trainer/ppo/test_rollout_corr.py",
    "verl-fused": "tests/trainer/ppo/test_rollout_corr.py",
    "skyrl": "tests/train/algorithms/test_off_policy_correction.py",
}


@pytest.mark.parametrize("name", [*(name for name in CARRIED if name != "verl-fused"),
                                  pytest.param("verl-fused", marks=pytest.mark.slow)])  # fmt: skip
def test_it_brings_what_eject_writes_today(name):
    text = patch_of(name).read_text(encoding="utf-8")
    assert remade(name) == text, "older than the generator's output: python -m builders.patches"
    if name == "trl":
        same, said = check(carried(text, CARRIED[name].path))
        assert same and said[1] == "not edited since"


def test_a_file_is_replaced_and_nothing_else():
    text = patch_of("trl").read_text(encoding="utf-8")
    path = CARRIED["trl"].path
    other = with_file(text, path, "x = 1\n")
    assert carried(other, path) == "x = 1\n"
    assert with_file(other, path, carried(text, path)) == text
    with pytest.raises(ValueError, match=r"expected a patch that adds nothing\.py once, got one that does 0 times"):
        with_file(text, "nothing.py", "")


# verl's patch adds a setting to configuration files that releases lack.
SOURCES = [
    (name, source)
    for name in CARRIED
    for source in campaign.sources_of(CARRIED[name].framework)
    if "." not in source.version or name == "trl"
]
on_every_source = pytest.mark.parametrize(
    ("name", "source"), SOURCES, ids=lambda x: x if isinstance(x, str) else x.version
)


def tree_of(name: str, source: Source, into: Path) -> Source:
    """The code of a framework as patched."""
    patches = [patch_of(one) for one in (BELOW.get(name), name) if one]
    tree = on_patched.overlay(source.root, CARRIED[name].framework, patches[0], into)
    for patch in patches:
        on_patched.apply(patch, tree)
    return Source(source.framework, source.version, tree, source.kind)


def given_to(name: str, source: Source) -> dict[str, object]:
    """Objects in place of what the code of a framework imports."""
    if name == "skyrl":
        return skyrl.registry_of(source)
    given: dict[str, object] = {"DataProto": Proto}
    if name == "verl-fused":
        # Triton reads the source of a kernel from the file of its module.
        protocol = ModuleType("verl.protocol")
        vars(protocol)["DataProto"] = Proto
        with pytest.MonkeyPatch.context() as put:
            put.setitem(sys.modules, "verl", ModuleType("verl"))
            put.setitem(sys.modules, "verl.protocol", protocol)
            spec = importlib.util.spec_from_file_location("fused", source.root / CARRIED[name].path)
            given["rollout_corr_fused"] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return given


@pytest.mark.peers
@on_every_source
def test_it_applies_and_its_own_test_notices_other_numbers(name, source, tmp_path):
    right, wrong = (tree_of(name, source, tmp_path / kind) for kind in ("right", "wrong"))
    tests = [path for path in on_patched.files_of(patch_of(name)) if path.startswith("tests/")]
    calls = sum(on_patched.run(right.root, right.root / test, given_to(name, right)) for test in tests)
    assert calls >= 4
    file = wrong.root / CARRIED[name].path
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(FIRST[name], FIRST[name].replace(".", ".add(0.05).")), encoding="utf-8")
    with pytest.raises(AssertionError):
        on_patched.run(wrong.root, wrong.root / tests[0], given_to(name, wrong))


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "source"), [(name, source) for name, source in SOURCES if name in OWN],
    ids=lambda x: x if isinstance(x, str) else x.version,
)  # fmt: skip
def test_the_frameworks_own_tests_pass(name, source, tmp_path):
    tree, own = tree_of(name, source, tmp_path / "tree"), source.root / OWN[name]
    assert on_patched.run(tree.root, own, given_to(name, tree)) >= 10


@pytest.mark.peers
@pytest.mark.parametrize("source", [source for name, source in SOURCES if name == "trl"], ids=lambda x: x.version)
def test_trls_trainer_runs_what_was_chosen(source, tmp_path):
    tree = tree_of("trl", source, tmp_path / "tree")
    first, last = "per_token_logps_diff = ", "if self.vllm_importance_sampling_backend"
    ratio = tree.lines(TRAINER, GENERATE, first, last)
    settings = {"mode": "sequence_mask", "clip_max": 3.0, "clip_min": None}
    trainer = SimpleNamespace(**{f"vllm_importance_sampling_{name}": x for name, x in settings.items()})
    found = []
    for trainer.vllm_importance_sampling_backend in ("eager", "specialized"):
        given = batch("mild", 1)
        made = ratio(
            self=trainer,
            old_per_token_logps=given.old,
            sampling_per_token_logps=given.rollout,
            mask=given.mask.long(),
        )
        found.append(made["vllm_importance_sampling_ratio"])
    torch.testing.assert_close(*found)
    trainer.vllm_importance_sampling_clip_max = 2.0
    with pytest.raises(ValueError, match="was written for"):
        ratio(self=trainer, old_per_token_logps=given.old, sampling_per_token_logps=given.rollout, mask=given.mask)
