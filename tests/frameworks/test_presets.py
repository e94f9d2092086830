"""Presets: the Spec of each that is not recorded, written out by hand from documents; names, errors, the tables."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import get_args

import pytest

import rollout_corr as rc
from builders import framework_tables
from builders.config_cases import WORDS, call, error, k1, option, rows
from builders.fresh import in_a_fresh_process
from builders.preset_cases import EXPECTED
from rollout_corr.frameworks.shared import names
from rollout_corr.frameworks.shared.lookup import every_preset, readable
from rollout_corr.frameworks.verl import options as verl_options

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_makes_the_spec_of_its_peer(name):
    assert rc.spec(name) == EXPECTED[name]


# What no framework has, and so no recording: bounds of k1 in the words of a ratio, a statistic left out.
WITH_ARGUMENTS = """
verl.decoupled_seq_is_rs(rs_threshold="0.6_1.6", k1_bounds="ratio") |
    Spec(Weight.product(upper=2), (ratio(0.6, 1.6, "sum", label="seq_sum_k1"),), report=("native", "verl"))
areal.kpop(upper=0.1) | Spec(Weight.token(), (Criterion("binary_kl_symmetric", upper=0.1),), "both")
flash_rl.tis(imp_ratio_cap=8) | Spec(Weight.token(upper=8))
"""


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("made", "expected"), rows(WITH_ARGUMENTS))
def test_arguments(made, expected):
    name, arguments = call(made)
    assert rc.spec(name, **arguments) == eval(expected, WORDS)


def test_every_preset_is_made_in_silence_and_documented():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(isinstance(rc.spec(name), rc.Spec) for name in rc.spec_names())
    assert all(found.matches and found.about.endswith(".") for found in every_preset())


UNKNOWN = """
rc.spec("verl.decoupled_token_iss") | unknown name ...did you mean 'verl.decoupled_token_is'
rc.spec("icepop") | did you mean 'glm.icepop' or 'nemo.icepop' or 'open_instruct.icepop'
rc.spec("verl.seq") | did you mean 'verl.decoupled_seq_is' or 'verl.decoupled_seq_is_rs' or 'verl.decoupled_k3_rs_
rc.spec("verll.seq") | did you mean 'verl.decoupled_seq_is' or
rc.spec("verl.qqqqqqqq") | unknown name 'verl.qqqqqqqq'; verl has verl.bypass_pg_geo_rs, verl.
rc.recipe("trl.token") | unknown name 'trl.token'; 'trl.token_mask' is a spec, a correction without a loss
rc.spec("qqqqqqqq") | unknown name 'qqqqqqqq'; rc.spec_names()
rc.spec("verl.gspo") | ; it is a recipe, a whole loss: rc.recipe('verl.gspo')
rc.spec("geo_mis") | unknown name 'geo_mis', which verl had once; write verl.decoupled_geo_rs, which has no veto
rc.spec("verl.ppo_is_bypass") | unknown name 'verl.ppo_is_bypass', which verl had once; write verl.bypass_ppo_clip
rc.recipe("pure_is") | unknown name 'pure_is', which verl had once; write verl.bypass_pg_is
rc.spec("seq_mis") | which verl had once; write verl.decoupled_seq_is_rs, which has a lower bound too
rc.spec("token_tis") | which verl had once; write verl.decoupled_token_is
rc.spec(3) | TypeError spec: expected a name ...got int 3
rc.recipe("verl.gsop") | unknown name 'verl.gsop', did you mean 'verl.gspo'
rc.recipe("tinker.qqqqqqqq") | unknown name 'tinker.qqqqqqqq'; tinker has tinker.cispo, tinker.importance
rc.recipe("verl.staleness") | ; it is a spec, a correction without a loss: rc.spec('verl.staleness')
"""


@pytest.mark.parametrize(("made", "message"), rows(UNKNOWN))
def test_unknown_name(made, message):
    kind, pattern = error(message)
    with pytest.raises(kind or ValueError, match=pattern):
        eval(made, {"rc": rc})


WRONG_ARGUMENTS = """
verl.decoupled_token_is(upper=-1) | ValueError (upper=-1): upper:
verl.decoupled_token_is(upper=None) | TypeError upper: expected a number, got NoneType None
verl.decoupled_token_is(uper=2) | TypeError unexpected keyword argument 'uper'
verl.decoupled_token_icepop(lower=6) | ValueError upper: expected lower <= upper
verl.decoupled_k3_rs(rs_threshold="0.1_0.2") | ValueError seq_mean_k3: expected one upper bound
verl.decoupled_k3_rs(rs_threshold=(0.1, 0.2)) | ValueError seq_mean_k3: expected one upper bound
skyrl.token_tis(clip_high=-1.0) | ValueError token_tis_ratio_clip_high: expected a number > 0, got -1
skyrl.token_mask(low=None) | TypeError low: expected a number, got NoneType None
skyrl.geometric_mask(high="1.01") | TypeError high: expected a number, got the string '1.01'
trl.token_truncate(clip_max=None) | ValueError (clip_max=None): ...got neither
trl.token_mask(clip_max=None) | ValueError got neither
openrlhf.dppo_like(gating="ratio") | ValueError gating: expected one of ['binary_kl', 'tv']
areal.kl(metric="k3") | ValueError metric: expected one of ['kl_k1', 'kl_k2', 'kl_k3'], got 'k3'
areal.kl(metric="kl_k1", upper="5") | TypeError upper: expected a number, got the string '5'
slime.tis(tis_clip=nan) | ValueError (tis_clip=nan): tis_clip:
nemo.mult_err(threshold=0) | ValueError Criterion.upper: expected a number > 0
"""


@pytest.mark.parametrize(("made", "message"), rows(WRONG_ARGUMENTS))
def test_wrong_arguments_name_the_recipe_and_the_argument(made, message):
    name, arguments = call(made)
    kind, pattern = error(message)
    with pytest.raises(kind, match=f"^spec {re.escape(name)}.*{pattern}"):
        rc.spec(name, **arguments)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2.0", (None, 2.0)),
        (" 0.5_2.0 ", (0.5, 2.0)),
        ((0.5, 2), (0.5, 2.0)),
        ("1e-1_1e1", (0.1, 10.0)),
        ("1_1", (1.0, 1.0)),
    ],
)
def test_threshold_grammar(value, expected):
    assert verl_options.bounds("t", value) == expected


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("", ValueError, "t: expected a number, got ''"),
        ("two", ValueError, "t: expected a number, got 'two'"),
        ("1_2_3", ValueError, "t: expected 'upper' or 'lower_upper', got '1_2_3'"),
        ("nan", ValueError, "t: expected a finite number > 0, got 'nan'"),
        ("0.5_inf", ValueError, "t: expected a finite number > 0, got 'inf'"),
        (math.nan, ValueError, "t: expected a number, got nan"),
        (0, ValueError, "t: expected a finite number > 0, got 0"),
        ("2_0.5", ValueError, "t: expected lower <= upper, got '2_0.5'"),
        ((1, 2, 3), ValueError, r"t: expected a pair \(lower, upper\), got \(1, 2, 3\)"),
        (("1_2", 3), ValueError, "t: expected a finite number > 0, got '1_2'"),
        (True, TypeError, "t: expected a number, got bool True"),
        (None, TypeError, "t: expected a number, got NoneType None"),
    ],
)
def test_threshold_grammar_refuses(value, kind, message):
    with pytest.raises(kind, match=f"^{message}$"):
        verl_options.bounds("t", value)


def test_every_rejection_option_of_verl():
    names = [f"{over}_{stat}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for stat in ("k1", "k2", "k3")]
    names.remove("seq_max_k1")
    assert sorted(verl_options.RS_OPTIONS) == sorted([*names, "binary_kl"])
    kpop = rc.Criterion("binary_kl_symmetric", upper=0.1, label="binary_kl", eps=1e-6)
    assert verl_options.criteria("binary_kl", 0.1) == (kpop,)
    for name in names:
        expected = k1(name, 0.5, 2) if name.endswith("k1") else option(name, None, 2.0)
        assert verl_options.criteria(name, 2.0) == (expected,)


@pytest.mark.parametrize("table", ["presets", "losses", "names"])
def test_tables_are_up_to_date(table):
    made = framework_tables.TABLES[table]()
    written = Path(names.__file__ if table == "names" else DOCS / f"{table}.md").read_text(encoding="utf-8")
    assert made.rstrip("\n") in written, f"run: python -m builders.framework_tables {table}, and put it there"
    assert table != "presets" or all(f"| `{name}(" in made for name in rc.spec_names())


def test_a_name_imports_its_framework_alone():
    code = (
        "import sys\n"
        "import rollout_corr as rc\n"
        "def loaded():\n"
        "    modules = (name.split('.') for name in sys.modules if name.startswith('rollout_corr.frameworks.'))\n"
        "    return {parts[2] for parts in modules} - {'shared'}\n"
        "assert not loaded(), loaded()\n"
        "rc.spec('glm.icepop'); rc.recipe('glm.double_sided'); rc.spec('areal.token_mask')\n"
        "rc.spec('areal', {'upper': 2.0}).to_config('areal'); rc.recipe('areal', {'eps_clip': 0.2})\n"
        "assert loaded() == {'others', 'areal'}, loaded()\n"
        "assert 'rollout_corr.frameworks.areal.dropin' not in sys.modules\n"
    )
    in_a_fresh_process(exec, code, {})


def test_names_for_type_checkers():
    assert sorted(get_args(rc.SpecName)) == rc.spec_names() and sorted(get_args(rc.RecipeName)) == rc.recipe_names()
    assert list(get_args(rc.FrameworkName)) == readable("read")
    # None of torchtitan's settings concerns a correction: it has recipes alone.
    assert sorted([*get_args(rc.FrameworkName), "torchtitan"]) == readable("recipe")
