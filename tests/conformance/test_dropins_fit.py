"""Every drop-in on the functions of the versions that are installed or in the folder PEERS (make test-peers).

Modules are made of the frameworks' own functions, cut out of their files, and `install` replaces them: a version whose
functions are gone, or take other arguments, is found here.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import pytest

from conformance import campaign
from conformance.peers import verl
from frameworks.calls import put
from rollout_corr.frameworks.shared import lookup

pytestmark = pytest.mark.peers

SWITCHES = {"areal": [{}], "openrlhf": [{}], "skyrl": [{}], "trl": [{}], "verl": [{}, {"losses": True}], "xtuner": [{}]}
SOURCES = [source for framework in SWITCHES for source in campaign.sources_of(framework)]
NAMES = [f"{source.framework}-{source.version}" for source in SOURCES]


def install_on(source, drop_in, switches, monkeypatch):
    """Replace the functions of a version, and restore them."""

    def cut(target):
        return source.cut(f"{target.module.replace('.', '/')}.py", target.name)

    with monkeypatch.context() as patch:
        try:
            drop_in.install(**switches)
            targets = drop_in.DROP_IN.targets
            drop_in.uninstall()
            functions = put(targets, cut, patch)
            status = drop_in.install(**switches)
            assert status.in_place and set(status.covered) == set(status.replaced) == set(functions), status.why
        finally:
            drop_in.uninstall()


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_the_drop_in_fits(source, monkeypatch):
    drop_in = importlib.import_module(f"rollout_corr.frameworks.{source.framework}.dropin")
    root = ModuleType(source.framework)
    root.__version__ = "of this test"
    monkeypatch.setitem(sys.modules, source.framework, root)
    if source.framework == "verl" and verl.is_that_old(source):
        with pytest.raises(RuntimeError, match=r"serves verl 0\.9\.0, 0\.9\.1"):
            install_on(source, drop_in, {}, monkeypatch)
        return
    for switches in SWITCHES[source.framework]:
        install_on(source, drop_in, switches, monkeypatch)


@pytest.mark.parametrize("source", [s for s in SOURCES if s.framework == "verl"], ids=lambda source: source.version)
def test_the_trainers_of_verl_call_what_is_replaced(source):
    """By name, at the call: what `install` puts into the module they find."""
    helper = "compute_rollout_correction_and_add_to_batch"
    trainers = sorted((source.root / "verl/trainer/ppo").rglob("*.py"))
    callers = [path for path in trainers if f"{helper}(" in path.read_text(encoding="utf-8")]
    v1 = source.root / "verl/trainer/ppo/v1"
    assert source.root / "verl/trainer/ppo/ray_trainer.py" in callers
    assert not v1.exists() or any(v1 in path.parents for path in callers)


# The class of the configuration of the correction.
CLASSES = {
    "verl": ("verl/trainer/config/algorithm.py", "RolloutCorrectionConfig", "rollout_correction"),
    "xtuner": ("xtuner/v1/rl/rollout_is.py", "RolloutImportanceSampling", "rollout_is"),
    "skyrl": ("skyrl/train/config/config.py", "OffPolicyCorrectionConfig", "off_policy_correction"),
}


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_every_setting_of_a_correction_has_a_row(source):
    path, name, block = CLASSES.get(source.framework, ("", "", ""))
    if not (source.root / path).is_file() or (source.framework == "verl" and verl.is_that_old(source)):
        return
    text = (source.root / path).read_text(encoding="utf-8")
    body = re.split(r"\n(?=\S)", text.partition(f"class {name}")[2])[0]
    fields = {*re.findall(r"^    (\w+): .*=", body, re.MULTILINE)}
    assert fields and fields <= {*lookup.part(source.framework).TABLE[block].rows}, source
