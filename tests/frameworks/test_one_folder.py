"""A framework is one folder: a toy one is found by name, and no other module imports a framework."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from package.test_layers import imports, modules
from rollout_corr import frameworks
from rollout_corr.frameworks.shared import lookup, preset
from rollout_corr.metrics import peers
from rollout_corr.specs import choices, correction

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
# The framework that the page shows.
CONFIG = PAGE.read_text(encoding="utf-8").partition('```python\n"""toy: ')[2].partition("```")[0]
CONFIG = f'"""toy: {CONFIG}'
METRICS = """
from rollout_corr.metrics.peers import Columns

LOCAL_SUMS = ()

def columns(spec, names):
    return Columns(call_sums=("toy/rows",))

def role(criterion):
    return None

def intervals(spec, names):
    return {}

def collect(findings, spec):
    return {}, {}

def per_call(sums, maxima, spec):
    return {"toy/rows": sums["rows"]}, {}

def formulas(spec):
    return {"toy/mean_weight": "'weight' / 'tokens'", "toy/rows": "'toy/rows'"}
"""
DROPIN = """
def install():
    return "installed"
"""
INIT = """
from rollout_corr.frameworks import lazily

__getattr__ = lazily(__name__, dropin=("install",))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder called toy on the path of the frameworks, gone without a trace afterwards."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, source in {
        "__init__": INIT,
        "config": CONFIG,
        "metrics": METRICS,
        "dropin": DROPIN,
    }.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setattr(frameworks, "__path__", [*frameworks.__path__, str(tmp_path)])
    yield
    for name in [name for name in sys.modules if name.startswith("rollout_corr.frameworks.toy")]:
        del sys.modules[name]
    for registry in (preset.PRESETS, lookup.RECIPES):
        for name in [name for name in registry if name.startswith("toy.")]:
            del registry[name]
    lookup.part.cache_clear()


@pytest.mark.usefixtures("toy")
def test_a_folder_is_a_framework():
    spec = rc.Spec(weight=rc.Weight.token(upper=3.0))
    assert rc.spec("toy.tis", cap=3.0) == rc.spec("toy", {"cap": 3.0}) == spec
    assert "toy.tis" in rc.spec_names() and "toy.tis" in rc.recipe_names()
    made = rc.recipe("toy.tis", eps=0.1, cap=3.0)
    assert made.loss.surrogate == rc.PPO(0.1, 0.1) and made.spec == spec
    assert rc.recipe("toy", {"algorithm": {"cap": 3.0, "eps": 0.1}}) == made and spec.to_config("toy") == {"cap": 3.0}
    assert rc.spec("toy", {"correction": "off"}) == rc.Spec() and rc.Spec().to_config("toy") == {"correction": "off"}
    with pytest.raises(ValueError, match=r"entropy_coef: add the bonus to the value of policy_loss"):
        rc.recipe("toy", {"entropy_coef": 0.1})
    assert [problem.key for problem in rc.check_config("toy", {"cap": -1.0})] == ["cap"]
    with pytest.raises(TypeError, match=r"^spec\('toy'\): cap: expected a number, got the string '3'$") as caught:
        rc.spec("toy", {"cap": "3"})
    assert caught.value.key == "cap"
    with pytest.raises(ValueError, match=r"unknown name 'toy\.tiss', did you mean 'toy\.tis'"):
        rc.spec("toy.tiss")
    assert frameworks.toy.install() == "installed" and dir(frameworks.toy) == ["install"]


@pytest.mark.usefixtures("toy")
def test_its_metrics_need_its_name_in_two_lists(monkeypatch):
    """Spec.report accepts the names of REPORTS; SCHEMES has their modules."""
    monkeypatch.setattr(correction, "REPORTS", (*choices.REPORTS, "toy"))
    monkeypatch.setattr(peers, "_LOADED", {})
    monkeypatch.setitem(peers.SCHEMES, "toy", "rollout_corr.frameworks.toy.metrics")
    spec = rc.Spec(weight=rc.Weight.token(upper=2.0), report=("native", "toy"))
    out = rc.correct(torch.zeros(3, 4), torch.zeros(3, 4), spec=spec, backend="torch")
    assert out.metrics("toy") == {"toy/mean_weight": 1.0, "toy/rows": 3.0}


def test_no_other_module_imports_a_framework():
    own = {*lookup.frameworks(), "others"}
    theirs = {module for module in modules() if module.startswith("frameworks.") and module.split(".")[1] in own}
    found = {module: imports(module, strings=False) & theirs for module in {*modules()} - theirs}
    assert len(theirs) > 20 and not {module: of for module, of in found.items() if of}


def test_facade_shows_its_surface_alone():
    assert dir(rc) == sorted([*rc.__all__, "__version__"])
    for name in rc.__all__:
        assert getattr(rc, name) is not None
    with pytest.raises(AttributeError, match="module 'rollout_corr' has no attribute 'spce'"):
        rc.spce  # noqa: B018  # looked up, not used
