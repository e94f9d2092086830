"""Presets: the Spec of every recipe written out by hand from the peers' documents, names, errors, the table."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import rollout_corr as rc
from builders.config_cases import call, error, k1, option, rows
from builders.preset_cases import EXPECTED, with_arguments
from rollout_corr.api.correct import correct
from rollout_corr.frameworks.shared import names, tables
from rollout_corr.frameworks.shared.lookup import every_preset, readable
from rollout_corr.frameworks.shared.tables import END
from rollout_corr.frameworks.verl import options as verl_options
from rollout_corr.specs.bounds_of_batch import RULES
from rollout_corr.specs.checked import expression
from rollout_corr.specs.correction import Criterion, Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_recipe_is_expected():
    assert rc.spec_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_recipe_makes_the_spec_of_its_peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rc.spec(name) == EXPECTED[name]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("name", "arguments", "expected"), with_arguments())
def test_arguments(name, arguments, expected):
    assert rc.spec(name, **arguments) == expected


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_specs_are_plain_values(name):
    spec = rc.spec(name)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert len({spec, rc.spec(name)}) == 1


def test_documented():
    for found in every_preset():
        assert found.matches, found.name
        assert (found.build.__doc__ or "").strip().endswith("."), found.name


def test_names_are_sorted_strings():
    found = rc.spec_names()
    assert isinstance(found, list) and found == sorted(found) and "verl.decoupled_token_is" in found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("verl.decoupled_token_iss", r"did you mean 'verl\.decoupled_token_is'"),
        ("decoupled_geo_rs", r"did you mean 'verl\.decoupled_geo_rs'"),
        ("icepop", r"did you mean 'glm\.icepop' or 'nemo\.icepop' or 'open_instruct\.icepop'"),
        ("qqqqqqqq", r"unknown name 'qqqqqqqq'; rc\.spec_names\(\)"),
    ],
)
def test_unknown_name(name, hint):
    with pytest.raises(ValueError, match=hint):
        rc.spec(name)


def test_name_that_is_no_text():
    with pytest.raises(TypeError, match=r"spec: expected a name .*got int 3"):
        rc.spec(3)


WRONG_ARGUMENTS = """
verl.decoupled_token_is(upper=-1) | ValueError (upper=-1): upper:
verl.decoupled_token_is(upper=True) | TypeError upper: expected a number, got bool True
verl.decoupled_token_is(upper=None) | TypeError upper: expected a number, got NoneType None
verl.decoupled_token_is(uper=2) | TypeError unexpected keyword argument 'uper'
verl.decoupled_token_icepop(lower=6) | ValueError upper: expected lower <= upper
verl.decoupled_seq_is_rs(k1_bounds="right") | ValueError k1_bounds: expected one of ['verl', 'ratio']
verl.decoupled_geo_rs(rs_threshold=0.52) | ValueError rs_threshold of seq_mean_k1: ...quote it: '0.5_2'
verl.decoupled_geo_rs(rs_threshold="2_0.5") | ValueError expected lower <= upper, got '2_0.5'
verl.decoupled_k3_rs(rs_threshold="0.1_0.2") | ValueError seq_mean_k3: expected one upper bound
verl.decoupled_k3_rs(rs_threshold=(0.1, 0.2)) | ValueError seq_mean_k3: expected one upper bound
xtuner.reasoning(threshold=(0.5, 5)) | ValueError rollout_is_threshold: ...xtuner begins with upper
xtuner.reasoning(threshold=5) | TypeError rollout_is_threshold: expected a pair (upper, lower)
skyrl.token_tis(clip_high=-1.0) | ValueError token_tis_ratio_clip_high: expected a number > 0, got -1
skyrl.token_mask(low=None) | TypeError low: expected a number, got NoneType None
skyrl.geometric_mask(high="1.01") | TypeError high: expected a number, got the string '1.01'
trl.token_truncate(clip_max=None) | ValueError (clip_max=None): ...got neither
trl.token_mask(clip_max=None) | ValueError got neither
trl.token_mask(clip_max=1, clip_min=2) | ValueError lower <= upper
openrlhf.dppo_like(gating="ratio") | ValueError gating: expected one of ['binary_kl', 'tv']
areal.kl(metric="k3") | ValueError metric: expected one of ['kl_k1', 'kl_k2', 'kl_k3'], got 'k3'
areal.kl(level="seq") | ValueError level: expected one of
areal.kl(agg="median") | ValueError agg: expected one of
areal.kl(metric="kl_k1", upper="5") | TypeError upper: expected a number, got the string '5'
areal.seq(agg="median") | ValueError agg: expected one of
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
        (2, (None, 2.0)),
        ("2.0", (None, 2.0)),
        (" 0.5_2.0 ", (0.5, 2.0)),
        ("0.5 _ 2.0", (0.5, 2.0)),
        ((0.5, 2), (0.5, 2.0)),
        ([0.5, 2], (0.5, 2.0)),
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
        ("_", ValueError, "t: expected a number, got ''"),
        ("0.5_", ValueError, "t: expected a number, got ''"),
        ("two", ValueError, "t: expected a number, got 'two'"),
        ("1_2_3", ValueError, "t: expected 'upper' or 'lower_upper', got '1_2_3'"),
        ("nan", ValueError, "t: expected a finite number > 0, got 'nan'"),
        ("inf", ValueError, "t: expected a finite number > 0, got 'inf'"),
        ("0.5_inf", ValueError, "t: expected a finite number > 0, got 'inf'"),
        ("nan_2", ValueError, "t: expected a finite number > 0, got 'nan'"),
        (math.nan, ValueError, "t: expected a number, got nan"),
        (math.inf, ValueError, "t: expected a finite number > 0, got inf"),
        (0, ValueError, "t: expected a finite number > 0, got 0"),
        ("0", ValueError, "t: expected a finite number > 0, got '0'"),
        (-2, ValueError, "t: expected a finite number > 0, got -2"),
        ("-1_2", ValueError, "t: expected a finite number > 0, got '-1'"),
        ("2_0.5", ValueError, "t: expected lower <= upper, got '2_0.5'"),
        ((1, 2, 3), ValueError, r"t: expected a pair \(lower, upper\), got \(1, 2, 3\)"),
        (("1_2", 3), ValueError, "t: expected a finite number > 0, got '1_2'"),
        ((True, 2), TypeError, "t: expected a number, got bool True"),
        (True, TypeError, "t: expected a number, got bool True"),
        (None, TypeError, "t: expected a number, got NoneType None"),
        ({}, TypeError, "t: expected a number, got dict {}"),
    ],
)
def test_threshold_grammar_refuses(value, kind, message):
    with pytest.raises(kind, match=f"^{message}$"):
        verl_options.bounds("t", value)


def test_every_rejection_option_of_verl():
    names = [f"{over}_{stat}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for stat in ("k1", "k2", "k3")]
    names.remove("seq_max_k1")
    assert sorted(verl_options.RS_OPTIONS) == sorted(names)
    for name in names:
        expected = k1(name, 0.5, 2) if name.endswith("k1") else option(name, None, 2.0)
        assert verl_options.criteria(name, 2.0) == (expected,)


def verdicts(train: torch.Tensor, rollout: torch.Tensor, spec: Spec, **more: object):
    """`correct` without the peers' metrics, which are tested elsewhere."""
    return correct(train, rollout, spec=replace(spec, report=()), **more)


def log_probs(*log_ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Train and rollout log-probs whose differences are the given ones, all probabilities small enough."""
    d = torch.tensor(log_ratios, dtype=torch.float64)
    rollout = torch.full_like(d, -3.0)
    return rollout + d, rollout


def test_k1_bounds_as_verl_compares_them_and_as_its_documentation_says():
    # verl#6377: with 0.6_1.4 verl keeps a ratio of 1.5, and rejects one of 0.65.
    train, rollout = log_probs([math.log(1.5)], [math.log(0.65)], [math.log(1.0)], [math.log(1.7)])
    verl = rc.spec("verl.decoupled_geo_rs", rs_threshold="0.6_1.4")
    mended = rc.spec("verl.decoupled_geo_rs", rs_threshold="0.6_1.4", k1_bounds="ratio")
    assert verdicts(train, rollout, verl).keep.tolist() == [True, False, True, False]
    assert verdicts(train, rollout, mended).keep.tolist() == [False, True, True, False]


@pytest.mark.parametrize(("agg", "kept"), [("sum", [False, True]), ("mean", [True, True]), ("max", [False, True])])
def test_areal_k1_is_d(agg, kept):
    # AReaL: keep iff the aggregate of D is at most upper.
    train, rollout = log_probs([0.6, 0.1], [-0.6, -0.1])
    spec = rc.spec("areal.kl", metric="kl_k1", level="sequence", agg=agg, upper=0.5)
    assert verdicts(train, rollout, spec).keep.tolist() == kept


def test_skyrl_sums_run_over_what_is_left():
    # The second token goes by the token mask, so the product of the first alone is the weight and is tested.
    train, rollout = log_probs([0.1, 3.0])
    spec = rc.spec("skyrl.tldr", geo_mask_low=0.5, geo_mask_high=1.2)
    out = verdicts(train, rollout, spec, mask=torch.ones(1, 2, dtype=torch.bool))
    assert out.keep.tolist() == [True] and out.mask.tolist() == [[True, False]]
    # SkyRL leaves the weight of a rejected token as it is.
    assert out.weights[0].tolist() == pytest.approx([math.exp(0.1), 2.0])


def test_vaco_drops_the_outward_tokens_only():
    train, rollout = log_probs([2.0, -2.0])
    out = verdicts(train, rollout, rc.spec("open_instruct.vaco", mask_upper=0.5), advantages=torch.tensor([1.0]))
    assert out.weights[0].tolist() == pytest.approx([0.0, math.exp(-2.0)])
    assert out.keep.tolist() == [True]


def test_trl_and_unsloth_read_nan_as_one():
    train, rollout = log_probs([math.nan, 0.5])
    for spec in (rc.spec("trl.token_truncate"), rc.spec("unsloth.token_truncate")):
        assert verdicts(train, rollout, spec).weights[0].tolist() == pytest.approx([1.0, math.exp(0.5)])


def test_expression_builds_what_it_says():
    names = {"Spec": Spec, "Weight": Weight, "Criterion": Criterion, **RULES}
    for spec in EXPECTED.values():
        assert eval(expression(spec), names) == spec
    assert expression(Spec(Weight.token(upper=2.0))) == "Spec(weight=Weight.token(upper=2.0))"


def test_table_in_the_docs_is_up_to_date():
    text = (DOCS / "presets.md").read_text(encoding="utf-8")
    begin = tables.BEGIN.format("presets")
    assert text.count(begin) == text.count(END) == 1
    written = text[text.index(begin) : text.index(END) + len(END)]
    assert written == tables.presets().rstrip("\n"), (
        "run: python -m rollout_corr.frameworks presets, and put it into docs/presets.md"
    )


def test_table_says_everything():
    text = tables.presets()
    for name in EXPECTED:
        assert f"| `{name}(" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5


@pytest.mark.parametrize("table", ["presets", "losses", "names"])
def test_module_prints_the_tables(table):
    command = [sys.executable, "-m", "rollout_corr.frameworks", table]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=DOCS.parent)
    assert done.stdout == getattr(tables, table)()


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
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_for_type_checkers_are_up_to_date():
    written = Path(names.__file__).read_text(encoding="utf-8")
    assert written == tables.names(), (
        "run: python -m rollout_corr.frameworks names > rollout_corr/frameworks/shared/names.py"
    )
    assert sorted(get_args(rc.SpecName)) == rc.spec_names() and sorted(get_args(rc.RecipeName)) == rc.recipe_names()
    assert list(get_args(rc.FrameworkName)) == readable("read") == readable("recipe")
